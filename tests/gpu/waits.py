"""What waits for a real GPU, as torch tells it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PROJECT = Path(__file__).parents[2]
TOLD = "synchronizing CUDA operation"


@contextmanager
def waits() -> Iterator[list[warnings.WarningMessage]]:
    """While it is open, a warning for each operation that waits; see `lines`."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def lines(caught: list[warnings.WarningMessage]) -> list[str]:
    """The lines that waited, as `file:line`."""
    return [
        f"{one.filename}:{one.lineno}" for one in caught if TOLD in str(one.message)
    ]


def of_project(waited: list[str]) -> list[str]:
    """Those of them that are lines of the project."""
    return [
        line
        for line in waited
        if line.startswith(str(PROJECT / "src")) or "/vlmdistill/" in line
    ]
