"""`explain`: a drafter with a planted weakness is told that weakness, and the command that helps."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.test_overview import printed
from tests.drafters import synthetic
from tests.pipelines.bench import made_up
from vlmdistill.cli.main import app, main
from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import (
    Calibration,
    Measurement,
    PromptKind,
    PromptResult,
    Training,
)
from vlmdistill.pipelines.planning.explain import LEAST_OF_A_LAYER

pytestmark = pytest.mark.usefixtures("workplace")
Output = pytest.CaptureFixture[str]
Rates = Sequence[float]

RESULTS = Path(__file__).parents[2] / "docs/measurements/results.md"
ROOT = Path("runs/other")
GOOD: Rates = catalogue.choice("eagle2").reached
CYCLES = 1000  # of a response
PROMPTS = 6  # of a kind
CALIBRATION = Calibration(
    plain_step=0.1,
    bare_step=0.1,
    step_ratio=1.0,
    step_bytes=1000,
    small_product=0.1,
    large_product=0.1,
    bandwidth=1e9,
)


def train(name: str = "mine", method: str = "eagle2", **changes: Any) -> None:
    """Save a drafter as a good training leaves it, but for the changes."""
    training = {
        "signature": "s",
        "steps": 600,
        "saved_step": 600,
        "samples": 1000,
        "view": None,
        "stages": [{"name": "text", "steps": 600, "passes": 5.0}],
        "history": [{"stage": "text", "step": 600, "held_out_agreement": GOOD}],
    }
    keys = changes.pop("keys", ())
    folder = ROOT / "drafters" / name
    synthetic.save(method, folder, keys=keys, **{**training, **changes})


def response(prompt: PromptResult, kind: PromptKind, rates: Rates) -> PromptResult:
    """A prompt of a kind, whose drafted tokens were accepted at these rates."""
    reached = [CYCLES]
    for rate in rates:
        reached.append(round(rate * reached[-1]))
    drafted = dataclasses.replace(
        prompt.drafted,
        calls=CYCLES,
        passes=CYCLES,
        tokens=sum(reached) + 1,
        accepted=sum(reached[1:]),
        chain_tried=tuple(reached[:-1]),
        chain_accepted=tuple(reached[1:]),
    )
    tokens = drafted.tokens
    plain = dataclasses.replace(
        prompt.plain, tokens=tokens, calls=tokens - 1, passes=tokens - 1
    )
    return dataclasses.replace(
        prompt, key=f"{kind} {prompt.key}", kind=kind, drafted=drafted, plain=plain
    )


def evaluate(
    rates: Mapping[PromptKind, Rates], name: str = "mine", **changes: Any
) -> None:
    """Write an evaluation with these rates of acceptance by kind of prompt."""
    prompts = []
    for kind, of_kind in rates.items():
        measured = made_up.measured(count=PROMPTS)
        prompts += [response(prompt, kind, of_kind) for prompt in measured.prompts]
    measurement = made_up.in_sequence(
        Measurement(temperature=0.0, prompts=tuple(prompts))
    )
    length = max(map(len, rates.values()))
    fields = {"drafter": "eagle2", "tree": f"chain-{length}", **changes}
    fields.setdefault("training", Training(signature="s"))
    fields["max_new_tokens"] = 2 * CYCLES * (1 + length)
    evaluation = made_up.evaluation(name, measurement, **fields)
    records.write(evaluation, records.new_file(ROOT / "reports", name))


def symptoms(capsys: Output, name: str = "mine", model: str = "other") -> list[str]:
    """What stands out, each with its command, which the program takes."""
    explained = printed(capsys, "explain", name, "--model", model)
    group: Any = typer.main.get_command(app)
    lines = []
    for symptom in explained["symptoms"]:
        words = shlex.split(symptom["command"])
        assert words[0] == "vlmdistill"
        group.commands[words[1]].make_context(words[1], words[2:])
        lines.append(f"{symptom['text']}: {symptom['command']}")
    assert len(lines) <= 5
    return lines


def test_what_methods_reached_is_what_the_page_of_results_says() -> None:
    _, _, table = RESULTS.read_text().partition("| method | 1 | 2 | 3 | 4 |")
    reached = {}
    for name, cells in re.findall(
        r"^\| `(\w+)` \| ([\d. |]+) \|$", table, re.MULTILINE
    ):
        reached[name] = tuple(map(float, cells.split(" | ")))
    choices = catalogue.choices().items()
    listed = {name: choice.reached for name, choice in choices if choice.reached}
    assert {name: reached[name] for name in listed} == listed
    layers = [rates for name, rates in listed.items() if name != "medusa"]
    assert tuple(map(min, zip(*layers, strict=True))) == LEAST_OF_A_LAYER


def test_seconds_of_other_programs_do_not_count(capsys: Output) -> None:
    """They had more of plain decoding's than of the drafter's, by which it is 1.5 by the clock."""
    train()
    busy = made_up.with_cpu_share(made_up.measured(), 0.72, 0.8)
    made = made_up.evaluation("mine", busy, drafter="eagle2")
    records.write(made, records.new_file(ROOT / "reports", "mine"))
    assert main(["explain", "mine", "--model", "other"]) == 0
    assert "speedup 1.35\n" in capsys.readouterr().out


@pytest.mark.parametrize("missed", [0, 5])
def test_a_speedup_in_doubt_is_not_printed(capsys: Output, missed: int) -> None:
    train()
    at = made_up.measured(missed=missed)
    made = made_up.evaluation("mine", at, drafter="eagle2")
    records.write(made, records.new_file(ROOT / "reports", "mine"))
    assert main(["explain", "mine", "--model", "other"]) == 0
    assert ("speedup 1.50" in capsys.readouterr().out) == (not missed)


@pytest.mark.parametrize("missed", [0, 5])
def test_nothing_is_said_by_acceptance_in_doubt(capsys: Output, missed: int) -> None:
    """Neither printed nor compared with the method's; that of the training is there."""
    train()
    evaluate({"text": (0.3, 0.3, 0.3, 0.3), "image": (0.8, 0.5, 0.5, 0.5)})
    (file,) = (ROOT / "reports").glob("mine.*.json")
    made = records.read(file)
    (at,) = made.temperatures
    prompts = tuple(
        dataclasses.replace(
            prompt, drafted=dataclasses.replace(prompt.drafted, missed=missed)
        )
        for prompt in at.prompts
    )
    at = dataclasses.replace(at, prompts=prompts)
    records.write(dataclasses.replace(made, temperatures=(at,)), file)
    explained = printed(capsys, "explain", "mine", "--model", "other")
    assert bool(explained["acceptance"]) == (not missed)
    assert bool(explained["acceptance_by_kind"]) == (not missed)
    assert any("by kind" in text for text in symptoms(capsys)) == (not missed)
    compared = explained["reference"]["verdict"]
    assert (compared == "as good") == bool(missed)


