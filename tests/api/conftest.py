"""A folder as `make demo` leaves it, made by its command with fewer prompts and steps."""

import re
import shlex
from pathlib import Path

import pytest

from vlmdistill.cli.main import main
from vlmdistill.pipelines.demo.prompts import AMOUNTS, DemoSize

ROOT = Path(__file__).parents[2]
SHORT = ["--set", "steps=2", "--set", "batch_tokens=512"]
BUDGET = [*SHORT, "--max-new-tokens", "96", "--limit", "2", "--workers", "0"]


def command_of(target: str) -> list[str]:
    """The words after `vlmdistill` in the command of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    match = re.search(rf"^{target}:.*\n\t\$\(VLM\) (.*)$", makefile, re.MULTILINE)
    assert match
    return shlex.split(match[1])


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `runs/demo`."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        as_a_user(patch, folder)
        patch.setitem(AMOUNTS, "demo", DemoSize(6, 2, held_out=(6, 2, 0)))
        assert main([*command_of("demo"), *BUDGET]) == 0
    return folder


def as_a_user(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder without a variable of ours."""
    patch.chdir(folder)
    patch.delenv("VLMDISTILL_MODEL", raising=False)
    patch.delenv("VLMDISTILL_RUNS", raising=False)
