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

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import (
    evaluation,
    in_sequence,
    measured,
    on_shared_cpu,
    that_waits,
    with_cpu_share,
    without_delays,
)
from tests.thorough import count
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench import again as repeating
from vlmdistill.pipelines.bench import audit
from vlmdistill.pipelines.bench.records import (
    Again,
    Baseline,
    Calibration,
    Decoding,
    Evaluation,
    Leak,
    Measurement,
    Phases,
    ProbabilityBin,
    PromptKind,
    PromptResult,
    RankCount,
    Stock,
)
from vlmdistill.pipelines.bench.sampled import RANKS, prompt_seed, ranks, surprise
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.comparison import drifts, group, rank
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


@pytest.mark.parametrize(("scale", "doubts"), [(1 / 75, False), (1.0, True)])
def test_a_short_response_may_have_a_moment_in_no_cycle(
    scale: float, doubts: bool
) -> None:
    """A few tokens in 20 ms, of which the begin and end of the decoder take half of one."""

    def planted(one: PromptResult) -> PromptResult:
        plain = slower(scale, one.plain)
        cycles = 0.975 * plain.seconds - plain.prefill_seconds
        plain = replace(plain, decode_seconds=cycles, phases=Phases())
        own = replace(slower(scale, one.drafted), phases=Phases())
        return replace(one, plain=plain, drafted=own)

    at = in_sequence(changed(measured(noise=0.05), planted))
    assert doubted(evaluation("wren", at)) == doubts


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


@pytest.mark.parametrize(("room", "fails"), [(500, True), (8, False), (None, False)])
def test_responses_of_both_sides_that_are_cut_are_a_failure(
    room: int | None, fails: bool
) -> None:
    """Unless the target has no position left."""

    def planted(one: PromptResult) -> PromptResult:
        cut: dict[str, Any] = {"tokens": 8, "finish": "length"}
        plain = replace(one.plain, calls=7, passes=7, **cut)
        own = replace(one.drafted, calls=3, passes=3, accepted=4, **cut)
        own = replace(own, chain_tried=(), chain_accepted=())
        return replace(one, plain=plain, drafted=own, room=room)

    made = evaluation("wren", changed(measured(), planted), max_new_tokens=24)
    assert bool(audit.failures(made)) == fails
    (result,) = of_drafters([made])
    warned = any("last position" in text for text in result.warnings)
    assert warned == (room == 8)


def test_an_evaluation_decodes_the_prompts_again_that_its_times_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what a drafter knows of the responses is not found, or times were changed."""
    monkeypatch.setattr(repeating, "PROMPTS", 8)
    made = evaluation("wren", measured(noise=0.05))
    again = tuple(replace(each, plain_response="its own") for each in made.again)
    assert audit.failures(replace(made, again=again)) == []
    assert audit.failures(replace(made, again=()))
    assert audit.failures(replace(made, again=(), not_again="out of memory")) == []
    assert audit.failures(replace(made, again=again[1:]))
    faster_machine = in_sequence(changed(made.temperatures[0], scaled(0.9)))
    assert audit.failures(replace(made, again=again, temperatures=(faster_machine,)))


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_each_kind_are_decoded_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is slow on one kind alone is seen; records that chose otherwise are not accused."""
    monkeypatch.setattr(repeating, "PROMPTS", 8)
    at = measured(noise=0.1, seed=seed, count=48)
    rare: dict[int, PromptKind] = {5: "text", 17: "images", 40: "video"}
    prompts = [
        replace(prompt, kind=rare.get(number, "image"))
        for number, prompt in enumerate(at.prompts)
    ]
    made = evaluation("wren", in_sequence(replace(at, prompts=tuple(prompts))))
    kind_of = {prompt.key: prompt.kind for prompt in prompts}
    drawn = [*repeating.repeated_prompts(made)]
    assert len(drawn) == 8
    plainly = [kind_of[prompt.key] for prompt in drawn if prompt.plainly]
    assert sorted(plainly) == ["image", "images", "text", "video"]
    earlier = {
        prompt.key for prompt in repeating.repeated_prompts(made, of_each_kind=False)
    }
    assert earlier != {prompt.key for prompt in drawn}
    for keys in (earlier, {prompt.key for prompt in drawn}):
        again = tuple(
            Again(key=key, calls=32, temperature=0.0, plain_response="its own")
            for key in keys
        )
        assert audit.failures(replace(made, again=again)) == []
    others = tuple(replace(each, key=f"k{number}") for number, each in enumerate(again))
    assert audit.failures(replace(made, again=others))


def without_cpu_seconds(one: PromptResult) -> PromptResult:
    """As of a GPU, whose audits allow more."""
    return drafted(one, cpu_seconds=None)


def short_cycles(one: PromptResult) -> PromptResult:
    """Seconds of the drafter's cycles are left out, which `decode_speedup` is of."""
    return drafted(one, decode_seconds=0.7 * one.drafted.decode_seconds)


@pytest.mark.parametrize("plant", [without_cpu_seconds, short_cycles])
def test_times_that_contradict_each_other_are_a_failure(plant: Change) -> None:
    honest = with_cpu_share(measured(), 0.98)
    assert audit.failures(evaluation("wren", honest)) == []
    assert audit.failures(evaluation("wren", changed(honest, plant)))


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

    made = evaluation("wren", changed(measured(), unread), measured="another time")
    other = evaluation("msd", measured())
    for evaluations in ([made], [made, other]):
        (found,) = group(of_drafters(evaluations))
        assert "wren: 1" in found.verdict.text
        assert "all 24 prompts" not in found.verdict.text


