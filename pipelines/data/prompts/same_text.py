"""When two questions are the same: the text without case, blanks, punctuation and composition of letters."""

import re
import unicodedata
from typing import Final

MEANT: Final = frozenset("#%&*/@\\")
"""Signs that Unicode counts as punctuation, and that are not."""
BEFORE_NUMBER: Final = re.compile(r"[-\N{EN DASH}](?=\s*\d)")
BETWEEN_WORDS: Final = re.compile(r"(?<!\d) | (?!\d)")
"""A blank that does not divide two numbers."""


def folded(text: str) -> str:
    """The text without case, blanks, punctuation and the way its letters are composed.

    A sign that calculates or names something is no punctuation: `3 + 4` is not `3 - 4`, and C++ is not C#.
    """
    normal = unicodedata.normalize("NFKC", text).casefold()
    with_minus = BEFORE_NUMBER.sub("\N{MINUS SIGN}", normal)
    kept = "".join(map(_without_punctuation, with_minus))
    return BETWEEN_WORDS.sub("", " ".join(kept.split()))


def _without_punctuation(sign: str) -> str:
    """The sign itself, a blank for punctuation, nothing for what is invisible."""
    category = unicodedata.category(sign)
    if category == "Cf":
        return ""
    return " " if category.startswith("P") and sign not in MEANT else sign
