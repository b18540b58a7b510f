"""What counts as a near-tie: what passes over one token and over several differ by, and no more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.pipelines.bench.conftest import held_out
from vlmdistill.pipelines.bench.greedy import NEAR_TIE
from vlmdistill.pipelines.bench.side_by_side import SideBySide
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


@torch.inference_mode()
def other_than_best(
    target: VisionLanguageTarget, prompt: Prompt, least: float, most: float
) -> int | None:
    """A first token that is less likely than the best by so many units of rounding."""
    prefix = target.prefill(target.encode(prompt.messages), ())
    logits_V = target.logits(prefix.feature("hidden", "text")[-1:])[0]
    gap_V = (logits_V.max() - logits_V) / rounding(target, logits_V)
    found = ((gap_V >= least) & (gap_V <= most) & (gap_V != 0)).nonzero()
    return int(found[0, 0]) if len(found) else None


def rounding(target: VisionLanguageTarget, logits_V: Tensor) -> float:
    return torch.finfo(target.dtype).eps * float(logits_V.abs().max())


@pytest.mark.parametrize(
    ("dtype", "within", "check"),
    [
        ("bfloat16", (0, 4), "near_tie"),
        ("bfloat16", (8, 16), "different"),
        ("bfloat16", (16, 1e9), "different"),
        ("float32", (64, 1e9), "different"),
    ],
)
def test_a_response_that_differs_by_more_than_rounding_is_different(
    dtype: str,
    within: tuple[float, float],
    check: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stock model is made to begin with a token that is less likely by so many units of rounding."""
    target = load(str(checkpoint("qwen2_5_vl")), dtype=dtype)
    questions = [f"What is {number}?" for number in range(12)]
    asked = prompt_table.read(held_out(target.name, tmp_path, questions).prompts)
    prompt, token = next(
        (one, token)
        for one in asked
        if (token := other_than_best(target, one, *within)) is not None
    )
    drafter = untrained("medusa", target)
    bench = SideBySide(
        target,
        {"medusa": (drafter, drafter.tree)},
        temperature=0.0,
        max_new_tokens=4,
        seed=0,
    )
    stock = target.reference

    def other(encoded: Any, *, max_new_tokens: int) -> Any:
        made = stock(encoded, max_new_tokens=max_new_tokens)
        assert made is not None
        return replace(made, ids=(token, *made.ids[1:]))

    monkeypatch.setattr(target, "reference", other)
    result = bench.decode(0, prompt).results["medusa"]
    assert (result.plain.check, result.drafted.check) == (check, check)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_two_passes_differ_by_is_within_it(dtype: str, tmp_path: Path) -> None:
    target = load(
        str(tiny.checkpoint("qwen2_5_vl", tmp_path / "deep", layers=12)), dtype=dtype
    )
    ids_N, one, worst = torch.arange(40, 72), torch.ones(1, dtype=torch.long), 0.0
    with torch.inference_mode():
        target.prefill(target.encode(tiny.message("What is there?")), ())
        together_ND = target.extend(ids_N, torch.arange(1, 33), None, ("hidden",))[
            "hidden"
        ]
        for token, together_D in zip(ids_N, together_ND, strict=True):
            alone_1D = target.extend(one * token, one, None, ("hidden",))["hidden"]
            target.commit([0])
            alone_V, together_V = target.logits(torch.cat([alone_1D, together_D[None]]))
            off_V = alone_V - together_V
            worst = max(
                worst, float(off_V.max() - off_V.min()) / rounding(target, alone_V)
            )
    assert 0 < worst < NEAR_TIE[target.dtype]
