"""Defects that are planted into the records of an honest evaluation: each is a failure, or a doubt.

A doubt withdraws the verdict: no drafter is ranked by a number that a warning doubts. Defects that are
planted into decoders and prompts are in `test_audit.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.bench import made_up
from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, measured
from tests.thorough import count
from vlmdistill.pipelines.bench import audit
from vlmdistill.pipelines.bench.records import (
    Calibration,
    Decoding,
    Evaluation,
    Leak,
    Measurement,
    ProbabilityBin,
    PromptResult,
    RankCount,
    Stock,
)
from vlmdistill.pipelines.bench.sampled import RANKS, prompt_seed, ranks, surprise
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.comparison import group, rank
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.report.results import of_drafters
from vlmdistill.pipelines.targets.software import Software
from vlmdistill.pipelines.workspace.workspace import Workspace

Change = Callable[[PromptResult], PromptResult]


def changed(at: Measurement, change: Change) -> Measurement:
    return replace(at, prompts=tuple(map(change, at.prompts)))


def drafted(one: PromptResult, **changes: Any) -> PromptResult:
    return replace(one, drafted=replace(one.drafted, **changes))


def no_wait_for_the_prompt(one: PromptResult) -> PromptResult:
    """The clock outside starts after the first cycle, which says that it took no time."""
    seconds = one.drafted.seconds - one.drafted.prefill_seconds
    return drafted(one, seconds=seconds, prefill_seconds=0.0)


def late_clock(one: PromptResult) -> PromptResult:
    """The clock outside starts after the first cycle."""
    return drafted(one, seconds=one.drafted.seconds - one.drafted.prefill_seconds)


def without(phase: str) -> Change:
    """The phase is taken from a cache for the drafter alone."""

    def planted(one: PromptResult) -> PromptResult:
        return drafted(one, phases=replace(one.drafted.phases, **{phase: 0.0}))

    return planted


def drops_bonus(one: PromptResult) -> PromptResult:
    return drafted(one, missed=4)


def doubted(made: Evaluation) -> bool:
    """Whether no drafter is ranked, and the page says no speedup."""
    (answer, *_) = answers(group(of_drafters([made]))[0])
    (ranking, *_) = rank([made])
    assert (not ranking.ranked) == (not answer.columns)
    return not ranking.ranked


@pytest.mark.parametrize(
    "plant",
    [
        no_wait_for_the_prompt,
        late_clock,
        without("vision"),
        without("prefill"),
        drops_bonus,
    ],
)
def test_times_that_compare_different_work_are_in_doubt(plant: Change) -> None:
    honest = measured(noise=0.05)
    assert not doubted(evaluation("wren", honest))
    made = evaluation("wren", changed(honest, plant))
    (result,) = of_drafters([made])
    assert result.doubts
    assert set(result.figures.doubts) <= set(result.figures.warnings)
    assert doubted(made)
    (ranking,) = rank([made])
    assert f"{result.figures.speedup:.2f}" not in ranking.text


def unchecked(one: PromptResult) -> PromptResult:
    """Only the responses that are the stock model's own are said to be checked."""
    return drafted(one, check=None)


def drafts_plainly(one: PromptResult) -> PromptResult:
    """The baseline speculates, too."""
    return replace(one, plain=replace(one.plain, calls=50, passes=50, accepted=54))


def shortened(one: PromptResult) -> PromptResult:
    """The drafter had a limit of its own."""
    plain = replace(one.plain, finish="length")
    own = replace(
        one.drafted, finish="length", tokens=95, accepted=62, chain_accepted=(18, 12, 1)
    )
    return replace(one, plain=plain, drafted=own)


def chains(tried: tuple[int, ...], accepted: tuple[int, ...]) -> Change:
    return lambda one: drafted(one, chain_tried=tried, chain_accepted=accepted)


def guesses(**counts: float) -> Change:
    fields: dict[str, Any] = {"position": 0, "tried": 5, "accepted": 3, "chances": 3.5}
    made = ProbabilityBin(**{**fields, **counts})
    return lambda one: drafted(one, probabilities=(made,))


