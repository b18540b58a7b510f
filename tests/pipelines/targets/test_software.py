"""What an evaluation says of the software that made it."""

import subprocess
import sys
from pathlib import Path

import pytest

from vlmdistill.pipelines.targets import software

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            ["vlmdistill", "eval", "sparrow", "--max-new-tokens", "64"],
            "vlmdistill eval sparrow --max-new-tokens 64",
        ),
        (["--where", "a > 1", "b's"], "--where 'a > 1' 'b'\"'\"'s'"),
        (
            ["--engine", "openai:https://me:pa@ss@host:80/v1"],
            "--engine 'openai:https://***@host:80/v1'",
        ),
        (["not-utf8-\udce9.jpg"], "'not-utf8-?.jpg'"),
        (["https://host/x?X-Amz-Signature=abc&b=c#top"], "'https://host/x?***#top'"),
        (
            ["--api-key", "-abc", "--token=def", "HF_TOKEN=ghi", "x"],
            "--api-key '***' '--token=***' 'HF_TOKEN=***' x",
        ),
    ],
)
def test_a_command_line_is_as_it_was_typed_but_for_secrets(
    typed: list[str], shown: str
) -> None:
    assert software.without_secrets(typed) == shown


def git(*arguments: str, folder: Path) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ("git", *names, *arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_the_commit_is_that_of_the_package_and_dirty_if_its_files_changed(
    tmp_path: Path,
) -> None:
    package = tmp_path / "outer" / "package"
    folder = package / "pipelines" / "targets"
    folder.mkdir(parents=True)
    (package / "docs").mkdir()
    (folder / "software.py").write_text(
        (ROOT / "pipelines" / "targets" / "software.py").read_text()
    )

    def commit() -> str:
        code = "import software; print(software.commit(), '|', software.command_line())"
        done = subprocess.run(
            [sys.executable, "-c", code, "one", "--token", "two"],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        found, _, command = done.stdout.strip().partition(" | ")
        assert command == "-c one --token '***'"
        return found

    assert commit() == "None"
    git(
        "init", "-q", folder=tmp_path / "outer"
    )  # a repository that only contains an installed package
    git("add", ".", folder=tmp_path / "outer")
    git("commit", "-qm", "all", folder=tmp_path / "outer")
    assert commit() == "None"
    git("init", "-q", folder=package)
    git("add", "pipelines/targets/software.py", folder=package)
    git("commit", "-qm", "all", folder=package)
    head = git("rev-parse", "--short=12", "HEAD", folder=package)
    (package / "docs" / "notes").write_text("no code")
    (package / ".gitignore").write_text("__pycache__")
    assert commit() == head
    (package / "pipelines" / "new.py").write_text("a = 1")
    assert commit() == f"{head}-dirty"


def test_versions_are_those_that_run() -> None:
    found = software.of_this_process()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert all((found.vlmdistill, found.torch, found.transformers))
    assert found.command
