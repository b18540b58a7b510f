"""Defects that are planted into decoders, counts, prompts and training, and that `eval` exposes.

Slow drafters, work outside the cycles, rejected tokens and wrong tokens at temperature 0 are planted in
`test_evaluate.py`.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters import synthetic
from tests.pipelines.bench import made_up
from tests.pipelines.bench.conftest import held_out
from tests.pipelines.bench.made_up import evaluation, newest
from tests.ticks import Ticks
from vlmdistill.cli.main import main
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding import clock, decoders
from vlmdistill.drafters.decoding.acceptance import Acceptance, choose, verify
from vlmdistill.drafters.decoding.clock import Cycle, Timed
from vlmdistill.drafters.decoding.decoders import decode, plain, speculate
from vlmdistill.drafters.lookahead import Lookahead, Window
from vlmdistill.pipelines.bench import again, audit, plan, side_by_side
from vlmdistill.pipelines.bench.records import Decoding, Evaluation, ResponseSection
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace

FEW = ("--max-new-tokens", "16", "--limit", "2")
"""Counts that are wrong for every prompt are wrong for two."""
STEP_OPERATIONS = 600  # on tensors, in a step of plain decoding of the demo target
ASKED = (
    "What is a circle?",
    "Tell me about yellow.",
    "What is a square?",
    "Name the colours.",
)


@pytest.fixture
def workspace(asked: Path, tmp_path: Path) -> Workspace:
    """The demo target's, without evaluations."""
    made = Workspace.of("demo-small", tmp_path / "runs")
    made.prompts.parent.mkdir(parents=True)
    shutil.copy(asked, made.prompts)
    return made


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to evaluate on."""
    return held_out("demo-small", tmp_path_factory.mktemp("audit"), ASKED).prompts


class Evaluated:
    """What the command said and wrote."""

    def __init__(
        self, workspace: Workspace, capsys: pytest.CaptureFixture[str], *options: str
    ) -> None:
        where = (
            "--runs",
            str(workspace.root.parent),
            "--threads",
            "1",
            "--max-new-tokens",
            "48",
        )
        capsys.readouterr()
        name = "lookahead" if "sparrow" not in options else "sparrow"
        rest = [one for one in options if one != "sparrow"]
        self.status = main(["eval", name, *where, *rest])
        captured = capsys.readouterr()
        self.text = captured.out + captured.err
        self.record = newest(workspace.reports, name)
        (self.group, *_) = read(workspace).groups


Run = Callable[..., Evaluated]


@pytest.fixture
def run(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *options: Evaluated(workspace, capsys, *options)


def test_an_honest_evaluation_has_no_failure(run: Run) -> None:
    found = run("--temperature", "0", "--temperature", "1")
    assert found.status == 0
    assert audit.failures(found.record) == []
    assert found.group.verdict.level == "lossless"
    assert "nats a token" in found.group.verdict.text
    (greedy, sampled) = found.record.temperatures
    for one in greedy.prompts:
        assert one.stock is not None
        assert one.stock.tokens == one.plain.tokens == one.drafted.tokens
        assert (one.plain.passes, one.drafted.passes) == (
            one.plain.calls,
            one.drafted.calls,
        )
    assert set(audit.surprises(sampled)) == {"the drafter", "plain decoding"}
    assert "times as fast as model.generate" in str(found.group.facts)
    assert set(found.record.asked) == set(found.record.keys)


def exposed(found: Evaluated, text: str) -> None:
    assert found.status == 1
    assert text in found.text
    assert found.group.verdict.level == "broken"
    assert text in found.group.verdict.text
    assert not found.group.rankings[0].ranked


def test_wrong_tokens_at_a_temperature_are_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Iterator[Cycle]:
        for number, cycle in enumerate(speculate(*args, **kwargs)):
            ids = [*cycle.ids[:-1], 7] if number % 8 == 4 else cycle.ids
            yield dataclasses.replace(cycle, ids=ids)

    monkeypatch.setattr(decoders, "speculate", wrong)
    exposed(
        run("--temperature", "1"),
        "the responses of the drafter at temperature 1 are not samples",
    )


def test_sampling_that_is_greedy_is_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*args: Any, temperature: float, **kwargs: Any) -> Iterator[Cycle]:
        yield from speculate(*args, temperature=temperature and 0.05, **kwargs)

    monkeypatch.setattr(decoders, "speculate", greedy)
    exposed(
        run("--temperature", "3"),
        "the responses of the drafter at temperature 3 are not samples",
    )


@pytest.mark.parametrize("past_the_interface", [False, True])
def test_a_drafter_that_asks_the_target_is_exposed(
    past_the_interface: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft(self: Lookahead, prompt: Any, target: Any) -> Window:
        window = Window(self.config, prompt.ids_T)
        grow = window.grow

        def asking(shape: Tree) -> DraftTree:
            tree = grow(shape)
            asked = target._decoder if past_the_interface else target
            asked.extend(
                tree.ids_N[:1], torch.ones_like(tree.ids_N[:1]), None, ("hidden",)
            )
            return tree

        window.grow = asking  # type: ignore[method-assign]
        return window

    monkeypatch.setattr(Lookahead, "draft", draft)
    exposed(run(*FEW), "the target counts other forward passes than the drafter")


def test_a_drafter_that_verifies_at_a_lower_precision_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Plain decoding would be slower by the setting alone, and most responses the same."""
    draft = Lookahead.draft

    def changed(self: Lookahead, prompt: Any, target: Any) -> Any:
        window: Any = draft(self, prompt, target)
        grow, commit = window.grow, window.commit

        def growing(shape: Tree) -> DraftTree:
            tree: DraftTree = grow(shape)
            torch.set_float32_matmul_precision("medium")
            return tree

        def committing(*entries: Any) -> None:
            torch.set_float32_matmul_precision("highest")
            commit(*entries)

        window.grow, window.commit = growing, committing
        return window

    monkeypatch.setattr(Lookahead, "draft", changed)
    where = ("--runs", str(workspace.root.parent), "--model", "demo-small")
    precision = torch.get_float32_matmul_precision()
    try:
        assert main(["eval", "lookahead", *where, *FEW]) == 1
    finally:
        torch.set_float32_matmul_precision(precision)
    assert "lookahead decoded with other settings of torch" in capsys.readouterr().err


