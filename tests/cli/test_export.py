"""`vlmdistill export --check`: nothing is written when it cannot run, and a difference is not exit 0."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core import catalogue
from vlmdistill.pipelines.bench import parity
from vlmdistill.pipelines.bench.parity import DraftCounts, Parity
from vlmdistill.pipelines.cluster.environment import VARIABLE
from vlmdistill.pipelines.targets.embedded import EMBEDDED


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    origin = checkpoint.Origin(synthetic.provenance(), catalogue.config("sparrow").training, {})
    checkpoint.save(synthetic.build("sparrow"), "sparrow", Path("runs/demo/drafters/sparrow"), origin)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says it has vLLM 0.32."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))


def test_nothing_is_written_without_an_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nowhere/python")
    assert main(["export", "sparrow", "--out", "served", "--check"]) == 1
    assert "nowhere/python" in capsys.readouterr().err
    assert not Path("served").exists()


@pytest.mark.usefixtures("engine")
def test_nothing_is_written_without_prompts_to_check_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "sparrow", "--out", "served", "--check"]) == 1
    assert "prompts" in capsys.readouterr().err
    assert not Path("served").exists()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("identical", "status"), [(2, 0), (1, 1)])
def test_the_exit_status_says_whether_parity_holds(
    identical: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("talks.json").write_text(json.dumps([{"question": "Why?"}, {"question": "How?"}]))
    assert main(["prompts", "talks.json", "--split", "eval"]) == 0
    capsys.readouterr()
    seen: list[Any] = []

    def check(target: Any, folder: Path, written: Any, prompts: list[Any], job: Any, **rest: Any) -> Parity:
        seen.append((folder, written.out, len(prompts), job.dtype))
        counts = DraftCounts(4, 8)
        found = Parity(len(prompts), identical, counts, counts, {"vllm": "0.32.0"})
        return replace(found, tree="30-3-8", own=DraftCounts(4, 10))

    monkeypatch.setattr(parity, "check", check)
    line = [
        "export",
        "sparrow",
        "--out",
        "served",
        "--dtype",
        "float32",
        "--check",
    ]
    assert main([*line, "--json"]) == status
    assert seen == [(Path("runs/demo/drafters/sparrow"), "served", 2, "float32")]
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert (facts["identical"], facts["accepted_per_draft"], facts["versions"]["vllm"]) == (
        identical,
        2,
        "0.32.0",
    )
    assert (facts["tree"], facts["accepted_per_draft_by_tree"]) == ("30-3-8", 2.5)
    assert facts["draft_vocabulary"] == facts["target_vocabulary"]
    (command,) = [text for text in shown.err.splitlines() if text.startswith("vLLM: ")]
    words = [word for word in shlex.split(command.removeprefix("vLLM: ")) if "=" not in word]
    assert words[:3] == [str(Path("vllm").absolute()), "serve", str(EMBEDDED["demo"])]
    assert "--no-enable-prefix-caching" in words
    drafting = json.loads(words[words.index("--speculative-config") + 1])
    assert drafting["model"] == str(Path("served").absolute())
    assert main(line) == status  # again, into the same folder


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        ("sparrow", str(EMBEDDED["demo"])),
        ("runs/demo/drafters/sparrow", str(EMBEDDED["demo"])),
        ("copy", "synthetic"),
    ],
)
def test_the_command_serves_the_target_of_the_drafter(
    drafter: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/demo/drafters/sparrow", "copy")
    assert main(["export", drafter, "--out", "served"]) == 0
    (command,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("vLLM: ")]
    words = shlex.split(command)
    assert words[words.index("serve") + 1] == target
