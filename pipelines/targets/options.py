"""How a target is loaded, as a run hands it to its workers; read without torch."""

from typing import TypedDict


class Options(TypedDict, total=False):
    """Keywords of `loading.load` that the command line knows."""

    dtype: str
    attention: str
    compiled: bool