def test_of_a_good_drafter_nothing_stands_out(capsys: Output) -> None:
    train()
    evaluate({"text": GOOD, "image": GOOD})
    assert symptoms(capsys) == []
    assert main(["explain", "mine", "--model", "other"]) == 0
    shown = capsys.readouterr().out
    assert "nothing stands out" in shown
    assert "0.90 0.83 0.72 0.73 by drafted token" in shown


@pytest.mark.parametrize(
    ("rate", "verdict"), [(0.95, "better"), (0.83, "as good"), (0.6, "worse")]
)
def test_a_drafter_is_judged_by_what_its_method_reached(
    rate: float, verdict: str, capsys: Output
) -> None:
    train()
    evaluate({"text": (rate,) * 4})
    assert main(["explain", "mine", "--model", "other"]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.split("\n") if "beside demo" in line
    ]
    assert f"  {verdict}: " in line
    assert "eagle2 reached 3.58 there (0.90 0.83 0.72 0.73)" in line


def test_a_faster_drafter_of_the_workspace_is_named(capsys: Output) -> None:
    for name, speedup in (("mine", 1.5), ("rival", 2.0)):
        train(name)
        measured = made_up.measured(speedup=speedup, count=8)
        evaluation = made_up.evaluation(name, measured, drafter="eagle2")
        records.write(evaluation, records.new_file(ROOT / "reports", name))
    named = [line for line in symptoms(capsys) if "rival is better" in line]
    assert len(named) == 1
    assert "1.33 times as fast" in named[0]
    assert not any("is better" in line for line in symptoms(capsys, "rival"))


