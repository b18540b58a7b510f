"""Samples of a target whose steps write to the same memory each time, as CUDA graphs do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.drafters.synthetic import untrained
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench.side_by_side import CHUNK, SideBySide
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.loading import load

TOKENS = CHUNK + 9  # of a response: its surprise is measured in two passes
ASKED = Prompt(
    key="a",
    dataset="made up",
    split="eval",
    messages=tiny.message("say something"),
    augmentation="",
    augmentation_text="",
    reference=None,
    source="",
    row=0,
    turn=1,
)


def test_a_surprise_is_measured_though_the_next_step_overwrites_the_last(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    decoders = {"sparrow": (untrained("sparrow", target), Tree.parse("chain-2"))}

    def surprise() -> float | None:
        both = SideBySide(
            target, decoders, temperature=1.0, max_new_tokens=TOKENS, seed=0
        )
        result = both.decode(0, ASKED).results["sparrow"]
        assert result.plain.tokens == TOKENS
        return result.plain.surprise

    expected = surprise()
    extend, memory = target.extend, dict[str, Tensor]()

    def overwriting(*given: Any, **named: Any) -> dict[str, Tensor]:
        states = extend(*given, **named)
        for name, state_ND in states.items():
            rows_ND = memory.setdefault(
                name, state_ND.new_empty(CHUNK, state_ND.shape[1])
            )
            rows_ND.fill_(torch.nan)
            rows_ND[: len(state_ND)] = state_ND
        return {
            name: memory[name][: len(state_ND)] for name, state_ND in states.items()
        }

    monkeypatch.setattr(target, "extend", overwriting)
    assert surprise() == pytest.approx(expected)
