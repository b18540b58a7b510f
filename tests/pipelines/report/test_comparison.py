"""Metrics, their intervals, and which drafter is called the fastest."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from tests.pipelines.bench.made_up import (
    drafted,
    evaluation,
    in_turn,
    measured,
    on_shared_cpu,
)
from vlmdistill.pipelines.bench.records import Check, Decoding, Measurement
from vlmdistill.pipelines.bench.statistics import advantage, figures
from vlmdistill.pipelines.report.comparison import Ranking, rank


def ranking(**drafters: Measurement) -> Ranking:
    (found,) = rank([evaluation(name, at) for name, at in drafters.items()])
    return found


def names(found: Ranking) -> list[str]:
    return [one.name for one in found.leaders]


def test_a_clear_winner_is_named() -> None:
    found = ranking(
        eagle2=measured(speedup=1.2, noise=0.1, seed=1),
        sparrow=measured(speedup=1.5, noise=0.1, seed=2),
    )
    assert found.winner is not None
    assert found.winner.name == "sparrow"
    assert names(found) == ["sparrow"]
    assert found.against_plain == "faster"


def test_a_lead_within_the_noise_is_not_a_win() -> None:
    found = ranking(
        eagle2=measured(speedup=1.48, noise=0.2, seed=1),
        sparrow=measured(speedup=1.5, noise=0.2, seed=2),
    )
    assert found.winner is None
    assert set(names(found)) == {"eagle2", "sparrow"}
    for name in ("eagle2", "sparrow"):
        assert name in found.text
    assert "24" in found.text


def test_drafters_are_compared_on_the_same_resamples() -> None:
    one, other = (
        measured(speedup=speedup, noise=0.2, seed=1) for speedup in (1.5, 1.45)
    )
    first, second = (figures(at).intervals["speedup"] for at in (one, other))
    assert first.low < second.high  # the intervals overlap
    assert ranking(sparrow=one, eagle2=other).winner is not None


def test_the_winner_beats_all_others_and_not_only_the_second() -> None:
    found = ranking(
        a=measured(speedup=1.5, noise=0.02, seed=1, count=12),
        b=measured(speedup=1.44, noise=0.02, seed=1, count=12),
        c=measured(speedup=1.35, noise=0.5, seed=5, count=12),
    )
    assert found.winner is None
    assert "c" in names(found)
    assert "b" not in names(found)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_prompts_give_no_intervals_and_no_winner(count: int) -> None:
    found = ranking(
        eagle2=measured(speedup=1.2, count=count),
        sparrow=measured(speedup=1.5, count=count),
    )
    assert found.winner is None
    assert found.against_plain == "unknown"
    assert found.results[0].figures.intervals == {}


def on_a_shared_cpu(at: Measurement, share: float) -> Measurement:
    """As if this program had had that share of a CPU."""
    prompts = [
        replace(
            one,
            plain=on_shared_cpu(one.plain, share),
            drafted=on_shared_cpu(one.drafted, share),
        )
        for one in at.prompts
    ]
    return replace(at, prompts=tuple(prompts))


@pytest.mark.parametrize(("share", "wins"), [(0.06, False), (0.95, True)])
def test_no_drafter_is_the_fastest_where_others_had_the_cpu(
    share: float, wins: bool
) -> None:
    fast, slow = (
        on_a_shared_cpu(measured(speedup=rate, noise=0.01), share)
        for rate in (1.8, 1.2)
    )
    found = ranking(sparrow=fast, eagle2=slow)
    assert (found.winner is not None) == wins
    assert ("was the fastest drafter" in found.text) == wins


def test_undisturbed_seconds_rank_where_others_had_a_part_of_the_cpu() -> None:
    """They disturbed the faster drafter more, by the clock."""
    quick, slow = (
        on_a_shared_cpu(measured(speedup=rate, noise=0.01), 0.7) for rate in (1.7, 1.6)
    )
    late = replace(
        quick,
        prompts=tuple(
            in_turn(
                replace(
                    one,
                    drafted=disturbed(one.drafted) if number % 3 == 0 else one.drafted,
                ),
                number,
            )
            for number, one in enumerate(quick.prompts)
        ),
    )
    elapsed = [sum(one.drafted.seconds for one in at.prompts) for at in (late, slow)]
    assert elapsed[0] > elapsed[1]
    found = ranking(wren=late, sparrow=slow)
    assert [one.name for one in found.results] == ["wren", "sparrow"]
    assert found.winner is not None
    assert found.winner.name == "wren"
    assert found.marked("speedup") == (found.winner,)


def disturbed(decoded: Decoding) -> Decoding:
    """It takes a quarter longer by the clock, in which other programs have the CPU."""
    late = 0.25 * decoded.seconds
    return replace(
        decoded,
        seconds=decoded.seconds + late,
        delayed_seconds=(decoded.delayed_seconds or 0.0) + late,
    )


@pytest.mark.parametrize("share", [0.98, 0.3])
def test_nothing_is_said_of_speedups_that_are_not_known(share: float) -> None:
    slower = on_a_shared_cpu(measured(speedup=0.9, noise=0.01), share)
    text = ranking(sparrow=slower, eagle2=slower).text
    assert ("faster than plain decoding" in text) == (share == 0.98)


def test_none_is_called_the_fastest_below_plain_decoding() -> None:
    found = ranking(
        sparrow=measured(speedup=0.9, noise=0.01),
        eagle2=measured(speedup=0.6, noise=0.01),
    )
    assert found.winner is None
    assert "was the fastest drafter" not in found.text
    assert "No drafter is faster than plain decoding." in found.text


def test_tau_over_the_cost_of_a_cycle_is_the_decode_speedup() -> None:
    one = figures(measured(speedup=1.5, noise=0.1))
    assert one.tau / one.cycle_cost == pytest.approx(one.decode_speedup)
    within = one.intervals["cycle_cost"]
    assert within.low < one.cycle_cost < within.high


def test_a_drafter_alone_is_no_winner() -> None:
    found = ranking(sparrow=measured(speedup=1.5, noise=0.1))
    assert found.winner is None
    assert names(found) == ["sparrow"]


def test_a_drafter_that_is_not_lossless_is_not_the_fastest() -> None:
    odd: list[Check] = ["identical" if at else "different" for at in range(24)]
    broken = evaluation(
        "broken", measured(own=odd, speedup=3), measured(1.0, speedup=3)
    )
    others = [
        evaluation(name, measured(speedup=speedup), measured(1.0, speedup=speedup))
        for name, speedup in (("fair", 1.5), ("slow", 1.2))
    ]
    for found in rank([broken, *others]):
        assert [one.name for one in found.results] == ["broken", "fair", "slow"]
        assert found.winner is not None
        assert found.winner.name == "fair"
        assert "broken" in found.text
    assert [names(found) for found in rank([broken])] == [[], []]
    assert figures(broken.temperatures[0]).warnings
    ties: list[Check] = ["near_tie"] * 24
    (found, _) = rank(
        [evaluation("ties", measured(own=ties, speedup=3), measured(1.0)), *others]
    )
    assert found.winner is not None
    assert found.winner.name == "ties"


@pytest.mark.parametrize(
    ("speedup", "expected"), [(1.3, "faster"), (1.01, "equal"), (0.7, "slower")]
)
def test_plain_decoding_is_beaten_only_significantly(
    speedup: float, expected: str
) -> None:
    assert (
        ranking(sparrow=measured(speedup=speedup, noise=0.2)).against_plain == expected
    )


def test_rates_are_pooled_over_prompts() -> None:
    long = drafted(
        tokens=301,
        calls=100,
        accepted=201,
        seconds=3.0,
        prefill_seconds=0.5,
        decode_seconds=2.5,
    )
    at = measured(count=1)
    (short,) = (
        at.prompts
    )  # 105 tokens, 32 calls, 72 accepted, 1 s, 0.1 of it prefill; plain: 1.5 s
    both = dataclasses.replace(
        at, prompts=(short, dataclasses.replace(short, key="long", drafted=long))
    )
    pooled = figures(both)
    assert pooled.tau == pytest.approx((104 + 300) / (32 + 100))
    assert pooled.accepted == pytest.approx((72 + 201) / (32 + 100))
    assert pooled.speedup == pytest.approx((3.0 / 210) / (4.0 / 406))
    assert pooled.decode_speedup == pytest.approx((2.8 / 208) / (3.4 / 404))
    assert pooled.prefill_share == pytest.approx(0.6 / 4)
    assert pooled.alpha == pytest.approx((18 / 20, 12 / 18, 9 / 12))
    assert (pooled.tokens, pooled.calls, pooled.plain_tokens) == (406, 132, 210)


def test_figures_are_deterministic() -> None:
    at = measured(noise=0.3, count=40)
    assert figures(at) == figures(at)
    assert advantage(at, measured(noise=0.3, seed=3, count=40)) == advantage(
        at, measured(noise=0.3, seed=3, count=40)
    )


def test_intervals_have_their_coverage_also_for_few_prompts() -> None:
    covered = []
    for seed in range(200):
        interval = figures(
            measured(speedup=1.5, noise=0.2, count=8, seed=seed)
        ).intervals["speedup"]
        covered.append(interval.low <= 1.5 <= interval.high)
    assert 0.9 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize(("drafters", "said"), [(2, False), (3, True)])
def test_that_chance_favours_the_best_of_several_is_said(
    drafters: int, said: bool
) -> None:
    made = [
        evaluation(f"d{number}", measured(noise=0.2, seed=number))
        for number in range(drafters)
    ]
    (ranking,) = rank(made)
    assert ("Chance favours the best" in ranking.text) == said