def test_a_warning_of_the_evaluation_is_told(capsys: Output) -> None:
    train()
    lossy = made_up.measured(count=8, own=["different"] * 8)
    evaluation = made_up.evaluation("mine", lossy, drafter="eagle2")
    records.write(evaluation, records.new_file(ROOT / "reports", "mine"))
    warning = "its evaluation warns: it is not lossless"
    assert any(warning in line for line in symptoms(capsys))


@pytest.mark.parametrize(
    "changes", [{"weights": "others"}, {"training": Training(signature="before")}]
)
def test_an_evaluation_of_other_weights_is_told(
    changes: dict[str, Any], capsys: Output
) -> None:
    train()
    evaluate({"image": GOOD}, **changes)
    assert any("its evaluation warns: measured" in text for text in symptoms(capsys))


def test_an_untrained_drafter_is_to_be_trained(capsys: Output) -> None:
    synthetic.save("eagle2", ROOT / "drafters/mine")
    (line,) = symptoms(capsys)
    assert "not trained" in line
    assert "vlmdistill train eagle2 --name mine --force" in line


def test_an_imported_drafter_is_to_be_trained_on_responses_of_the_target(
    capsys: Output,
) -> None:
    train(steps=0, samples=0, imported={"from": "published"}, stages=[], history=[])
    evaluate({"text": (0.5, 0.5, 0.5, 0.5)})
    first, *_ = symptoms(capsys)
    assert "as imported" in first
    assert "--init mine" in first


def test_few_steps_and_few_samples_are_told_apart(capsys: Output) -> None:
    low = (0.5, 0.5, 0.5, 0.5)
    for passes, remedy in ((0.5, "--set steps="), (40.0, "vlmdistill prompts")):
        train(stages=[{"name": "text", "steps": 60, "passes": passes}], steps=60)
        evaluate({"text": low, "image": low})
        first, *_ = symptoms(capsys)
        assert "first drafted token is accepted in 50%" in first
        assert remedy in first


def test_a_kind_that_training_lacked_is_named(capsys: Output) -> None:
    store = synthetic.store(ROOT / "features", 9)
    rows = store.view(None).select("key", "visual_tokens")
    texts = [key for key, visual_tokens in rows.iter_rows() if not visual_tokens]
    train(keys=texts)
    evaluate({"text": GOOD, "image": (0.5, 0.8, 0.7, 0.7)})
    (line,) = [line for line in symptoms(capsys) if "by kind" in line]
    assert "0% of its samples are of images" in line
    assert "vlmdistill prompts FILE" in line


def test_a_last_stage_of_images_alone_is_named_where_text_is_worse(
    capsys: Output,
) -> None:
    train()  # by the paper's schedule: text, then images
    evaluate({"text": (0.4, 0.8, 0.7, 0.7), "image": GOOD})
    (line,) = [line for line in symptoms(capsys) if "by kind" in line]
    assert "its last stage has images alone" in line
    assert "visual=[0.5,0.5]" in line


@pytest.mark.parametrize(
    ("method", "agreement", "remedy"),
    [
        ("wren", (0.94, 0.55, 0.43, 0.4, 0.4, 0.4), "stages.stage2.hops=6"),
        ("eagle2", (0.90, 0.83, 0.4), "stages.multimodal.hops=4"),
        # It trains as many as it drafts.
        ("wren", (0.94, 0.55, 0.43, 0.4), "stages.stage2.epochs=40"),
        ("medusa", (0.65, 0.1), "stages.multimodal.epochs=40"),
        # None misses twice as often: together they cost the verdict.
        ("wren", (0.91, 0.87, 0.86, 0.86), "stages.stage2.epochs=40"),
    ],
)
def test_later_tokens_that_are_missed_ask_for_hops_or_a_longer_last_stage(
    method: str, agreement: Rates, remedy: str, capsys: Output
) -> None:
    measured = {"stage": "last", "step": 600, "held_out_agreement": agreement}
    train(method=method, history=[measured])
    lines = symptoms(capsys)
    assert any("after the first drafted token" in line for line in lines)
    assert any(remedy in line for line in lines)
    assert any("vlmdistill eval mine" in line for line in lines)  # it has no evaluation


