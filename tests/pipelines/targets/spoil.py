"""Checkpoints that are spoilt, and what is said of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError


def edit(path: Path, **values: Any) -> None:
    """Change what a JSON file says at the top."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(folder: Path | str, **settings: Any) -> str:
    """The one line in which loading is refused."""
    with pytest.raises(TargetError) as caught:
        load(str(folder), **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message
