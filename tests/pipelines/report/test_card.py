"""The card of an export: what a hub reads, how vLLM is started, and only numbers that a report would rank."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.drafters import synthetic
from tests.drafters.checkpoints.test_export_blocks import WHOLE
from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import in_turn, measured, with_cpu_share
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.description import weights_hash
from vlmdistill.pipelines.bench.records import Leak, PromptResult
from vlmdistill.pipelines.cluster import engine_environment
from vlmdistill.pipelines.report.card import CARD
from vlmdistill.pipelines.workspace.workspace import Workspace


@pytest.fixture
def weights(workspace: Workspace) -> str | None:
    """The hash of the weights of a trained drafter."""
    training: Any = {"steps": 300, "samples": 4200, "seed": 0, "history": []}
    folder = synthetic.save("sparrow", workspace.drafter("sparrow"), **training)
    return weights_hash(folder)


def exported(
    workspace: Workspace, out: Path, *options: str, drafter: str = "sparrow"
) -> str:
    runs = str(workspace.root.parent)
    command = ["export", drafter, "--out", str(out), "--runs", runs]
    assert main([*command, *options]) == 0
    return (out / CARD).read_text()


def test_the_front_matter_is_what_a_hub_reads(
    workspace: Workspace, weights: str, tmp_path: Path
) -> None:
    text = exported(workspace, tmp_path / "served")
    facts: Any = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    assert facts["library_name"] == "vlmdistill"
    assert facts["tags"] == ["speculative-decoding", "draft-model", "vllm", "sparrow"]
    assert "base_model" not in facts  # the target is in no hub


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("eagle3", {}, "reads no image embeddings"),
        ("dflash", {**WHOLE, "mask": 5}, "V2 model runner"),
    ],
)
def test_a_card_says_what_its_reader_has_to_install(
    method: str,
    settings: dict[str, Any],
    words: str,
    workspace: Workspace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With an environment of vLLM, its own command is shown.
    monkeypatch.setenv(engine_environment.VARIABLE, str(tmp_path / "none"))
    drafter = synthetic.build(method, **settings)
    synthetic.save(method, workspace.drafter(method), drafter)
    with_plugin = exported(workspace, tmp_path / "own", drafter=method)
    assert "Install vlmdistill" in with_plugin
    assert "this package" in capsys.readouterr().err
    options = ("--format", "speculators")
    without = exported(workspace, tmp_path / "other", *options, drafter=method)
    _, _, shown = without.partition("## Serve it with vLLM")
    serving, _, _ = shown.partition("## Measured")
    assert "library speculators" in serving
    assert words in serving
    assert "vlmdistill" not in serving
    assert f'"method": "{method}"' in serving
    assert "this package" not in capsys.readouterr().err
    facts: Any = ModelCard(without).data.to_dict()  # type: ignore[no-untyped-call]
    assert facts["library_name"] == "speculators"


def test_a_card_has_the_command_the_data_and_no_path_of_this_machine(
    workspace: Workspace, weights: str, tmp_path: Path
) -> None:
    text = exported(workspace, tmp_path / "served")
    assert "vllm serve synthetic" in text
    assert '"model": "FOLDER"' in text
    assert str(tmp_path) not in text
    assert weights in text
    assert "config c, weights w" in text
    assert "300 steps on 4,200 samples, seed 0" in text
    assert "These weights were not evaluated." in text


def test_a_card_has_the_numbers_of_its_weights_and_of_no_others(
    workspace: Workspace, weights: str, save: Save, tmp_path: Path
) -> None:
    save("sparrow", measured(noise=0.1), weights=weights, title="own")
    save("sparrow", measured(), weights="0" * 64, tree="chain-7", stem="other")
    text = exported(workspace, tmp_path / "served")
    (row,) = re.findall(r"^\| all \|.*$", text, re.MULTILINE)
    assert re.match(r"\| all \| 24 \| 0 \| 3\.25 .*\| 1\.\d\d \(1\.\d\d-", row)
    assert "CPU Some Processor, float32, threads: 1" in text
    assert "chain-7" not in text


def test_a_speedup_in_doubt_on_one_kind_of_prompts_is_not_in_the_card(
    workspace: Workspace, weights: str, save: Save, tmp_path: Path
) -> None:
    """The drafter has the prefill of texts from a cache: few of all prompts, and all of that kind."""

    def planted(one: PromptResult) -> PromptResult:
        if int(one.key[1:]) % 3:
            return one
        cached = replace(one.drafted.phases, prefill=0.0)
        return replace(one, kind="text", drafted=replace(one.drafted, phases=cached))

    at = measured(noise=0.1)
    made = replace(at, prompts=tuple(map(planted, at.prompts)))
    save("sparrow", made, weights=weights)
    text = exported(workspace, tmp_path / "served")
    rows = dict(re.findall(r"^\| (\w+) \|.* ([^|]+) \|$", text, re.MULTILINE))
    assert rows["image"].startswith("(1.")
    assert rows["text"] == "-"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"missed": 1}, "acceptance is broken"), ({"check": "different"}, "not lossless")],
)
def test_numbers_in_doubt_are_left_out_and_why_is_said(
    changes: dict[str, Any],
    reason: str,
    workspace: Workspace,
    weights: str,
    save: Save,
    tmp_path: Path,
) -> None:
    save("sparrow", measured(**changes), weights=weights)
    text = exported(workspace, tmp_path / "served")
    assert "3.25" not in text
    assert re.search(f"is left out.*{reason}", text)


def test_a_speedup_beside_other_programs_is_not_in_the_card(
    workspace: Workspace, weights: str, tmp_path: Path, save: Save
) -> None:
    save("sparrow", with_cpu_share(measured(), 0.3), weights=weights)
    text = exported(workspace, tmp_path / "out")
    assert "1.50" not in text
    assert "no speedup at temperature 0: other programs had most" in text


@pytest.mark.parametrize(
    ("leak", "text"),
    [
        (None, "not known what it was trained on"),
        (Leak(samples=4200, prompts=("k0",)), "has seen in training: k0"),
    ],
)
def test_prompts_that_may_have_been_seen_are_said(
    leak: Leak | None,
    text: str,
    workspace: Workspace,
    weights: str,
    save: Save,
    tmp_path: Path,
) -> None:
    save("sparrow", measured(), weights=weights, leak=leak)
    assert text in exported(workspace, tmp_path / "served")


def test_the_best_of_several_evaluations_is_called_one_of_them(
    workspace: Workspace, weights: str, save: Save, tmp_path: Path
) -> None:
    for second in range(3):
        when = f"2026-01-02 03:04:0{second}"
        save("sparrow", measured(), weights=weights, stem=when, measured=when)
    text = exported(workspace, tmp_path / "served")
    assert "sparrow at temperature 0 is one of 3" in text


def test_a_record_that_contradicts_another_of_its_run_is_left_out(
    workspace: Workspace, weights: str, save: Save, tmp_path: Path
) -> None:
    """Its plain decoding was slowed; the other drafter's record has what it took."""
    at = measured(noise=0.05)
    slow = replace(
        at, prompts=tuple(map(slower_plain, at.prompts, range(len(at.prompts))))
    )
    save("sparrow", slow, weights=weights)
    text = exported(workspace, tmp_path / "alone")
    assert "is left out" not in text
    save("wren", at)
    assert "is left out" in exported(workspace, tmp_path / "beside")


def slower_plain(prompt: PromptResult, number: int) -> PromptResult:
    """Its decoding, and its place among the times of all decodings."""
    step = 1.2 * prompt.plain.decode_seconds
    seconds = prompt.plain.prefill_seconds + step
    plain = replace(prompt.plain, seconds=seconds, decode_seconds=step)
    return in_turn(replace(prompt, plain=plain), number)


def test_a_card_that_is_there_is_kept_and_said_to_be_of_other_weights(
    workspace: Workspace,
    weights: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its numbers are not those of a drafter that was trained again."""
    exported(workspace, tmp_path / "served")
    card = tmp_path / "served" / CARD
    for text, is_of_these in ((card.read_text() + "mine", True), ("mine", False)):
        card.write_text(text)
        capsys.readouterr()
        assert exported(workspace, tmp_path / "served") == text
        noted = capsys.readouterr().err
        assert "is kept" in noted
        assert ("does not name these weights" in noted) == (not is_of_these)
