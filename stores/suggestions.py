"""Suggestions for unknown names, as a part of the error about them."""

import difflib
from collections.abc import Iterable

NEAREST = 3  # suggestions at most


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'sparrow'?)` with the known names that are spelled like it; empty when none is."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, NEAREST)
    if not near:
        return ""
    names = " or ".join(repr(by_lower_case[lower]) for lower in near)
    return f" (did you mean {names}?)"