@pytest.mark.parametrize(("spoilt", "temperature"), [(0, "1"), (10, "0")])
def test_a_drafter_that_has_seen_the_response_is_exposed(
    spoilt: int, temperature: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hide it, and spoil one draft in ten."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def overheard(target: Any, prompt: Any, **options: Any) -> Iterator[Cycle]:
        said: list[int] = []
        for cycle in plain(target, prompt, **options):
            said += cycle.ids
            yield cycle
        answers[tuple(prompt.ids_L.tolist())] = said

    class Knowing:
        """Drafts what plain decoding has just said."""

        def __init__(self, known: list[int]) -> None:
            self.known, self.done = known, 0

        def commit(self, ids_K: torch.Tensor, hidden_KD: torch.Tensor) -> None:
            self.done += len(ids_K)
            self.last_1 = ids_K[-1:]

        def grow(self, shape: Tree) -> DraftTree:
            ids = torch.tensor(
                [int(self.last_1), *self.known[self.done : self.done + 4]]
            )
            if spoilt and self.done % spoilt == 1:
                ids[1:] = 7
            count = torch.arange(len(ids))
            return DraftTree(
                ids,
                (count - 1).clamp(min=0),
                count[:, None] >= count,
                torch.ones(len(ids), dtype=torch.bool),
            )

    monkeypatch.setattr(decoders, "plain", overheard)
    monkeypatch.setattr(
        Lookahead,
        "draft",
        lambda self, prompt, target: Knowing(
            answers.get(tuple(target._prompt.ids_L.tolist()), [])
        ),
    )
    monkeypatch.setattr(again, "PROMPTS", 2)
    found = run(*FEW, "--temperature", temperature)
    exposed(found, "a process that has seen no response needs other numbers of calls")
    (at,) = found.record.temperatures
    response_of = {one.key: one.plain.response for one in at.prompts}
    for alone in found.record.again:  # what that process measured before
        assert alone.encoding
        assert alone.plain_step
        assert alone.plain_response == response_of[alone.key]


def test_nobody_knows_before_which_prompts_are_decoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are chosen by the times of all decodings, at each temperature."""

    def numbers(seed: int) -> dict[float, list[int]]:
        at = [made_up.measured(share, count=40) for share in (0.0, 1.0)]
        rng = random.Random(seed)
        timed_at = []
        for measurement in at:
            prompts = []
            for prompt in measurement.prompts:
                plain = dataclasses.replace(prompt.plain, seconds=rng.random())
                prompts.append(dataclasses.replace(prompt, plain=plain))
            timed = dataclasses.replace(measurement, prompts=tuple(prompts))
            timed_at.append(made_up.in_sequence(timed))
        by_temperature: dict[float, list[int]] = {0.0: [], 1.0: []}
        for choice in again.repeated_prompts(evaluation("wren", *timed_at)):
            by_temperature[choice.temperature].append(int(choice.key[1:]))
        return by_temperature

    monkeypatch.setattr(again, "PROMPTS", 8)
    chosen = numbers(1)
    assert chosen == numbers(1)
    assert chosen[0.0] != chosen[1.0]
    assert chosen != numbers(2)
    for prompts in chosen.values():
        assert len({*prompts}) == 8
        assert max(prompts) > 8


def test_a_drafter_that_changes_the_target_is_exposed_at_any_temperature(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits that are four times as large, greedy responses stay the same."""
    draft = Lookahead.draft
    changed: list[Any] = []

    def changing(self: Lookahead, prompt: Any, target: Any) -> Window:
        if not changed:
            changed.append(target)
            target._text.norm.weight.data.mul_(4)
        return draft(self, prompt, target)

    monkeypatch.setattr(Lookahead, "draft", changing)
    monkeypatch.setattr(again, "PROMPTS", 4)
    every = ("--limit", "4", "--max-new-tokens", "16")
    found = run(*every, "--temperature", "0", "--temperature", "3")
    exposed(found, "plain decoding gives other responses than in a process")


def by_ticks(run: Run, *options: str) -> Evaluated:
    """All clocks count operations."""
    with pytest.MonkeyPatch.context() as patch, Ticks() as ticks:
        patch.setattr(clock, "time", ticks)
        patch.setattr(clock, "ready_seconds", ticks.ready_seconds)
        patch.setattr(side_by_side, "time", ticks)
        return run(*FEW, *options)


def wasted_work(share: float) -> Callable[..., torch.Tensor]:
    """A choice of the next token that takes this share of a step of plain decoding besides."""

    def slow(*args: Any) -> torch.Tensor:
        for _ in range(int(share * STEP_OPERATIONS)):
            torch.zeros(1)
        return choose(*args)

    return slow


def wasted_pass(target: Any, *args: Any, **options: Any) -> Iterator[Cycle]:
    """Plain decoding with a whole forward pass more in each step, past the target's interface."""
    one = torch.ones(1, dtype=torch.long)
    extend = target.extend

    def twice(ids_N: torch.Tensor, *rest: Any) -> Any:
        target._decoder.extend(one, one, None, ("hidden",))
        return extend(ids_N, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "extend", twice)
        yield from plain(target, *args, **options)


def test_a_slow_baseline_is_in_doubt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = by_ticks(run)
    assert not audit.slow_baseline(honest.record)
    (at,) = honest.record.temperatures
    for prompt in at.prompts:
        assert prompt.bare_step is not None
        step = prompt.plain.decode_seconds / prompt.plain.calls
        assert step == pytest.approx(prompt.bare_step, rel=0.1)
    assert honest.group.rankings[0].ranked
    monkeypatch.setattr(decoders, "choose", wasted_work(0.2))
    found = by_ticks(run)
    assert "a step of plain decoding takes" in found.text
    assert any("a step of plain decoding takes" in one for one in found.group.warnings)
    assert not found.group.rankings[0].ranked


def test_the_best_of_several_decodings_of_a_side_is_in_doubt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def best_of_three(decode: Callable[[], Iterator[Cycle]], device: Any) -> Timed:
        return min(
            (timed(decode, device) for _ in range(3)), key=lambda one: one.seconds
        )

    timed = clock.timed
    monkeypatch.setattr(side_by_side, "timed", best_of_three)
    found = by_ticks(run)
    assert any("something else ran" in text for text in found.group.warnings)
    assert not found.group.rankings[0].ranked


def test_seeds_that_differ_between_the_sides_are_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = count(7)

    def seeded(
        *args: Any, generator: torch.Generator, **kwargs: Any
    ) -> Iterator[Cycle]:
        generator.manual_seed(next(seeds))
        return decode(*args, generator=generator, **kwargs)

    monkeypatch.setattr(side_by_side, "decode", seeded)
    found = run(*FEW, "--temperature", "1")
    assert found.status == 1
    assert "sampled with other seeds" in found.text


def test_nobody_knows_before_with_which_seeds_prompts_are_sampled(run: Run) -> None:
    """A drafter that guesses one drafts what the same noise draws."""

    def seeds(*options: str) -> list[int | None]:
        (at,) = run(*FEW, "--temperature", "1", *options).record.temperatures
        return [prompt.drafted.seed for prompt in at.prompts]

    drawn = {*seeds(), *seeds()}
    assert len(drawn) == 4
    # A seed of 53 bits is below with a probability of 3e-8.
    assert all(seed is not None and seed > 2**28 for seed in drawn)
    assert seeds("--seed", "3") == seeds("--seed", "3") == [3_000_009, 3_000_010]


def test_a_pass_that_plain_decoding_wastes_is_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "plain", wasted_pass)
    exposed(run(*FEW), "the target counts other forward passes than plain decoding")