@pytest.mark.parametrize(("copies", "warned"), [(1, False), (2, False), (12, True)])
def test_copies_of_one_prompt_are_said(copies: int, warned: bool) -> None:
    """Each counts as another one, and the intervals shrink."""

    def planted(one: PromptResult) -> PromptResult:
        number = int(one.key[1:])
        response = f"{max(0, number - copies + 1)}"
        return replace(one, plain=replace(one.plain, response=response))

    made = evaluation("wren", changed(measured(), planted))
    (result,) = of_drafters([made])
    assert any("copies" in text for text in result.warnings) == warned


def test_a_list_shows_a_temperature_that_is_nearly_0(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", measured(2e-05))
    assert main(["eval", "--list", "--runs", str(workspace.root.parent)]) == 0
    assert "2e-05" in capsys.readouterr().out


def test_a_list_shows_no_number_in_doubt(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", measured())
    save("sparrow", changed(measured(), late_clock))
    where = ("--runs", str(workspace.root.parent))
    assert main(["eval", "--list", *where]) == 0
    (heads, *rows) = capsys.readouterr().out.splitlines()
    assert heads.split()[-2:] == ["not_ranked", "warnings"]
    (sound,) = [row for row in rows if "wren" in row]
    (doubtful,) = [row for row in rows if "sparrow" in row]
    assert "1.50" in sound
    assert "cycles account for" in doubtful
    assert "1.67" not in doubtful


def test_a_list_shows_no_wrong_tau(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", measured(missed=3))
    where = ("--runs", str(workspace.root.parent))
    assert main(["eval", "--list", *where]) == 0
    (_, row) = capsys.readouterr().out.splitlines()
    assert "3.25" not in row
    assert "acceptance is broken" in row


@pytest.mark.parametrize("phase", ["prefill", "vision"])
@pytest.mark.parametrize("share", [0.35, 0.7, 1.0])
def test_less_work_on_a_part_of_the_prompts_is_in_doubt(
    phase: str, share: float
) -> None:
    """The drafter has it from a cache."""
    honest = measured(count=49, noise=0.05)
    prompts = [
        without(phase)(prompt) if number < share * 49 else prompt
        for number, prompt in enumerate(honest.prompts)
    ]
    made = evaluation("wren", replace(honest, prompts=tuple(prompts)))
    assert not doubted(evaluation("wren", honest))
    assert doubted(made)
    assert doubted(replace(made, temperatures=(beside_others(made.temperatures[0]),)))


def beside_others(at: Measurement) -> Measurement:
    """Other programs had half of the CPU."""
    return with_cpu_share(at, 0.5)


def with_own_steps(
    at: Measurement, slow_share: Callable[[PromptResult], float]
) -> Measurement:
    """With the target's own step beside each response, than which plain decoding's is slower."""
    draw = np.random.default_rng(0)

    def planted(one: PromptResult) -> PromptResult:
        slower_share = slow_share(one)
        step = one.plain.decode_seconds / one.plain.calls
        decode_seconds = slower_share * one.plain.decode_seconds
        seconds = one.plain.prefill_seconds + decode_seconds
        plain = replace(one.plain, seconds=seconds, decode_seconds=decode_seconds)
        own_step = step * float(np.exp(draw.normal(0, 0.05)))
        return replace(one, plain=plain, bare_step=own_step)

    return in_sequence(changed(at, planted))


def with_texts(at: Measurement) -> Measurement:
    """A quarter of the prompts have no image."""

    def planted(one: PromptResult) -> PromptResult:
        is_text = int(one.key[1:]) % 4 == 0
        return replace(one, kind="text") if is_text else one

    return changed(at, planted)


def in_texts(one: PromptResult) -> float:
    return 1.5 if one.kind == "text" else 1.0


def in_late_steps(one: PromptResult) -> float:
    """Each step of the last third takes twice as long."""
    return 1.33


def in_a_fifth(one: PromptResult) -> float:
    return 3.0 if int(one.key[1:]) % 5 == 0 else 1.0


@pytest.mark.parametrize("slow_share", [in_texts, in_late_steps, in_a_fifth])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_loop_that_is_slow_in_a_part_of_the_responses_is_in_doubt(
    slow_share: Callable[[PromptResult], float], temperature: float
) -> None:
    """Whatever its steps took when the machine was calibrated."""
    at = with_texts(measured(temperature, count=49))
    honest = evaluation("wren", with_own_steps(at, lambda one: 1.0))
    assert not doubted(honest)
    assert doubted(evaluation("wren", with_own_steps(at, slow_share)))


def test_where_others_had_most_of_the_cpu_no_slow_loop_is_told() -> None:
    """No drafter is ranked there."""
    at = with_cpu_share(with_own_steps(measured(), lambda one: 10.0), 0.3)
    assert audit.slow_baseline(evaluation("wren", at)) == []


def of_steps(steps: int, at: Measurement) -> Measurement:
    """The same seconds of a step, in responses of plain decoding with so many."""

    def planted(one: PromptResult) -> PromptResult:
        own = one.plain
        decode_seconds = own.decode_seconds * steps / own.calls
        plain = replace(
            own,
            tokens=1 + steps,
            calls=steps,
            passes=steps,
            decode_seconds=decode_seconds,
            seconds=own.prefill_seconds + decode_seconds,
        )
        return replace(one, plain=plain)

    return in_sequence(changed(at, planted))


@pytest.mark.parametrize(("steps", "tells"), [(1, False), (3, False), (8, True)])
def test_few_steps_of_a_response_do_not_tell_of_a_slow_loop(
    steps: int, tells: bool
) -> None:
    """The first ones after a prefill take longer than the target's own after the last."""
    slow = of_steps(steps, with_own_steps(measured(), lambda one: 1.3))
    assert bool(audit.slow_baseline(evaluation("wren", slow))) == tells


@pytest.mark.parametrize(("prompts", "doubts"), [(7, False), (24, True)])
def test_few_prompts_beside_other_programs_do_not_tell_of_less_work(
    prompts: int, doubts: bool
) -> None:
    at = beside_others(changed(measured(count=prompts), without("prefill")))
    assert doubted(evaluation("wren", at)) == doubts


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


def faster(one: PromptResult) -> PromptResult:
    """The drafter's seconds by one factor, wherever they are."""
    own = slower(0.93, one.drafted)
    seconds = [*one.turn.seconds]
    seconds[one.turn.drafted] = own.seconds
    return replace(one, drafted=own, turn=replace(one.turn, seconds=tuple(seconds)))


def not_rotated(one: PromptResult) -> PromptResult:
    plain_first = (one.plain.seconds, one.drafted.seconds)
    return replace(one, turn=replace(one.turn, plain=0, drafted=1, seconds=plain_first))


def best_of_three(one: PromptResult) -> PromptResult:
    ended = one.turn.ended + 2 * one.drafted.seconds
    return replace(one, turn=replace(one.turn, ended=ended))


@pytest.mark.parametrize(
    "plant",
    [scaled(0.5), scaled(0.9), scaled(1.2), faster, not_rotated, best_of_three],
)
def test_times_that_do_not_fill_the_clock_are_in_doubt(plant: Change) -> None:
    honest = in_sequence(measured(noise=0.05))
    assert not doubted(evaluation("wren", honest))
    assert doubted(evaluation("wren", changed(honest, plant)))


@pytest.mark.parametrize(("prompts", "doubts"), [(1, False), (2, False), (6, True)])
def test_a_machine_may_sleep_during_few_prompts(prompts: int, doubts: bool) -> None:
    """Only the machine's clock counts that time."""

    def planted(one: PromptResult) -> PromptResult:
        slept = 3600.0 if int(one.key[1:]) < prompts else 0.0
        return replace(one, turn=replace(one.turn, started=one.turn.started - slept))

    at = changed(measured(noise=0.05, count=49), planted)
    made = evaluation("wren", at)
    assert (
        any("something else ran" in text for text in audit.doubts_of_run(made))
        == doubts
    )


@pytest.mark.parametrize(
    ("share", "seconds", "doubts"),
    [(1.0, 0.015, False), (1.0, 0.022, True), (0.5, 0.022, False), (0.5, 0.03, True)],
)
def test_other_programs_may_run_between_decodings(
    share: float, seconds: float, doubts: bool
) -> None:
    """What this one does there takes longer by its share of the CPU."""

    def planted(one: PromptResult) -> PromptResult:
        turn = replace(one.turn, ended=one.turn.ended + seconds)
        plain = on_shared_cpu(one.plain, share)
        own = on_shared_cpu(one.drafted, share)
        return replace(one, plain=plain, drafted=own, turn=turn)

    at = changed(measured(), planted)
    found = audit.doubts_of_run(evaluation("wren", at))
    assert any("something else ran" in text for text in found) == doubts


@pytest.mark.parametrize("times", [1, 2, 3])
def test_prompts_that_are_decoded_several_times_are_in_doubt(times: int) -> None:
    """The fastest of these turns is in the record, and time passed meanwhile."""
    at = measured(count=12, noise=0.05)
    prompts = []
    now = 1_700_000_000.0
    for prompt in at.prompts:
        turn = prompt.turn
        passed = turn.ended - turn.started
        ended = now + passed
        prompts.append(
            replace(prompt, turn=replace(turn, started=now, ended=ended, other=0.0))
        )
        now = ended + (times - 1) * passed + 0.1
    made = evaluation("wren", replace(at, prompts=tuple(prompts)))
    assert doubted(made) == (times > 1)


def test_prompts_that_were_decoded_again_later_are_in_doubt() -> None:
    """As an evaluation continues whose unlucky prompts were removed."""
    at = measured(count=12, noise=0.05)
    last = at.prompts[-1].turn.ended
    turn = at.prompts[3].turn
    later = replace(turn, started=last + 1, ended=last + 1 + turn.ended - turn.started)
    third = replace(at.prompts[3], turn=later)
    made = replace(at, prompts=(*at.prompts[:3], third, *at.prompts[4:]))
    assert not doubted(evaluation("wren", at))
    assert doubted(evaluation("wren", made))


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_drafter_that_decodes_each_prompt_several_times_is_in_doubt(
    rounds: int,
) -> None:
    """All of its decodings are in the record, and its last or fastest counts."""

    def planted(one: PromptResult) -> PromptResult:
        turn = one.turn
        own = one.drafted.seconds
        before = [own] * (rounds - 1)
        seconds = [*turn.seconds]
        seconds[turn.drafted : turn.drafted] = before
        drafted_at = turn.drafted + rounds - 1
        plain_at = turn.plain + (rounds - 1) * (turn.drafted < turn.plain)
        ended = turn.ended + (rounds - 1) * own
        again = replace(
            turn,
            seconds=tuple(seconds),
            plain=plain_at,
            drafted=drafted_at,
            ended=ended,
        )
        return replace(one, turn=again)

    honest = measured(noise=0.05)
    assert doubted(evaluation("wren", changed(honest, planted)))


@pytest.mark.parametrize("more", [0, 1, 20])
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_sampled_calls_repeat_exactly_on_a_cpu_and_about_on_a_gpu(
    more: int, device: str
) -> None:
    """A GPU may round otherwise in another process; a drafter that knows responses saves far more."""
    cpu_seconds = 1.0 if device == "CPU" else None
    at = measured(1.0, cpu_seconds=cpu_seconds)
    again = tuple(
        Again(key=prompt.key, calls=prompt.drafted.calls + more, temperature=1.0)
        for prompt in at.prompts[:8]
    )
    honest = audit.failures(evaluation("wren", at))
    planted = audit.failures(evaluation("wren", at, again=again))
    assert (planted != honest) == (more > (0 if device == "CPU" else 1))


def test_a_warm_up_of_every_prompt_is_in_doubt() -> None:
    def twice(one: PromptResult) -> PromptResult:
        turn = one.turn
        seconds = tuple(spent for spent in turn.seconds for _ in range(2))
        plain, own = 2 * turn.plain + 1, 2 * turn.drafted + 1
        started = turn.ended - sum(seconds)
        again = replace(
            turn, seconds=seconds, plain=plain, drafted=own, started=started
        )
        return replace(one, turn=again)

    honest = measured(noise=0.05)
    first, *others = honest.prompts
    warmed = replace(honest, prompts=(twice(first), *others))
    assert not doubted(evaluation("wren", warmed))
    made = evaluation("wren", changed(honest, twice))
    assert any("decoded twice" in text for text in audit.doubts_of_run(made))


def running(plain: float, own: float) -> Change:
    """Shares of their seconds in which the sides run; they sleep in the others."""

    def planted(one: PromptResult) -> PromptResult:
        shared = replace(
            one.plain, cpu_seconds=plain * one.plain.seconds, delayed_seconds=0.0
        )
        return drafted(
            replace(one, plain=shared),
            cpu_seconds=own * one.drafted.seconds,
            delayed_seconds=0.0,
        )

    return planted


def test_a_drafter_that_waits_for_work_elsewhere_is_in_doubt() -> None:
    """Other devices or processes may do its work."""
    honest = changed(measured(), running(0.98, 0.97))
    assert not doubted(evaluation("wren", honest))
    planted = changed(measured(), running(0.98, 0.5))
    assert doubted(evaluation("wren", planted))
    beside = with_cpu_share(measured(), 0.82)
    assert not doubted(evaluation("wren", beside))
    assert doubted(evaluation("wren", that_waits(measured(), 0.82, 0.5)))


@pytest.mark.parametrize("count", [5, 12, 24])
@pytest.mark.parametrize("share", [0.99, 0.85, 0.6])
@pytest.mark.parametrize("every", [1, 2])
def test_a_drafter_that_sleeps_is_no_faster(
    share: float, count: int, every: int
) -> None:
    """In CPU seconds it would be 1.2 times as fast as it is."""
    awake = with_cpu_share(measured(count=count), share)
    asleep = that_waits(measured(count=count), share, 0.82 * share)
    prompts = [
        (one if number % every else other)
        for number, (one, other) in enumerate(
            zip(awake.prompts, asleep.prompts, strict=True)
        )
    ]
    made = evaluation("wren", replace(awake, prompts=tuple(prompts)))
    (result,) = of_drafters([made])
    assert result.doubts == []
    assert result.speedup == pytest.approx(1.5)


def test_seconds_in_which_other_programs_had_the_cpu_do_not_count() -> None:
    """They had more of plain decoding's, which makes a drafter faster by the clock."""
    at = with_cpu_share(measured(count=24), 0.72, 0.8)
    (result,) = of_drafters([evaluation("wren", at)])
    assert result.doubts == []
    assert result.speedup == pytest.approx(1.35)
    elapsed = [sum(side.seconds for side in sides) for sides in sides_of(at)]
    assert elapsed[0] / elapsed[1] == pytest.approx(1.5)


def sides_of(at: Measurement) -> tuple[list[Decoding], list[Decoding]]:
    """The responses of plain decoding, and of the drafter."""
    return [one.plain for one in at.prompts], [one.drafted for one in at.prompts]


@pytest.mark.parametrize("share", [1.0, 0.85, 0.6])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_programs_that_run_beside_a_drafter_alone_make_it_no_faster(
    every: int, share: float
) -> None:
    """They may be its own. On some prompts they have a quarter of what others leave it."""

    def planted(one: PromptResult) -> PromptResult:
        if int(one.key[1:]) % every:
            return one
        return replace(one, drafted=on_shared_cpu(one.drafted, 0.75 * share))

    at = changed(with_cpu_share(measured(count=24), share), planted)
    (result,) = of_drafters([evaluation("wren", at)])
    assert (result.speedup or 0.0) <= 1.06 * 1.5
    assert result.speedup is None or every == 5


def test_programs_that_run_beside_one_drafter_alone_make_no_other_the_fastest() -> None:
    quiet = with_cpu_share(measured(speedup=1.3, noise=0.01), 1.0)
    slower = changed(
        with_cpu_share(measured(noise=0.01), 1.0),
        lambda one: replace(one, drafted=on_shared_cpu(one.drafted, 0.7)),
    )
    (ranking,) = rank([evaluation("wren", quiet), evaluation("sparrow", slower)])
    assert ranking.winner is None
    assert "beside a drafter" in ranking.text


@pytest.mark.parametrize("share", [0.95, 0.85])
def test_a_speedup_is_not_known_where_the_time_of_other_programs_is_not(
    share: float,
) -> None:
    """As of several threads."""
    at = without_delays(with_cpu_share(measured(), share))
    (result,) = of_drafters([evaluation("wren", at)])
    assert result.doubts == []
    assert (result.speedup is None) == (share == 0.85)
    uneven = without_delays(with_cpu_share(measured(), 0.95, share))
    (slowed,) = of_drafters([evaluation("wren", uneven)])
    assert (slowed.speedup is None) == (share == 0.85)
    (known,) = of_drafters([evaluation("wren", with_cpu_share(measured(), share))])
    assert known.speedup == pytest.approx(1.5)


def test_delays_of_some_decodings_alone_are_a_failure() -> None:
    """Of the drafter they would make it faster."""
    at = with_cpu_share(measured(), 0.85)

    def planted(one: PromptResult) -> PromptResult:
        return replace(one, plain=replace(one.plain, delayed_seconds=None))

    assert not audit.failures(evaluation("wren", at))
    assert audit.failures(evaluation("wren", changed(at, planted)))


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("asleep", [False, True])
def test_delays_of_some_prompts_alone_are_unknown(asleep: bool, count: int) -> None:
    """An evaluation went on where the system does not tell them; or one prompt was to hide sleep."""
    at = with_cpu_share(measured(count=24), 0.85)
    if asleep:
        at = changed(measured(count=24), running(0.5, 0.85))
    unknown = without_delays(at)
    mixed = replace(at, prompts=(*unknown.prompts[:count], *at.prompts[count:]))
    (result,) = of_drafters([evaluation("wren", mixed)])
    assert result.broken == []
    assert result.speedup is None


def test_more_delays_than_time_are_a_failure() -> None:
    at = with_cpu_share(measured(), 0.95)
    made = changed(
        at, lambda one: drafted(one, delayed_seconds=0.1 * one.drafted.seconds)
    )
    assert audit.failures(evaluation("wren", made))


@pytest.mark.parametrize("count", [3, 8, 24])
@pytest.mark.parametrize(
    ("share", "own_share"), [(0.98 / 1.1, 0.98), (0.98 / 2, 0.98), (0.5, 0.85)]
)
def test_plain_decoding_that_sleeps_is_in_doubt(
    share: float, own_share: float, count: int
) -> None:
    """In each tenth step, for the time of a step or of ten; the drafter may sleep, too."""
    made = changed(measured(count=count), running(share, own_share))
    assert doubted(evaluation("wren", made))


@pytest.mark.parametrize("share", [0.99, 0.7])
@pytest.mark.parametrize("slow_share", [in_texts, in_late_steps, in_a_fifth])
def test_plain_decoding_that_sleeps_on_some_prompts_is_in_doubt(
    slow_share: Callable[[PromptResult], float], share: float
) -> None:
    """No CPU seconds tell so: its steps take longer than the target's own."""

    def beside(at: Measurement) -> Measurement:
        def own_step(one: PromptResult) -> PromptResult:
            return replace(one, bare_step=share * (one.bare_step or 0.0))

        return changed(with_cpu_share(at, share), own_step)

    def asleep(one: PromptResult) -> PromptResult:
        awake = one.plain.prefill_seconds + one.plain.decode_seconds / slow_share(one)
        return replace(one, plain=replace(one.plain, cpu_seconds=share * awake))

    at = with_texts(measured(count=49))
    honest = beside(with_own_steps(at, lambda one: 1.0))
    planted = changed(beside(with_own_steps(at, slow_share)), asleep)
    assert not doubted(evaluation("wren", honest))
    assert doubted(evaluation("wren", planted))


def test_two_sides_that_sleep_alike_are_a_warning() -> None:
    """As in a container with a limit, which counts for both."""
    (result,) = of_drafters(
        [evaluation("wren", changed(measured(), running(0.6, 0.6)))]
    )
    assert result.speedup == pytest.approx(1.5)
    assert any("ran for 60%" in warning for warning in result.warnings)
    (awake,) = of_drafters([evaluation("wren", with_cpu_share(measured(), 0.6))])
    assert not any("ran for" in warning for warning in awake.warnings)


def test_one_long_slice_of_another_program_is_no_sleep() -> None:
    """It takes a quarter of the time of a side, on two prompts."""
    at = with_cpu_share(measured(count=8), 0.98)
    late_plain = [
        replace(one, plain=on_shared_cpu(one.plain, 0.03)) for one in at.prompts[:2]
    ]
    late_drafted = [
        replace(one, drafted=on_shared_cpu(one.drafted, 0.03)) for one in at.prompts[:2]
    ]
    for late in (late_plain, late_drafted):
        made = evaluation("wren", replace(at, prompts=(*late, *at.prompts[2:])))
        (result,) = of_drafters([made])
        assert not result.unranked


def test_a_lone_record_that_is_faster_than_the_machine_is_in_doubt() -> None:
    """Its turns were scaled with the rest."""
    honest = evaluation("wren", measured(), calibrations=(calibration(), calibration()))
    assert not doubted(honest)

    def faster(one: PromptResult) -> PromptResult:
        return replace(
            one, plain=slower(0.4, one.plain), drafted=slower(0.4, one.drafted)
        )

    scaled_at = in_sequence(changed(measured(), faster))
    made = evaluation("wren", scaled_at, calibrations=honest.calibrations)
    assert doubted(made)
    # A single step may well take half of the median on a busy machine.
    of_one_step = of_steps(1, scaled_at)
    assert not audit.doubts_of_run(replace(made, temperatures=(of_one_step,)))


def test_steps_after_a_long_prompt_take_longer_than_all_others() -> None:
    """The calibrations decode the first prompt, which may be a video."""

    def planted(one: PromptResult) -> PromptResult:
        share = 1.5 if one.key == "k0" else 1.0
        return replace(
            one, plain=slower(share, one.plain), drafted=slower(share, one.drafted)
        )

    at = in_sequence(changed(measured(), planted))
    slow = calibration(plain_step=2.2 * 0.0138, bare_step=2.2 * 0.0138)
    assert not doubted(evaluation("wren", at, calibrations=(slow, slow)))


@pytest.mark.parametrize("side", ["plain", "drafted"])
def test_seconds_that_are_recorded_twice_must_agree(side: str) -> None:
    def planted(one: PromptResult) -> PromptResult:
        changes: dict[str, Any] = {side: slower(0.9, getattr(one, side))}
        return replace(one, **changes)

    honest = in_sequence(measured())
    assert audit.failures(evaluation("wren", honest)) == []
    assert audit.failures(evaluation("wren", changed(honest, planted)))


@pytest.mark.parametrize("given", [3, None])
@pytest.mark.parametrize("side", ["plain", "drafted"])
def test_one_seed_for_all_prompts_is_a_failure(side: str, given: int | None) -> None:
    """Whether it was given or drawn."""

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
    assert audit.failures(evaluation("wren", seeded(at), seed=given)) == []
    failures = audit.failures(evaluation("wren", seeded(at, other=True), seed=given))
    assert any("other seeds" in text for text in failures)


@pytest.mark.parametrize("side", ["plain", "drafted"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_seconds_that_another_clock_excludes_are_a_failure(
    side: str, share: float
) -> None:
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

    honest = changed(measured(speedup=1.5), running(0.95, 0.95))
    assert not doubted(evaluation("wren", honest))
    made = evaluation("wren", in_sequence(changed(honest, shortened)))
    assert bool(audit.failures(made)) == (share < 0.95)


def test_prompts_that_were_not_to_be_measured_or_twice_are_a_failure() -> None:
    at = measured(count=12)
    keys = tuple(one.key for one in at.prompts)
    assert not audit.failures(evaluation("wren", at, asked=keys))
    assert audit.failures(evaluation("wren", at, asked=keys[:8]))
    assert audit.failures(evaluation("wren", at, asked=()))
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


def test_records_of_a_run_share_all_of_plain_decoding() -> None:
    """Its delays too, which do not count."""
    at = beside_others(measured(noise=0.05))

    def planted(one: PromptResult) -> PromptResult:
        delayed_seconds = 0.7 * (one.plain.delayed_seconds or 0)
        return replace(one, plain=replace(one.plain, delayed_seconds=delayed_seconds))

    for other, doubts in ((at, False), (changed(at, planted), True)):
        (ranking,) = rank([evaluation("wren", at), evaluation("sparrow", other)])
        assert all(bool(result.beside) == doubts for result in ranking.results)


def test_records_of_a_run_share_the_times_of_all_decodings() -> None:
    """Here those of two drafters and plain decoding: one record was changed, its turns as well."""

    def of_three(share: float) -> Measurement:
        def planted(one: PromptResult) -> PromptResult:
            own = slower(share, one.drafted)
            seconds = (own.seconds, one.plain.seconds, 1.0)
            ended = one.turn.started + sum(seconds)
            turn = replace(one.turn, seconds=seconds, plain=1, drafted=0, ended=ended)
            return replace(one, drafted=own, turn=turn)

        return changed(measured(noise=0.05), planted)

    def doubts(share: float) -> list[bool]:
        both = [
            evaluation("wren", of_three(share)),
            evaluation("sparrow", of_three(1.0)),
        ]
        (ranking,) = rank(both)
        return [bool(result.beside) for result in ranking.results]

    assert doubts(1.0) == [False, False]
    assert doubts(0.8) == [True, True]


def test_a_selection_hides_no_other_record_of_a_run(
    workspace: Workspace, save: Save
) -> None:
    """Neither one that contradicts what is shown, nor an evaluation that was repeated."""
    at = measured(noise=0.05)
    save("wren", at)
    save("sparrow", with_own_steps(at, lambda one: 1.2))
    save("msd", at, stem="a", measured="2026-01-01 00:00:00", title="first")
    save("msd", at, stem="b", measured="2026-01-02 00:00:00", title="second")
    (found,) = read(workspace, where=["drafter = 'sparrow'"]).groups
    assert answers(found)[0].level == "none"
    (found,) = read(workspace, where=["name = 'first'"]).groups
    assert "msd at temperature 0 is one of 2" in str(found.facts)


def test_a_later_evaluation_hides_no_other_record_of_a_run(
    workspace: Workspace, save: Save
) -> None:
    """`status` and `explain` show the last evaluation of each drafter, as `report` does."""
    at = measured(noise=0.05)
    save("wren", at)
    save("sparrow", with_own_steps(at, lambda one: 1.2))
    save("sparrow", at, stem="later", measured="2026-01-03 00:00:00")
    last = selection.last_of_each(workspace.reports)
    assert [bool(result.beside) for result in last["wren"]] == [True]
    assert [bool(result.beside) for result in last["sparrow"]] == [False]


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


@pytest.mark.parametrize(
    ("slower", "doubts"), [(1.0, False), (1.25, False), (2.5, True)]
)
def test_a_machine_of_uneven_speed_is_no_slow_target(
    slower: float, doubts: bool
) -> None:
    """As a virtual one, whose steps vary by a seventh though it has its CPU."""

    def of_six(seed: int, share: float) -> Evaluation:
        draw = np.random.default_rng(seed)

        def planted(one: PromptResult) -> PromptResult:
            noise = float(np.exp(draw.normal(0, 0.2)))
            return generated(1.5 * 1.66 / share * noise)(one)

        return evaluation("wren", changed(measured(count=6), planted))

    before = audit.baseline(of_six(0, 1.0))
    assert doubted(replace(of_six(1, slower), earlier=before)) == doubts


def test_responses_of_a_single_token_are_not_compared_with_generate() -> None:
    at = changed(of_steps(0, measured()), generated(0.05))
    made = evaluation("wren", at)
    assert audit.against_stock(made) is None
    assert not audit.slow_baseline(made)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("busy", [False, True])
def test_plain_decoding_as_slow_as_a_machine_is_uneven_is_not_in_doubt(
    noise: float, busy: bool
) -> None:
    """Compared with `generate`, as with an earlier evaluation."""

    def is_doubted(slower: float) -> bool:
        def planted(one: PromptResult) -> PromptResult:
            sign = -1 if int(one.key[1:]) % 2 else 1
            seconds = 1.5 / slower * float(np.exp(sign * noise))
            return generated(seconds)(one)

        at = changed(measured(count=6), planted)
        made = evaluation("wren", beside_others(at) if busy else at)
        return bool(audit.slow_baseline(made))

    least = (1.5 if busy else 1.15) * np.exp(3 * noise / 5**0.5)
    assert not is_doubted(0.95 * least)
    assert is_doubted(1.2 * least)


def without_a_drafter(
    at: Measurement, share: float, prompts: int = 4, temperature: float = 0.0
) -> tuple[Again, ...]:
    """What prompts take in a process that has loaded none: this share of what they took."""
    return tuple(
        Again(
            key=one.key,
            calls=one.drafted.calls,
            temperature=temperature,
            encoding=0.01,
            plain_step=share * one.plain.decode_seconds / one.plain.calls,
        )
        for one in at.prompts[:prompts]
    )


@pytest.mark.parametrize("slower", [1.0, 1.15, 1.5, 1.65, 2.1, 2.4, 3.0])
@pytest.mark.parametrize("busy", [False, True])
def test_a_drafter_that_slows_the_target_is_in_doubt_at_once(
    slower: float, busy: bool
) -> None:
    """No evaluation before it is needed; beside other programs steps vary by more."""
    at = measured(noise=0.05)
    share = 0.5 / slower if busy else 1 / slower
    made = evaluation(
        "wren",
        beside_others(at) if busy else at,
        again=without_a_drafter(at, share),
    )
    assert bool(audit.slow_baseline(made)) == (slower > (2.2 if busy else 1.56))


@pytest.mark.parametrize("slower", [1.0, 1.8])
def test_a_drafter_that_slows_the_target_at_one_temperature_is_in_doubt(
    slower: float,
) -> None:
    greedy, sampled = measured(noise=0.05), measured(1.0, noise=0.05)
    alone = (
        *without_a_drafter(greedy, 1.0),
        *without_a_drafter(sampled, 1 / slower, temperature=1.0),
    )
    made = evaluation("wren", greedy, sampled, again=alone)
    assert bool(audit.slow_baseline(made)) == (slower > 1)


@pytest.mark.parametrize("busy", [False, True])
def test_a_drafter_that_slows_some_steps_more_than_others_is_in_doubt(
    busy: bool,
) -> None:
    """The spread that it causes itself excuses nothing."""
    honest = measured()

    def unevenly(one: PromptResult) -> float:
        return 1.6 if int(one.key[1:]) % 2 else 4.0

    # Its wrapper slows the target's own steps by chance, too.
    at = with_own_steps(honest, unevenly)
    own_step = float(np.mean([unevenly(one) for one in at.prompts]))
    at = changed(
        at, lambda one: replace(one, bare_step=own_step * (one.bare_step or 0.0))
    )
    made = evaluation(
        "wren",
        beside_others(at) if busy else at,
        again=without_a_drafter(honest, 0.5 if busy else 1.0),
    )
    assert audit.slow_baseline(made)


@pytest.mark.parametrize(
    ("slower", "doubts"), [(1.0, False), (1.5, False), (1.9, False), (2.1, True)]
)
def test_a_single_prompt_tells_only_of_a_target_of_half_the_speed(
    slower: float, doubts: bool
) -> None:
    at = measured(count=1)
    alone = without_a_drafter(at, 1 / slower)
    assert bool(audit.slow_baseline(evaluation("wren", at, again=alone))) == doubts


@pytest.mark.parametrize("steps", [3, 104])
def test_few_steps_do_not_tell_of_a_drafter_that_slows_the_target(steps: int) -> None:
    at = of_steps(steps, measured(count=40))
    alone = without_a_drafter(at, 0.3, prompts=40)
    made = evaluation("wren", at, again=alone)
    assert bool(audit.slow_baseline(made)) == (steps > 3)


@pytest.mark.parametrize(
    ("seconds", "doubts"), [(0.01, False), (0.06, False), (0.6, True)]
)
def test_responses_that_are_prepared_while_prompts_are_encoded_are_in_doubt(
    seconds: float, doubts: bool
) -> None:
    """Encoding belongs to no decoder, so no clock of a decoding has its time."""

    def planted(one: PromptResult) -> PromptResult:
        return replace(one, turn=replace(one.turn, encoding=seconds))

    at = changed(measured(noise=0.05), planted)
    assert doubted(evaluation("wren", at, again=without_a_drafter(at, 1.0))) == doubts


@pytest.mark.parametrize(("prompts", "doubts"), [(0, False), (2, False), (12, True)])
def test_responses_that_are_prepared_in_the_own_steps_are_in_doubt(
    prompts: int, doubts: bool
) -> None:
    """The target takes them right after plain decoding, and no decoder's clock has their time."""

    def planted(one: PromptResult) -> PromptResult:
        is_long = int(one.key[1:]) < prompts
        return replace(one, bare_step=(5 if is_long else 1) * (one.bare_step or 0))

    at = with_own_steps(measured(noise=0.05), lambda one: 1.0)
    assert doubted(evaluation("wren", changed(at, planted))) == doubts


@pytest.mark.parametrize("steps", [3, 104])
@pytest.mark.parametrize("longer", [1.0, 10.0])
def test_own_steps_are_compared_with_the_time_that_passed(
    steps: int, longer: float
) -> None:
    """Other programs had the CPU during the prefill, so CPU seconds of the steps are not known."""

    def planted(one: PromptResult) -> PromptResult:
        plain = on_shared_cpu(one.plain, 0.4)
        own = on_shared_cpu(one.drafted, 0.4)
        step = one.plain.decode_seconds / one.plain.calls
        return replace(one, plain=plain, drafted=own, bare_step=longer * step)

    made = evaluation("wren", changed(of_steps(steps, measured()), planted))
    found = any("own step" in doubt for doubt in audit.doubts_of_run(made))
    assert found == (steps > 3 and longer > 1)


@pytest.mark.parametrize("device", ["CPU", "GPU"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_changes_the_target_is_a_failure(
    temperature: float, device: str
) -> None:
    """Both sides decode with its weights, and are checked by them. A GPU may sample otherwise again."""

    def decoded(response: str) -> Change:
        def planted(one: PromptResult) -> PromptResult:
            cpu_seconds = 1.0 if device == "CPU" else None
            plain = replace(one.plain, response=response, cpu_seconds=cpu_seconds)
            own = replace(one.drafted, cpu_seconds=cpu_seconds)
            return replace(one, plain=plain, drafted=own)

        return planted

    def failures(response: str) -> list[str]:
        at = changed(measured(temperature), decoded(response))
        calls = at.prompts[0].drafted.calls
        alone = Again(
            key="k0", calls=calls, temperature=temperature, plain_response="its own"
        )
        return audit.failures(evaluation("wren", at, again=(alone,)))

    assert failures("its own") == []
    is_exact = device == "CPU" or temperature == 0
    assert bool(failures("another")) == is_exact


def test_an_evaluation_beside_other_programs_is_no_baseline(
    workspace: Workspace, save: Save
) -> None:
    """Compared with one it may be slower: CPU seconds of a step vary with the caches."""

    honest = changed(measured(), generated(1.5 * 1.66))
    disturbed = beside_others(changed(measured(), generated(1.5 * 2.2)))
    save("wren", disturbed, stem="a", measured="2026-01-01 00:00:00")
    save("wren", honest, stem="b", measured="2026-01-02 00:00:00")
    found = audit.first_baseline(workspace.reports, evaluation("wren", honest))
    assert found is not None
    assert found.measured == "2026-01-02 00:00:00"
    faster = replace(found, against_stock=2.2)
    assert audit.slow_baseline(evaluation("wren", honest, earlier=faster))
    busy = beside_others(honest)
    assert not audit.slow_baseline(evaluation("wren", busy, earlier=faster))
    fastest = replace(found, against_stock=2 * 1.66)
    assert audit.slow_baseline(evaluation("wren", busy, earlier=fastest))


def test_a_slow_step_is_in_doubt_where_generate_was_not_timed() -> None:
    honest = evaluation("wren", measured(1.0), calibrations=(calibration(),))
    before = audit.baseline(honest)
    assert not doubted(replace(honest, earlier=before))
    slow = calibration(plain_step=1.85 * 0.0138, bare_step=1.85 * 0.0137)
    assert doubted(replace(honest, calibrations=(slow,), earlier=before))


def test_the_earlier_evaluation_is_the_first_sound_one_of_the_same_machine(
    workspace: Workspace, save: Save
) -> None:
    """So plain decoding cannot become slower little by little."""

    def at(seconds: float) -> Measurement:
        return changed(measured(), generated(seconds))

    def found_for(seconds: float) -> Baseline:
        made = evaluation("sparrow", at(seconds))
        found = audit.first_baseline(workspace.reports, made)
        assert found is not None
        return found

    broken = (calibration(step_ratio=1.5),)
    save("wren", at(2.6), measured="2025-12-31 00:00:00", calibrations=broken)
    other = {"measured": "2026-01-01 00:00:00", "hardware": "another"}
    save("wren", at(2.6), stem="a", **other)
    save("wren", at(2.5), stem="b", measured="2026-01-02 00:00:00")
    first = found_for(2.2)
    assert first.measured == "2026-01-02 00:00:00"
    assert first.against_stock == pytest.approx(2.5 / 1.5)
    for number, seconds in enumerate((2.2, 1.95, 1.7)):
        found = found_for(seconds)
        assert found == first
        made = evaluation("wren", at(seconds), earlier=found)
        assert doubted(made) == (seconds < 2.17)
        moment = f"2026-01-0{3 + number} 00:00:00"
        save("wren", at(seconds), stem=f"c{number}", measured=moment, earlier=found)
    slow = at(1.6)
    others: tuple[dict[str, Any], ...] = (
        {"dtype": "bfloat16"},
        {"max_new_tokens": 12},
        {"asked": ("k7",)},
    )
    for other in others:  # the share of the prefill is another
        assert (
            audit.first_baseline(workspace.reports, evaluation("msd", slow, **other))
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


@pytest.mark.parametrize(
    "changes",
    [
        {"leak": None},
        {"leak": None, "parameters": 0, "weights": "of its buffers"},
        {"leak": Leak(samples=4200, unknown=1)},
        {"leak": Leak(samples=4199)},
    ],
)
def test_what_is_not_known_of_the_training_data_is_said(
    changes: dict[str, Any], workspace: Workspace, save: Save
) -> None:
    """The list of samples is lost or shortened, or names samples of another workspace."""
    save("wren", measured(), **changes)
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
    """By `eval` as well as by the report."""
    save("wren", measured(), not_again="out of memory")
    (found,) = read(workspace).groups
    for warnings in (found.warnings, drifts(found.evaluations)):
        assert [text for text in warnings if "out of memory" in text]


def test_a_list_warns_of_a_given_seed(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", measured(1.0), seed=7)
    (found,) = read(workspace).groups
    assert main(["eval", "--list", "--runs", str(workspace.root.parent)]) == 0
    listed = capsys.readouterr().out
    for said in (str(found.warnings), listed):
        assert "the seed of sampling was given" in said


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
