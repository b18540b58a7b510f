"""The paths of a GPU, on a pretend one: see `tests.pretend.device`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "checks", ["decoding", "serving", pytest.param("training", marks=pytest.mark.slow)]
)
def test_on_the_pretend_gpu(checks: str) -> None:
    file = f"tests/pretend/{checks}.py"
    options = ("-p", "tests.pretend.process", "-q", "--no-header")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