@pytest.mark.parametrize(
    "plant",
    [
        unchecked,
        drafts_plainly,
        shortened,
        chains((10, 20), (10, 20)),
        chains((10, 10), (12, 10)),
        guesses(accepted=6),
        guesses(chances=5.5),
    ],
)
def test_counts_that_cannot_be_are_a_failure(plant: Change) -> None:
    honest = changed(measured(), guesses())
    assert audit.failures(evaluation("wren", honest)) == []
    assert audit.failures(evaluation("wren", changed(honest, plant)))


def test_responses_beyond_the_limit_are_a_failure() -> None:
    at = measured()
    assert audit.failures(evaluation("wren", at, max_new_tokens=105)) == []
    assert audit.failures(evaluation("wren", at, max_new_tokens=104))


@pytest.mark.parametrize("lost", [{"surprise": None}, {"ranks": ()}])
def test_samples_that_were_not_compared_are_a_failure(lost: dict[str, Any]) -> None:
    honest = measured(1.0)
    assert audit.failures(evaluation("wren", honest)) == []
    made = changed(honest, lambda one: drafted(one, **lost))
    assert audit.failures(evaluation("wren", made))


def test_prompts_that_were_not_checked_are_counted() -> None:
    def unread(one: PromptResult) -> PromptResult:
        if one.key == "k0":
            return one
        plain = replace(one.plain, check=None)
        return drafted(replace(one, plain=plain), check=None)

    made = evaluation("wren", changed(measured(), unread))
    (found,) = group(of_drafters([made]))
    assert "on 1 of 24 prompts" in found.verdict.text


@pytest.mark.parametrize("slower_share", [1.4, 2.0])
def test_a_slow_loop_at_a_temperature_alone_is_in_doubt(slower_share: float) -> None:
    def slow(one: PromptResult) -> PromptResult:
        decode_seconds = slower_share * one.plain.decode_seconds
        seconds = one.plain.prefill_seconds + decode_seconds
        plain = replace(one.plain, seconds=seconds, decode_seconds=decode_seconds)
        return replace(one, plain=plain)

    greedy, sampled = measured(noise=0.05), measured(1.0, noise=0.05)
    assert not audit.doubts_of_run(evaluation("wren", greedy, sampled))
    planted = in_turn(changed(sampled, slow))
    assert audit.doubts_of_run(evaluation("wren", greedy, planted))


@pytest.mark.parametrize(("prompts", "doubts"), [(7, False), (24, True)])
def test_few_prompts_beside_other_programs_do_not_tell_of_less_work(
    prompts: int, doubts: bool
) -> None:
    def beside_others(one: PromptResult) -> PromptResult:
        plain = replace(one.plain, cpu_seconds=0.5 * one.plain.seconds)
        own = replace(one.drafted, cpu_seconds=0.5 * one.drafted.seconds)
        return without("prefill")(replace(one, plain=plain, drafted=own))

    made = evaluation("wren", changed(measured(count=prompts), beside_others))
    assert doubted(made) == doubts


def calibration(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "plain_step": 0.0138,
        "bare_step": 0.0137,
        "step_ratio": 1.01,
        "step_bytes": 47_924_224,
        "small_product": 1e-4,
        "large_product": 1e-3,
        "bandwidth": 1e10,
    }
    return Calibration(**{**fields, **changes})


def generated(seconds: float) -> Change:
    """The stock model's `generate` takes so long, for as many tokens as plain decoding's in 1.5 s."""
    return lambda one: replace(
        one,
        stock=Stock(tokens=one.plain.tokens, seconds=seconds, cpu_seconds=None),
    )


def in_turn(at: Measurement) -> Measurement:
    """As decoded anew with the seconds that the prompts have now."""
    prompts = [made_up.in_turn(one, number) for number, one in enumerate(at.prompts)]
    return replace(at, prompts=tuple(prompts))


