"""Commands that errors and summaries suggest repeat the options of the workspace that the user gave."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

SUGGESTED = re.compile(r"(`?)\bvlmdistill ([a-z]+)([^`\n]*)")
NAMES = {"--model": "--model", "-m": "--model", "--runs": "--runs"}
"""By the spelling of an option, the name that is suggested."""

repeated: ContextVar[Mapping[str, Mapping[str, str]]] = ContextVar("repeated")
"""By command, the options that it takes of those that were given, and their values."""


def given(words: Sequence[str]) -> dict[str, str]:
    """The options of the workspace in a command line, and their values."""
    options = dict[str, str]()
    following = [*words[1:], None]
    for word, next_word in zip(words, following, strict=False):
        spelling, equals, value = word.partition("=")
        name = NAMES.get(spelling)
        if name is None:
            continue
        if equals:
            options[name] = value
        elif next_word is not None:
            options[name] = next_word
    return options


def completed(command: str) -> str:
    """A suggested command, `vlmdistill VERB ...`, with the options that were given and are not in it."""
    match = SUGGESTED.match(command)
    if match is None:
        return command
    verb, arguments = match[2], match[3].split()
    if "--help" in arguments:
        return command
    written = {NAMES[word] for word in arguments if word in NAMES}
    for name, value in repeated.get({}).get(verb, {}).items():
        if name not in written:
            command += f" {name} {shlex.quote(value)}"
    return command


def in_text(text: str) -> str:
    """A text, in which each command within backquotes is completed."""
    if "`vlmdistill " not in text:
        return text
    return re.sub(
        r"`(vlmdistill [^`\n]*)`", lambda match: f"`{completed(match[1])}`", text
    )
