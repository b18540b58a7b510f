"""Commands that errors and summaries suggest repeat the options of the workspace that the user gave."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

SUGGESTED = re.compile(r"(`?)\bvlmdistill ([a-z]+)([^`\n]*)")
OPTIONS = {
    "--model": ("--model", "-m"),
    "--runs": ("--runs",),
}  # by the name that is written

repeated: ContextVar[Mapping[str, Mapping[str, str]]] = ContextVar("repeated")
"""By command, the options that it takes of those that were given, and their values."""


def given(words: Sequence[str]) -> dict[str, str]:
    """The options of the workspace in a command line, and their values."""
    found = {}
    for name, spellings in OPTIONS.items():
        for number, word in enumerate(words):
            option, equals, value = word.partition("=")
            if option in spellings and equals:
                found[name] = value
            elif word in spellings and number + 1 < len(words):
                found[name] = words[number + 1]
    return found


def completed(command: str) -> str:
    """A suggested command, `vlmdistill VERB ...`, with the options that were given and are not in it."""
    match = SUGGESTED.match(command)
    if match is None:
        return command
    written = {
        name
        for name, spellings in OPTIONS.items()
        if {*spellings} & {*match[3].split()}
    }
    options = repeated.get({}).get(match[2], {})
    more = [
        f" {name} {shlex.quote(value)}"
        for name, value in options.items()
        if name not in written
    ]
    return command + "".join(more)


def in_text(text: str) -> str:
    """A text, in which each command within backquotes is completed."""
    if "`vlmdistill " not in text:
        return text
    return re.sub(
        r"`(vlmdistill [^`\n]*)`", lambda match: f"`{completed(match[1])}`", text
    )