def slower(share: float, decoded: Decoding) -> Decoding:
    names = ("seconds", "prefill_seconds", "decode_seconds")
    scaled = {name: share * getattr(decoded, name) for name in names}
    return replace(decoded, **scaled)


def scaled(share: float) -> Change:
    """All seconds of the record by one factor, except those of the machine's clock."""

    def planted(one: PromptResult) -> PromptResult:
        seconds = tuple(share * spent for spent in one.turn.seconds)
        return replace(
            one,
            plain=slower(share, one.plain),
            drafted=slower(share, one.drafted),
            turn=replace(one.turn, seconds=seconds),
        )

    return planted


def not_rotated(one: PromptResult) -> PromptResult:
    plain_first = (one.plain.seconds, one.drafted.seconds)
    return replace(one, turn=replace(one.turn, plain=0, drafted=1, seconds=plain_first))


def best_of_three(one: PromptResult) -> PromptResult:
    ended = one.turn.ended + 2 * one.drafted.seconds
    return replace(one, turn=replace(one.turn, ended=ended))


@pytest.mark.parametrize(
    "plant", [scaled(0.5), scaled(0.9), scaled(1.2), not_rotated, best_of_three]
)
def test_times_that_do_not_fill_the_clock_are_in_doubt(plant: Change) -> None:
    honest = in_turn(measured(noise=0.05))
    assert not doubted(evaluation("wren", honest))
    assert doubted(evaluation("wren", changed(honest, plant)))


def test_a_lone_record_that_is_faster_than_the_machine_is_in_doubt() -> None:
    """Its turns were scaled with the rest."""
    honest = evaluation("wren", measured(), calibrations=(calibration(), calibration()))
    assert not doubted(honest)

    def faster(one: PromptResult) -> PromptResult:
        return replace(
            one, plain=slower(0.4, one.plain), drafted=slower(0.4, one.drafted)
        )

    scaled_at = in_turn(changed(measured(), faster))
    made = evaluation("wren", scaled_at, calibrations=honest.calibrations)
    assert doubted(made)


@pytest.mark.parametrize("side", ["plain", "drafted"])
def test_seconds_that_are_recorded_twice_must_agree(side: str) -> None:
    def planted(one: PromptResult) -> PromptResult:
        changes: dict[str, Any] = {side: slower(0.9, getattr(one, side))}
        return replace(one, **changes)

    honest = in_turn(measured())
    assert audit.failures(evaluation("wren", honest)) == []
    assert audit.failures(evaluation("wren", changed(honest, planted)))


@pytest.mark.parametrize("side", ["plain", "drafted"])
def test_one_seed_for_all_prompts_is_a_failure(side: str) -> None:
    def seeded(at: Measurement, other: bool = False) -> Measurement:
        prompts = []
        for number, prompt in enumerate(at.prompts):
            seed = prompt_seed(3, number)
            both = replace(
                prompt,
                plain=replace(prompt.plain, seed=seed),
                drafted=replace(prompt.drafted, seed=seed),
            )
            wrong = replace(getattr(prompt, side), seed=prompt_seed(3, 0))
            prompts.append(replace(both, **{side: wrong}) if other else both)
        return replace(at, prompts=tuple(prompts))

    at = measured(1.0)
    assert audit.failures(evaluation("wren", seeded(at), seed=3)) == []
    failures = audit.failures(evaluation("wren", seeded(at, other=True), seed=3))
    assert any("other seeds" in text for text in failures)


