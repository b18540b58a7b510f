import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may spoil."""
    return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / family))
