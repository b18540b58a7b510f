"""The wheel carries all that its commands need: built, installed elsewhere and run without the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "cli", "pipelines", "drafters", "stores")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel is installed; built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / "source" / name, ignore=unwanted, symlinks=True
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    common = ["--no-deps", "--no-index"]
    subprocess.run(
        [
            *PIP,
            "wheel",
            *common,
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            folder / "source",
        ],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*PIP, "install", *common, "--target", folder / "site", wheel], check=True
    )
    shutil.rmtree(folder / "source")
    return folder / "site"


def run(installed: Path, folder: Path, *words: str) -> str:
    """What Python prints in an empty folder, with the wheel before everything else."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_every_part_of_the_package_comes_from_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, vlmdistill.cli.main;"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'vlmdistill'))"
    )
    files = run(installed, tmp_path, "-c", code).split()
    assert len(files) > 10
    assert [
        file
        for file in files
        if not Path(file).is_relative_to(installed / "vlmdistill")
    ] == []


def test_it_makes_prompts_and_shows_the_embedded_target(
    installed: Path, tmp_path: Path
) -> None:
    run(installed, tmp_path, "-m", "vlmdistill", "prompts", "demo", "--limit", "2")
    assert (tmp_path / "runs" / "demo-small" / "prompts.parquet").is_file()
    shown = json.loads(
        run(installed, tmp_path, "-m", "vlmdistill", "target", "show", "demo", "--json")
    )
    assert shown["found"]
    assert Path(shown["folder"]).is_relative_to(installed)