@pytest.mark.parametrize("side", ["plain", "drafted"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_seconds_that_another_clock_excludes_are_a_failure(
    side: str, share: float
) -> None:
    def with_clocks(one: PromptResult) -> PromptResult:
        spent = {
            name: replace(getattr(one, name), cpu_seconds=0.99)
            for name in ("plain", "drafted")
        }
        return replace(one, **spent)

    def shortened(one: PromptResult) -> PromptResult:
        """As by hand: the elapsed seconds of the record, and those of its cycles."""
        decoded = getattr(one, side)
        names = ("seconds", "prefill_seconds", "decode_seconds")
        return replace(
            one,
            **{
                side: replace(
                    decoded, **{name: share * getattr(decoded, name) for name in names}
                )
            },
        )

    honest = changed(measured(speedup=1.5), with_clocks)
    assert not doubted(evaluation("wren", honest))
    made = evaluation("wren", in_turn(changed(honest, shortened)))
    assert bool(audit.failures(made)) == (side == "drafted" or share < 0.6)


def test_prompts_that_were_not_to_be_measured_or_twice_are_a_failure() -> None:
    at = measured(count=12)
    keys = tuple(one.key for one in at.prompts)
    assert not audit.failures(evaluation("wren", at, asked=keys))
    assert audit.failures(evaluation("wren", at, asked=keys[:8]))
    twice = replace(at, prompts=(*at.prompts, *at.prompts[:4]))
    assert audit.failures(evaluation("wren", twice))


def test_records_of_a_run_share_the_numbers_of_plain_decoding() -> None:
    """Those of two runs do not."""
    at = measured(noise=0.05)
    slower = changed(
        at,
        lambda one: replace(
            one, plain=replace(one.plain, seconds=1.2 * one.plain.seconds)
        ),
    )
    for text, count_ranked in (("a minute later", 2), ("2026-01-02 03:04:05", 0)):
        other = evaluation("sparrow", slower, measured=text)
        (ranking,) = rank([evaluation("wren", at), other])
        beside = [one for one in ranking.results if one.beside]
        assert len(beside) == 2 - count_ranked


@pytest.mark.parametrize("slower", [1.12, 1.14, 1.2, 1.5])
def test_a_slow_loop_of_plain_decoding_is_in_doubt(slower: float) -> None:
    honest = evaluation("wren", measured(), calibrations=(calibration(), calibration()))
    assert not doubted(honest)
    slow = calibration(plain_step=0.0137 * slower, step_ratio=slower)
    assert doubted(replace(honest, calibrations=(slow, slow)))


@pytest.mark.parametrize("slower", [1.3, 1.6, 1.85])
def test_a_slow_path_in_the_target_is_in_doubt(slower: float) -> None:
    """It slows the target's own steps as well, so only what it was before tells."""
    honest = changed(measured(), generated(1.5 * 1.66))
    slow = changed(measured(), generated(1.5 * 1.66 / slower))
    before = audit.baseline(evaluation("wren", honest))
    assert before.against_stock == pytest.approx(1.66)
    assert not doubted(evaluation("wren", honest, earlier=before))
    assert doubted(evaluation("wren", slow, earlier=before))


def test_an_evaluation_beside_other_programs_is_no_baseline(
    workspace: Workspace, save: Save
) -> None:
    """Nor is it compared with one: CPU seconds of a step vary with the caches."""

    def beside_others(one: PromptResult) -> PromptResult:
        plain = replace(one.plain, cpu_seconds=0.5 * one.plain.seconds)
        own = replace(one.drafted, cpu_seconds=0.5 * one.drafted.seconds)
        return replace(one, plain=plain, drafted=own)

    honest = changed(measured(), generated(1.5 * 1.66))
    disturbed = changed(changed(measured(), generated(1.5 * 2.2)), beside_others)
    save("wren", honest, stem="a", measured="2026-01-01 00:00:00")
    save("wren", disturbed, stem="b", measured="2026-01-02 00:00:00")
    found = audit.last_baseline(workspace.reports, evaluation("wren", honest))
    assert found is not None
    assert found.measured == "2026-01-01 00:00:00"
    faster = replace(found, against_stock=2.2)
    assert audit.slow_baseline(evaluation("wren", honest, earlier=faster))
    busy = changed(honest, beside_others)
    assert not audit.slow_baseline(evaluation("wren", busy, earlier=faster))


def test_a_slow_step_is_in_doubt_where_generate_was_not_timed() -> None:
    honest = evaluation("wren", measured(1.0), calibrations=(calibration(),))
    before = audit.baseline(honest)
    assert not doubted(replace(honest, earlier=before))
    slow = calibration(plain_step=1.85 * 0.0138, bare_step=1.85 * 0.0137)
    assert doubted(replace(honest, calibrations=(slow,), earlier=before))


def test_the_earlier_evaluation_is_the_last_sound_one_of_the_same_machine(
    workspace: Workspace, save: Save
) -> None:
    def at(seconds: float) -> Measurement:
        return changed(measured(), generated(seconds))

    save("wren", at(2.4), stem="a", measured="2026-01-01 00:00:00")
    save("wren", at(2.5), stem="b", measured="2026-01-02 00:00:00")
    save("wren", at(2.0), stem="c", measured="2026-01-03 00:00:00", hardware="another")
    slow = at(1.6)
    found = audit.last_baseline(workspace.reports, evaluation("sparrow", slow))
    assert found is not None
    assert found.measured == "2026-01-02 00:00:00"
    assert found.against_stock == pytest.approx(2.5 / 1.5)
    save("wren", slow, stem="d", measured="2026-01-04 00:00:00", earlier=found)
    assert audit.last_baseline(workspace.reports, evaluation("sparrow", slow)) == found
    others: tuple[dict[str, Any], ...] = (
        {"dtype": "bfloat16"},
        {"max_new_tokens": 12},
        {"asked": ("k7",)},
    )
    for other in others:  # the share of the prefill is another
        assert (
            audit.last_baseline(workspace.reports, evaluation("msd", slow, **other))
            is None
        )


def test_cpu_seconds_tell_whether_plain_decoding_is_slow() -> None:
    """Others had the CPU while plain decoding ran, not while `generate` did."""

    def plant(one: PromptResult) -> PromptResult:
        plain = replace(one.plain, cpu_seconds=0.6 * one.plain.seconds)
        stock = Stock(tokens=plain.tokens, seconds=1.0, cpu_seconds=1.0)
        return replace(one, plain=plain, stock=stock)

    made = evaluation("wren", changed(measured(), plant))
    assert audit.against_stock(made) == pytest.approx(1.0 / 0.9)
    assert audit.slow_baseline(made) == []


@pytest.mark.parametrize("factor", [1.5, 1 / 3])
def test_sampled_responses_of_other_lengths_are_a_failure(factor: float) -> None:
    """The drafter ignores the EOS, or ends early."""
    lengths_P = np.random.default_rng(0).integers(60, 160, (2, 49))

    def sampled(scale: float) -> Measurement:
        at = measured(1.0, count=49)
        prompts = []
        for prompt, (plain_tokens, tokens) in zip(
            at.prompts, lengths_P.T.tolist(), strict=True
        ):
            tokens = int(scale * tokens)
            calls = plain_tokens - 1
            plain = replace(
                prompt.plain, tokens=plain_tokens, calls=calls, passes=calls
            )
            calls = tokens - 1 - 20
            own = replace(
                prompt.drafted,
                tokens=tokens,
                calls=calls,
                passes=calls,
                accepted=20,
                chain_tried=(),
                chain_accepted=(),
            )
            prompts.append(replace(prompt, plain=plain, drafted=own))
        return replace(at, prompts=tuple(prompts))

    assert audit.failures(evaluation("wren", sampled(1.0))) == []
    assert any(
        "in length" in text
        for text in audit.failures(evaluation("wren", sampled(factor)))
    )


@pytest.mark.parametrize("leak", [None, Leak(samples=4200, unknown=1)])
def test_what_is_not_known_of_the_training_data_is_said(
    leak: Leak | None, workspace: Workspace, save: Save
) -> None:
    """The list of samples is lost, or names samples of another workspace."""
    save("wren", measured(), leak=leak)
    (found,) = read(workspace).groups
    assert found.warnings
    assert answers(found)[0].level == "unsure"


def test_a_drafter_that_has_seen_many_prompts_is_not_ranked() -> None:
    keys = tuple(f"k{number}" for number in range(3))
    assert doubted(evaluation("wren", measured(), leak=Leak(samples=9, prompts=keys)))
    assert not doubted(
        evaluation("wren", measured(), leak=Leak(samples=9, prompts=keys[:2]))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": "on"},
        {
            "software": Software(
                python="3", vlmdistill="0", torch="1.0", transformers="5"
            )
        },
        {
            "software": Software(
                python="3", vlmdistill="0", torch="2.13", transformers="4"
            )
        },
    ],
)
def test_evaluations_under_other_conditions_are_not_ranked_together(
    change: dict[str, Any],
) -> None:
    software = Software(python="3", vlmdistill="0", torch="2.13", transformers="5")
    some = [
        evaluation("wren", software=software),
        evaluation("msd", **{"software": software, **change}),
    ]
    assert len(group(of_drafters(some))) == 2


def test_a_drafter_that_cannot_be_decoded_again_is_said(
    workspace: Workspace, save: Save
) -> None:
    save("wren", measured(), not_again="out of memory")
    (found,) = read(workspace).groups
    assert any("out of memory" in text for text in found.warnings)


# Samples of another distribution, from the sums that an evaluation records

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def as_the_target(share_NV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(share_NV, 1, generator=generator)[:, 0]


def never_second(share_NV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What would be the second choice is another one, of the first or the third, with the same surprise."""
    ids_N = as_the_target(share_NV, generator)
    best_N3 = share_NV.topk(3, -1).indices
    up_N = torch.rand(len(ids_N), generator=generator, dtype=torch.float64) < 0.5
    instead_N = torch.where(up_N, best_N3[:, 0], best_N3[:, 2])
    return torch.where(ids_N == best_N3[:, 1], instead_N, ids_N)


def keeps_unlikely_drafts(
    share_NV: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The likeliest token, which was drafted, instead of one with a chance below 0.05."""
    ids_N = as_the_target(share_NV, generator)
    chance_N = share_NV.gather(-1, ids_N[:, None])[:, 0]
    return torch.where(chance_N < 0.05, share_NV.argmax(-1), ids_N)


def keeps_rare_drafts(
    share_NV: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The same, instead of the rarest alone."""
    ids_N = as_the_target(share_NV, generator)
    chance_N = share_NV.gather(-1, ids_N[:, None])[:, 0]
    return torch.where(chance_N < 0.02, share_NV.argmax(-1), ids_N)


def colder(share_NV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Temperature 0.8 instead of 1."""
    return as_the_target((share_NV.log() / 0.8).softmax(-1), generator)


def sampled_with(draw: Draw, tokens: int, seed: int) -> Evaluation:
    """The record of responses of so many tokens over a vocabulary of 40."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 3 * torch.randn(tokens, 40, generator=generator, dtype=torch.float64)
    log_NV = logits_NV.log_softmax(-1)
    ids_N = draw(log_NV.exp(), generator)
    nats, variance = surprise(log_NV, ids_N).tolist()
    counts = [
        RankCount(rank=rank, tokens=int(drawn), expected=expected, variance=spread)
        for rank, (drawn, expected, spread) in zip(
            RANKS, ranks(log_NV, ids_N).tolist(), strict=True
        )
    ]

    def sampled(one: Decoding) -> Decoding:
        return replace(
            one, surprise=nats, surprise_variance=variance, ranks=tuple(counts)
        )

    at = measured(1.0, count=1)
    (prompt,) = at.prompts
    both = replace(prompt, plain=sampled(prompt.plain), drafted=sampled(prompt.drafted))
    return evaluation("wren", replace(at, prompts=(both,)))


@pytest.mark.parametrize(
    "draw", [never_second, keeps_unlikely_drafts, keeps_rare_drafts, colder]
)
def test_samples_of_another_distribution_are_a_failure(draw: Draw) -> None:
    for seed in range(count(2, 40)):
        assert audit.failures(sampled_with(draw, 5500, seed))


def test_samples_of_the_target_are_none() -> None:
    for seed in range(count(20, 400)):
        assert audit.failures(sampled_with(as_the_target, 5500, seed)) == []
