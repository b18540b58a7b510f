"""On a CPU: settings of sampling reach every drafted token of their request, keys the norm of their layer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from vlmdistill.pipelines.vllm.plugin.cpu import (
    constraints,
    normed_keys,
    without_unfinished,
)


def top_k_top_p(logits_NV: Tensor, k_N: Tensor | None, p_N: Tensor | None) -> Tensor:
    """Shows the arguments; like vLLM's, it fails on no rows."""
    assert k_N is None or k_N.max() > 0
    return torch.stack(
        [logits_NV[:, 0], *(one for one in (k_N, p_N) if one is not None)]
    )


def test_each_drafted_token_has_the_settings_of_its_request() -> None:
    sampling = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.25, 4.0, 0.0, 2.0]),
        top_k=torch.tensor([7, 8, 9, 10]),
        top_p=None,
    )
    found = constraints(top_k_top_p)(
        torch.ones(6, 3), torch.tensor([2, 2, 3, 6]), sampling
    )
    assert found[0].tolist() == [4, 4, 1, 0.5, 0.5, 0.5]
    assert found[1].tolist() == [7, 7, 9, 10, 10, 10]


def test_a_step_without_drafts_leaves_nothing_to_filter() -> None:
    sampling = SimpleNamespace(
        all_greedy=False,
        temperature=torch.ones(2),
        top_k=torch.tensor([20, 20]),
        top_p=None,
    )
    found = constraints(top_k_top_p)(torch.empty(0, 3), torch.tensor([0, 0]), sampling)
    assert found.shape == (0, 3)


def test_the_generator_of_an_unfinished_prompt_is_left_alone() -> None:
    """vLLM would wind it back, which a generator of a CPU cannot."""

    class Runner:
        discard_request_mask = SimpleNamespace(np=np.array([False, True, True, True]))

        def __init__(self) -> None:
            generators = {row: torch.Generator() for row in (0, 1, 3)}
            self.input_batch = SimpleNamespace(num_reqs=3, generators=generators)

        def sample_tokens(self, fails: bool) -> list[int]:
            if fails:
                raise KeyError
            return [*self.input_batch.generators]

    runner = Runner()
    sample = without_unfinished(Runner.sample_tokens)
    assert sample(runner, False) == [0, 3]  # row 3 is not in the batch
    with pytest.raises(KeyError):
        sample(runner, fails=True)
    assert sorted(runner.input_batch.generators) == [0, 1, 3]


def test_the_keys_of_each_layer_have_its_own_norm() -> None:
    key_LTKd, weight_Ld = torch.randn(2, 5, 3, 8), torch.rand(2, 8) + 0.5
    model = SimpleNamespace(_k_norm_weights=weight_Ld, _rms_norm_eps=1e-6)
    found_LTKd = normed_keys(model, key_LTKd)
    for layer in range(2):
        norm = torch.nn.RMSNorm(8, eps=1e-6)
        norm.weight.data = weight_Ld[layer]
        torch.testing.assert_close(found_LTKd[layer], norm(key_LTKd[layer]))