def test_a_drafter_that_is_worse_by_its_first_token_alone_is_told_that(
    capsys: Output,
) -> None:
    measured = {
        "stage": "stage2",
        "step": 600,
        "held_out_agreement": (0.83, 0.93, 0.92, 0.92),
    }
    train(method="wren", history=[measured])
    lines = symptoms(capsys)
    assert any("first drafted token is accepted in 83%" in line for line in lines)
    assert not any("after the first" in line for line in lines)


def test_a_last_stage_of_a_number_of_steps_gets_as_many_more(capsys: Output) -> None:
    stages = [{"name": "stage2", "steps": 200, "passes": 5.0}]
    measured = {"stage": "stage2", "step": 600, "held_out_agreement": (0.94, 0.5)}
    train(method="wren", stages=stages, history=[measured])
    file = ROOT / "drafters/mine/config.json"
    described = json.loads(file.read_text())
    described["config"]["steps"] = 600
    file.write_text(json.dumps(described))
    (line,) = [line for line in symptoms(capsys) if "last stage" in line]
    assert "--set steps=800 --set stages.stage2.epochs=40" in line


def test_a_drafter_of_a_view_is_trained_again_on_that_view(capsys: Output) -> None:
    train(view="long", steps=60, stages=[{"name": "text", "steps": 60, "passes": 0.5}])
    evaluate({"text": (0.5, 0.5, 0.5, 0.5)})
    first, *_ = symptoms(capsys)
    assert "train eagle2 --name mine --view long --set steps=" in first


def test_an_imported_drafter_is_not_trained_over(capsys: Output) -> None:
    train(steps=0, samples=0, imported={"from": "published"}, stages=[], history=[])
    evaluate({"text": (0.9, 0.5, 0.5, 0.5)})
    (line,) = [line for line in symptoms(capsys) if "after the first" in line]
    assert "--init mine" in line
    assert "--force" not in line


@pytest.mark.parametrize(
    ("rates", "word"),
    [
        ((0.95, 0.95), "short"),
        ((0.9, 0.83, 0.5, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2), "long"),
    ],
)
def test_a_chain_of_a_wrong_length_is_named_with_a_better_one(
    rates: Rates, word: str, capsys: Output
) -> None:
    train()
    evaluate({"text": rates, "image": rates})
    (line,) = [line for line in symptoms(capsys) if "chain" in line]
    assert f"too {word}" in line
    (length,) = re.findall(r"--tree chain-(\d+)", line)
    assert (int(length) > len(rates)) == (word == "short")


def test_a_drafter_of_a_part_of_the_store_is_to_see_the_rest(capsys: Output) -> None:
    synthetic.store(ROOT / "features", 9)
    train(samples=5)
    evaluate({"text": GOOD, "image": GOOD})
    (line,) = symptoms(capsys)
    assert "5 of the 9 samples" in line


def test_other_prompts_than_in_training_are_named(capsys: Output) -> None:
    train()
    evaluate({"text": GOOD, "image": GOOD}, thinking="on")
    (line,) = symptoms(capsys)
    assert "evaluated with on" in line
    ROOT.rename("runs/demo-small")  # a target that is here, with a template of its own
    lines = symptoms(capsys, model="demo-small")
    assert any("another chat template" in line for line in lines)


def test_a_cycle_that_costs_more_than_it_brings_is_named(capsys: Output) -> None:
    train()
    measured = made_up.measured(speedup=0.5, count=8)
    evaluation = made_up.evaluation("mine", measured, drafter="eagle2")
    records.write(evaluation, records.new_file(ROOT / "reports", "mine"))
    assert any("--tree auto" in line for line in symptoms(capsys))


@pytest.mark.parametrize(("share", "is_named"), [(0.2, True), (0.05, False)])
def test_a_head_that_is_a_large_part_of_a_step_asks_for_a_draft_vocabulary(
    share: float, is_named: bool, capsys: Output
) -> None:
    train()
    head_bytes = 4 * synthetic.INFO.vocab_size * synthetic.INFO.hidden_size
    calibration = dataclasses.replace(CALIBRATION, step_bytes=round(head_bytes / share))
    evaluate({"text": GOOD}, dtype="float32", calibrations=(calibration,) * 2)
    lines = [line for line in symptoms(capsys) if "draft_vocab=5" in line]
    assert len(lines) == is_named
