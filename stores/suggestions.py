"""Suggestions for names that are not known, as a part of the error that says so."""

import difflib
from collections.abc import Iterable

NEAREST = 3  # suggestions at most


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'sparrow'?)` with the known names that are spelled like it; empty when none is."""
    by_small_letters = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_small_letters, NEAREST)
    return (
        f" (did you mean {' or '.join(repr(by_small_letters[one]) for one in near)}?)"
        if near
        else ""
    )