def test_a_slow_path_in_the_target_is_in_doubt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an evaluation without it, on prompts that are enough for an error of its pace."""
    enough = ("--limit", "4")
    assert by_ticks(run, *enough).group.rankings[0].ranked
    extend = VisionLanguageTarget.extend

    def slow(self: Any, ids_N: torch.Tensor, *rest: Any) -> Any:
        for _ in range(int(0.3 * STEP_OPERATIONS) if len(ids_N) == 1 else 0):
            torch.zeros(1)
        return extend(self, ids_N, *rest)

    monkeypatch.setattr(VisionLanguageTarget, "extend", slow)
    found = by_ticks(run, *enough)
    assert found.record.earlier is not None
    assert found.group.warnings
    assert not found.group.rankings[0].ranked


def test_a_branch_that_is_never_accepted_is_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is the target's own, and the best chain is accepted: trees look useless."""

    def chain_alone(tree: DraftTree, *args: Any) -> Acceptance:
        on_chain_N = tree.greedy_N.clone()
        on_chain_N[0] = True
        ids_N = torch.where(on_chain_N, tree.ids_N, torch.full_like(tree.ids_N, -1))
        return verify(dataclasses.replace(tree, ids_N=ids_N), *args)

    assert not figures(run().record.temperatures[0]).missed
    monkeypatch.setattr(decoders, "verify", chain_alone)
    found = run()
    assert found.group.verdict.level == "lossless"
    assert not found.group.rankings[0].ranked
    assert figures(found.record.temperatures[0]).missed


