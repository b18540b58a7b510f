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


def committed(folder: Path, *files: str) -> str:
    """The new commit of these files of a new repository."""
    git("init", "-q", folder=folder)
    git("add", *files, folder=folder)
    git("commit", "-qm", "all", folder=folder)
    return git("rev-parse", "--short=12", "HEAD", folder=folder)


def commit_of(imported: Path) -> str:
    """The commit that a process with such a folder of packages tells."""
    code = (
        "from vlmdistill.pipelines.targets import software; "
        "print(software.__file__, software.commit(), software.command_line(), sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "one", "--token", "two"],
        cwd=imported,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(imported)},
        capture_output=True,
        text=True,
        check=True,
    )
    file, commit, command = done.stdout.strip().split("|")
    assert Path(file).is_relative_to(imported)
    assert command == "-c one --token '***'"
    return commit


def test_the_commit_is_that_of_the_package_and_dirty_if_its_files_changed(
    tmp_path: Path,
) -> None:
    package = tmp_path / "outer" / "package"
    packages = package / "src"
    folder = package / "pipelines" / "targets"
    folder.mkdir(parents=True)
    (package / "docs").mkdir()
    (folder / "software.py").write_text(
        (ROOT / "pipelines" / "targets" / "software.py").read_text()
    )
    linked = packages / "vlmdistill" / "pipelines"
    linked.parent.mkdir(parents=True)
    (packages / "vlmdistill" / "__init__.py").touch()
    linked.symlink_to((ROOT / "src" / "vlmdistill" / "pipelines").readlink())

    assert commit_of(packages) == "None"
    committed(tmp_path / "outer", ".")  # it only contains the package
    assert commit_of(packages) == "None"
    head = committed(package, "pipelines/targets/software.py", "src")
    (package / "docs" / "notes").write_text("no code")
    (package / ".gitignore").write_text("__pycache__")
    assert commit_of(packages) == head
    (package / "pipelines" / "new.py").write_text("a = 1")
    assert commit_of(packages) == f"{head}-dirty"


def test_an_installed_package_has_no_commit(tmp_path: Path) -> None:
    """A wheel in an environment within another repository."""
    packages = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    folder = packages / "vlmdistill" / "pipelines" / "targets"
    folder.mkdir(parents=True)
    text = (ROOT / "pipelines" / "targets" / "software.py").read_text()
    (folder / "software.py").write_text(text)
    (packages / "vlmdistill" / "__init__.py").touch()
    committed(tmp_path, ".")
    assert commit_of(packages) == "None"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in its repository")
def test_a_checkout_tells_its_commit() -> None:
    head = git("rev-parse", "--short=12", "HEAD", folder=ROOT)
    assert software.commit() in (head, f"{head}-dirty")


def test_versions_are_those_that_run() -> None:
    found = software.of_this_process()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert all((found.vlmdistill, found.torch, found.transformers))
    assert found.command
