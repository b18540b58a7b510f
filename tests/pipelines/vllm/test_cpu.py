"""On a CPU: settings of sampling reach every drafted token of their request, keys the norm of their layer."""

from types import SimpleNamespace

import torch
from torch import Tensor

from vlmdistill.pipelines.vllm.plugin.cpu import constraints, normed_keys


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


def test_the_keys_of_each_layer_have_its_own_norm() -> None:
    key_LTKd, weight_Ld = torch.randn(2, 5, 3, 8), torch.rand(2, 8) + 0.5
    model = SimpleNamespace(_k_norm_weights=weight_Ld, _rms_norm_eps=1e-6)
    found_LTKd = normed_keys(model, key_LTKd)
    for layer in range(2):
        norm = torch.nn.RMSNorm(8, eps=1e-6)
        norm.weight.data = weight_Ld[layer]
        torch.testing.assert_close(found_LTKd[layer], norm(key_LTKd[layer]))
