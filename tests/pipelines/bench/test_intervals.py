"""Intervals hold what they say: the share of simulated evaluations whose interval contains the truth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.pipelines.bench.made_up import drafted, measured, plain
from tests.thorough import THOROUGH, count
from vlmdistill.pipelines.bench.records import (
    Measurement,
    PromptKind,
    PromptResult,
    Turn,
)
from vlmdistill.pipelines.bench.statistics import Rate, advantage, figures

TRIALS = count(250, 2000)
LEAST, MOST = (0.93, 0.97) if THOROUGH else (0.90, 0.99)
"""Of the coverage of a 95% interval; fewer trials say less."""
TAU: dict[PromptKind, tuple[float, float]] = {"image": (3.3, 0.55), "text": (1.7, 0.3)}
"""Mean and deviation over prompts: texts as of a drafter that has forgotten them."""
Mix = Sequence[tuple[PromptKind, int]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    """Prompts, and how well drafters do on them."""

    kind_P: list[PromptKind]
    tokens_P: Floats
    tau_P: Floats

    @classmethod
    def of(cls, mix: Mix, draw: np.random.Generator) -> "Asked":
        kinds: list[PromptKind] = [kind for kind, number in mix for _ in range(number)]
        tokens_P = np.clip(np.exp(draw.normal(4.1, 0.5, len(kinds))).round(), 8, 256)
        tau_P = np.concatenate(
            [draw.normal(*TAU[kind], number) for kind, number in mix]
        )
        return cls(kinds, tokens_P, tau_P)

    def decoded(self, draw: np.random.Generator) -> dict[str, Floats]:
        """Calls and seconds of one of many equal drafters."""
        size = len(self.kind_P)
        tau_P = np.clip(self.tau_P + draw.normal(0, 0.2, size), 1.05, 4.95)
        calls_P = np.maximum(1, ((self.tokens_P - 1) / tau_P).round())
        step_P, prefill_P = (
            1e-3 * np.exp(draw.normal(0, 0.05, size)),
            0.01 * np.exp(draw.normal(0, 0.2, size)),
        )
        decode_P = 2.3 * step_P * calls_P * np.exp(draw.normal(0, 0.05, size))
        base_P = prefill_P + step_P * (self.tokens_P - 1)
        return {
            "calls": calls_P,
            "decode": decode_P,
            "own": 1.1 * prefill_P + decode_P,
            "base": base_P,
        }

    def measured(self, draw: np.random.Generator) -> Measurement:
        made = self.decoded(draw)
        prompts = tuple(
            PromptResult(
                key=f"k{at}",
                dataset="made up",
                kind=kind,
                turn=Turn(started=0, ended=0, seconds=(0, 0), plain=0, drafted=1),
                plain=plain(
                    tokens=int(self.tokens_P[at]), seconds=float(made["base"][at])
                ),
                drafted=drafted(
                    tokens=int(self.tokens_P[at]),
                    calls=int(made["calls"][at]),
                    seconds=float(made["own"][at]),
                    decode_seconds=float(made["decode"][at]),
                ),
            )
            for at, kind in enumerate(self.kind_P)
        )
        return replace(measured(0.0), prompts=prompts, shown=())


def truth(mix: Mix) -> dict[Rate, float]:
    """The rates of very many prompts of the same mix."""
    asked = Asked.of(
        [(kind, 20_000 * number) for kind, number in mix],
        draw := np.random.default_rng(1),
    )
    made, tokens = asked.decoded(draw), asked.tokens_P
    tau = (tokens - 1).sum() / made["calls"].sum()
    return {"tau": float(tau), "speedup": float(made["base"].sum() / made["own"].sum())}


@pytest.mark.parametrize(
    "mix",
    [
        (("image", 6),),
        (("image", 12),),
        (("image", 49),),
        (("image", 12), ("text", 4)),
        (("image", 12), ("text", 12)),
        (("image", 40), ("text", 9)),
    ],
    ids=str,
)
def test_an_interval_contains_the_truth_as_often_as_it_says(mix: Mix) -> None:
    expected, draw = truth(mix), np.random.default_rng(0)
    hits = dict.fromkeys(expected, 0)
    for _ in range(TRIALS):
        found = figures(Asked.of(mix, draw).measured(draw)).intervals
        for rate, value in expected.items():
            hits[rate] += found[rate].low <= value <= found[rate].high
    for rate, hit in hits.items():
        assert LEAST <= hit / TRIALS <= MOST, rate


@pytest.mark.parametrize(
    "mix", [(("image", 12),), (("image", 40), ("text", 9))], ids=str
)
def test_one_of_two_equal_drafters_seldom_wins(mix: Mix) -> None:
    draw, wins = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        asked = Asked.of(mix, draw)
        between = advantage(asked.measured(draw), asked.measured(draw))
        assert between is not None
        wins += not between.low <= 1 <= between.high
    assert wins / TRIALS <= 1 - LEAST


@pytest.mark.parametrize(
    "mix", [(("image", 5),), (("image", 12), ("text", 3))], ids=str
)
def test_too_few_prompts_of_a_kind_have_no_interval(mix: Mix) -> None:
    draw = np.random.default_rng(0)
    asked = Asked.of(mix, draw)
    assert figures(asked.measured(draw)).intervals == {}
    assert advantage(asked.measured(draw), asked.measured(draw)) is None
