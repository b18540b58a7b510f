"""`vlmdistill export`: the command that it prints serves what was written."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.drafters import synthetic
from tests.pipelines.targets.test_thinking import with_switch
from vlmdistill.cli.main import main
from vlmdistill.pipelines.cluster.engine_environment import VARIABLE
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.workspace import Workspace


@pytest.fixture(autouse=True)
def trained(workplace: Path) -> None:
    synthetic.save("sparrow", Path("runs/demo-small/drafters/sparrow"))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says it has vLLM 0.32."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))


@pytest.mark.usefixtures("engine")
def test_the_command_names_what_was_written(
    capsys: pytest.CaptureFixture[str], failing: Callable[..., str]
) -> None:
    line = ["export", "sparrow", "--out", "served", "--dtype", "float32", "--json"]
    assert main(line) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["draft_vocabulary"] == facts["target_vocabulary"]
    (command,) = [text for text in shown.err.splitlines() if text.startswith("vLLM: ")]
    words = [
        word for word in shlex.split(command.removeprefix("vLLM: ")) if "=" not in word
    ]
    assert words[:3] == [
        str(Path("vllm").absolute()),
        "serve",
        str(EMBEDDED["demo-small"]),
    ]
    assert "--no-enable-prefix-caching" in words
    # The checkpoint's own sampling is not that of training and evaluation.
    assert words[words.index("--generation-config") + 1] == "vllm"
    drafting = json.loads(words[words.index("--speculative-config") + 1])
    assert drafting["model"] == str(Path("served").absolute())
    assert sorted(file.name for file in Path("served").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert main(line) == 0  # again, into the same folder
    assert "served" in failing(*line[:4], "--dtype", "float16")


def test_another_target_than_the_drafters_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree("runs/demo-small/drafters/sparrow", "copy")
    assert main(["export", "./copy", "--out", "served", "--model", "demo-video"]) == 2
    assert "was trained for synthetic" in " ".join(capsys.readouterr().err.split())
    assert not Path("served").exists()


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        ("sparrow", str(EMBEDDED["demo-small"])),
        ("runs/demo-small/drafters/sparrow", str(EMBEDDED["demo-small"])),
        ("copy", "synthetic"),
    ],
)
def test_the_command_serves_the_target_of_the_drafter(
    drafter: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/demo-small/drafters/sparrow", "copy")
    assert main(["export", drafter, "--out", "served"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("in the environment of `make engine`" in line for line in lines)
    (command,) = [line for line in lines if line.startswith("vLLM: ")]
    words = shlex.split(command)
    assert words[words.index("serve") + 1] == target


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(("mode", "value"), [("off", False), ("on", True)])
def test_the_command_sets_the_mode_of_the_training(
    switch: str,
    mode: Thinking,
    value: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = tiny.checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    folder = with_switch(plain, tmp_path / "target")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("enable_thinking", switch))
    workspace = Workspace.of(str(folder), Path("runs"))
    target = load(str(folder), thinking=mode)
    synthetic.save("wren", workspace.drafter("wren"), target=target)
    assert main(["export", "wren", "--out", "out", "--model", str(folder)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("warning") for line in lines)
    (command,) = [line for line in lines if line.startswith("vLLM: ")]
    (published,) = [
        line
        for line in Path("out/README.md").read_text().splitlines()
        if "vllm serve" in line
    ]
    assert str(tmp_path) not in published
    for text in (command, published):
        words = shlex.split(text)
        variables = words[words.index("--default-chat-template-kwargs") + 1]
        assert json.loads(variables)[switch] == value


def test_a_line_says_what_the_command_for_sglang_cannot_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny.checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    folder = with_switch(plain, tmp_path / "target")
    workspace = Workspace.of(str(folder), Path("runs"))
    target = load(str(folder), thinking="off")
    synthetic.save("eagle3", workspace.drafter("eagle3"), target=target)
    assert main(["export", "eagle3", "--out", "out", "--model", str(folder)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("warning") for line in lines)
    assert any(
        "SGLang: the drafter was trained with thinking off" in line for line in lines
    )
