"""How work of many parts reports how far it has come."""

from typing import Protocol


class Progress(Protocol):
    """Is called whenever more is done."""

    def __call__(self, done: int, total: int, remark: str = "", /) -> None:
        """`done` of `total` parts, where 0 means that the total is unknown, and a remark to show beside."""


def silent(done: int, total: int, remark: str = "", /) -> None:
    """Show no progress."""
