"""Suggestions for unknown names, and early errors for what would fail later."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core import catalogue
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.suggestions import did_you_mean

pytestmark = pytest.mark.usefixtures("workplace")


def dialogues(count: int) -> str:
    """A file of so many questions."""
    rows = [{"conversations": [{"from": "human", "value": f"Question {i}"}]} for i in range(count)]
    Path("talks.json").write_text(json.dumps(rows))
    return "talks.json"


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("sparow", ["eagle2", "sparrow"], " (did you mean 'sparrow'?)"),
        ("eagle", ["eagle2", "eagle3", "msd"], " (did you mean 'eagle3' or 'eagle2'?)"),
        ("nonsense", ["eagle2", "sparrow"], ""),
        ("", ["eagle2"], ""),
    ],
)
def test_names_are_suggested_by_their_spelling(name: str, known: Sequence[str], near: str) -> None:
    assert did_you_mean(name, known) == near


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "sparow"], "sparrow"),
        (["train", "sparrow", "--set", "batch_token=8192"], "batch_tokens"),
        (["train", "sparrow", "--set", "stages.multimodl.hops=3"], "multimodal"),
        (["run", "--drafters", "eagel2"], "eagle2"),
        (["features", "--encoding", "hiden.text=int8"], "hidden.text"),
        (["prompts", "talks.json", "--model", "demo-vide"], "demo-video"),
        (["target", "show", "llava1.5-7b"], "llava-1.5-7b"),
        (["export", "sparow", "--out", "served"], "sparrow"),
        (["report", "--model", "dmo"], "demo"),
    ],
)
def test_a_mistyped_name_is_refused_with_a_suggestion(
    arguments: list[str], meant: str, failing: Callable[..., str]
) -> None:
    assert f"'{meant}'" in failing(*arguments)
    assert not Path("runs").exists()


def test_a_trained_drafter_is_suggested_before_one_to_train(failing: Callable[..., str]) -> None:
    origin = checkpoint.Origin(synthetic.provenance(), catalogue.config("eagle3").training, {})
    for name in ("eagle3", "my-eagle"):
        checkpoint.save(synthetic.build("eagle3"), "eagle3", Path("runs/demo/drafters") / name, origin)
    assert failing("export", "my-eagel", "--out", "served").count("'my-eagle'") == 1
    line = failing("export", "hivis", "--out", "served")
    assert "vlmdistill train hivis" in line


@pytest.mark.parametrize("name", ["demo", "qwen2-vl-7b", "someone/model", "ckpt/mine", "ckpt"])
def test_a_target_is_a_known_name_a_hub_id_or_a_folder(name: str) -> None:
    Path("ckpt/mine").mkdir(parents=True)
    Path("ckpt/config.json").touch()
    assert main(["prompts", dialogues(1), "--model", name]) == 0


def test_an_existing_workspace_needs_no_target() -> None:
    Path("runs/pulled").mkdir(parents=True)  # a store that someone sent, to train from
    assert Workspace.of("pulled").root == Path("runs/pulled")
    with pytest.raises(TargetError, match="'pulled'"):
        Workspace.of("puled")


def test_a_workspace_is_any_folder_whose_name_is_text(
    failing: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["prompts", dialogues(1), "--runs", "."]) == 0
    assert Path("demo/prompts.parquet").exists()
    odd = os.fsdecode(b"caf\xe9")
    assert r"caf\udce9" in failing("report", "--runs", odd)
    Path(odd).mkdir()
    assert "UTF-8" in failing("report", "--model", f"./{odd}")
    monkeypatch.setenv("VLMDISTILL_RUNS", odd)
    assert "UTF-8" in failing("report")


def test_a_drafters_name_is_not_a_folder_here(failing: Callable[..., str]) -> None:
    workspace = Workspace.of("demo")
    for folder in ("runs/demo/drafters/sparrow", "sparrow", "exported"):
        Path(folder).mkdir(parents=True)
    assert workspace.trained("sparrow") == workspace.drafter("sparrow")
    assert workspace.trained("./sparrow") == Path("sparrow")
    assert workspace.trained("exported") == Path("exported")
    assert "no folder served/sparow" in failing("generate", "--drafter", "served/sparow", "What?")


def test_a_small_eval_split_is_warned_about_at_import(capsys: pytest.CaptureFixture[str]) -> None:
    def warned(*options: str) -> bool:
        shutil.rmtree("runs", ignore_errors=True)
        capsys.readouterr()
        assert main(["prompts", dialogues(60), *options, "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["total"] == 60
        return "warning: " in shown.err and "--split eval" in shown.err

    assert warned()
    assert not warned("--eval-share", "0.9")
    assert not warned("--eval-share", "0")  # as it was asked for
    assert not warned("--split", "train")


def test_eval_and_run_refuse_an_empty_split_before_anything_loads(failing: Callable[..., str]) -> None:
    assert main(["prompts", dialogues(3), "--eval-share", "0"]) == 0
    assert "--split eval" in failing("run", "--drafters", "lookahead")
    code = """if True:
        import sys
        from vlmdistill.cli.main import main
        assert main(["eval", "lookahead"]) == 1
        assert not {"torch", "transformers"} & sys.modules.keys()
    """
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--split eval" in run.stderr
    assert "-m demo-video" in failing("eval", "lookahead", "-m", "demo-video")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_question_is_refused(text: str, failing: Callable[..., str]) -> None:
    assert "TEXT" in failing("generate", text)


def test_the_shell_completes_commands_and_python_runs_the_package() -> None:
    asked = {"_VLMDISTILL_COMPLETE": "complete_bash", "COMP_WORDS": "vlmdistill exp", "COMP_CWORD": "1"}
    completed = subprocess.check_output(
        [sys.executable, "-m", "vlmdistill"], env={**os.environ, **asked}, text=True
    )
    assert completed.split() == ["export"]


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["train", "sparrow", "--set", "lr=1e-4"], "stages.*.learning_rate="),
        (["train", "sparrow", "--set", "stages.text.lr=1e-4"], "'learning_rate'"),
        (["export", "hivis", "--out", "served"], "`vlmdistill train hivis`"),
        (["prompts", "llava.json"], "--images"),
        (["prompts", "photos.json"], "--ask"),
    ],
)
def test_an_error_names_what_helps(arguments: list[str], cure: str, failing: Callable[..., str]) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    Path("llava.json").write_text(json.dumps([{"image": "1.jpg", "conversations": turns}]))
    Path("photos.json").write_text(json.dumps([{"image": "1.jpg"}]))
    assert cure in failing(*arguments)