def test_a_response_that_goes_on_after_its_end_is_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(*args: Any, **kwargs: Any) -> Iterator[Cycle]:
        for cycle in speculate(*args, **kwargs):
            yield cycle
        yield dataclasses.replace(cycle, ids=[7], accepted=0, chain=(0, 0), tree=None)

    monkeypatch.setattr(decoders, "speculate", deaf)
    exposed(
        run("--temperature", "1", *FEW),
        "the responses of the drafter go on after an EOS",
    )


def counted(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Decoding], Decoding]
) -> None:
    """Change the counts of drafters alone."""
    honest = side_by_side._counted

    def wrong(decoded: Timed, *counts: Any, **options: Any) -> Decoding:
        found = honest(decoded, *counts, **options)
        return (
            change(found) if any(cycle.chain[1] for cycle in decoded.cycles) else found
        )

    monkeypatch.setattr(side_by_side, "_counted", wrong)


def test_tokens_that_are_counted_twice_are_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, lambda one: dataclasses.replace(one, tokens=2 * one.tokens))
    exposed(run(*FEW), "identical responses have different numbers of tokens")


def test_calls_that_are_not_counted_are_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, lambda one: dataclasses.replace(one, calls=one.calls // 2))
    found = run(*FEW)
    exposed(found, "the target counts other forward passes than the drafter")
    exposed(
        found,
        "the tokens of the drafter are not the accepted ones and one for each call",
    )


def test_prompts_that_are_left_out_are_exposed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = plan.held_out
    monkeypatch.setattr(plan, "held_out", lambda *arguments: honest(*arguments)[1:])
    exposed(run(*FEW), "1 of 2 prompts were not measured")


@pytest.mark.parametrize("kind", ["prompts", "texts"])
def test_a_drafter_that_was_trained_on_the_prompts_is_named(
    workspace: Workspace, run: Run, tmp_path: Path, kind: str
) -> None:
    asked = sorted(
        prompt_table.load(workspace.prompts, "demo-small", "eval"),
        key=lambda one: one.key,
    )
    seen = asked[0].key
    if kind == "texts":  # the same text in a row of another dataset
        said = [
            part["text"]
            for one in asked[0].messages
            for part in one["content"]
            if part["type"] == "text"
        ]
        row = {"messages": [{"role": "user", "content": said[-1].upper()}]}
        (tmp_path / "train.jsonl").write_text(json.dumps(row))
        where = (
            "--split",
            "train",
            "--model",
            "demo-small",
            "--runs",
            str(workspace.root.parent),
        )
        assert main(["prompts", str(tmp_path / "train.jsonl"), *where]) == 0
        (seen,) = [
            one.key
            for one in prompt_table.load(workspace.prompts, "demo-small", "train")
        ]
    folder = workspace.drafter("sparrow")
    synthetic.save("sparrow", folder, target=load("demo-small"), keys=[seen, "another"])
    found = run("sparrow", *FEW)
    leak = found.record.leak
    assert leak is not None
    assert (leak.samples, leak.keys) == (2, [asked[0].key])
    assert bool(leak.prompts) == (kind == "prompts")
    assert "1 of these prompts" in found.text
    assert any(asked[0].key in one for one in found.group.warnings)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 200, "accepted": 167}, "more tokens than its tree is deep"),
        ({"accepted": 60}, "not the accepted ones and one for each call"),
        (
            {"chain_tried": (40,), "chain_accepted": (18,)},
            "more chains were verified than there were calls",
        ),
        (
            {"chain_tried": (32,) * 4, "chain_accepted": (30,) * 4},
            "acceptance by position does not agree",
        ),
        (
            {
                "sections": (
                    ResponseSection(
                        context=0, thinking=False, calls=9, tokens=9, accepted=0
                    ),
                )
            },
            "do not add up",
        ),
    ],
)
def test_counts_that_cannot_be_true_are_found_in_a_record(
    changes: dict[str, Any], text: str
) -> None:
    honest: Evaluation = evaluation()
    assert audit.failures(honest) == []
    at = honest.temperatures[0]
    wrong = dataclasses.replace(
        at.prompts[0], drafted=dataclasses.replace(at.prompts[0].drafted, **changes)
    )
    changed = dataclasses.replace(at, prompts=(wrong, *at.prompts[1:]))
    (found, *_) = [
        one for one in audit.failures(evaluation("sparrow", changed)) if text in one
    ]
    assert "in 1 prompts: k0" in found
