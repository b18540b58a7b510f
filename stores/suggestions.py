"""Suggestions for unknown names, as a part of the error about them."""

import difflib
from collections.abc import Iterable

NEAREST = 3  # suggestions at most
OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "markdown": "md",
    "tex": "latex",
}
"""By names that are used elsewhere, ours, which are not spelled like them."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'sparrow'?)` with the known names that are spelled like it, or mean it; else empty."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, NEAREST)
    meant = OTHER_NAMES.get(name.lower())
    if meant in by_lower_case:
        near = [meant]
    if not near:
        return ""
    names = " or ".join(repr(by_lower_case[lower]) for lower in near)
    return f" (did you mean {names}?)"
