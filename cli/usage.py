"""Usage errors in the words of the command line: the library that checks values speaks of its inputs."""

import re
from typing import Any

import typer
from typer.core import TyperGroup

from vlmdistill.stores.suggestions import did_you_mean

WORDS = (  # of pydantic, and ours
    (r"Input should be a valid (integer|number).*", r"write a \1"),
    (r"Input should be greater than or equal to (.*)", r"write \1 or more"),
    (r"Input should be less than or equal to (.*)", r"write \1 or less"),
    (r"Input should be greater than (.*)", r"write more than \1"),
    (r"Input should be less than (.*)", r"write less than \1"),
    (r"Value error, (.*)", r"\1"),
)


def worded(message: str, several: bool = False) -> str:
    """A message about a value; `several` says that its option may be repeated."""
    for pattern, words in WORDS:
        if match := re.fullmatch(pattern, message):
            message = match.expand(words)
            break
    if several and message.startswith("write"):
        message += "; repeat the option for several"
    if choice := re.match(r"'([^']*)' is not one of (.*)\.", message):
        message += did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2]))
    return message


class CommandGroup(TyperGroup):
    """The commands, whose usage errors are worded."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = worded(
                error.message, getattr(error.param, "multiple", False)
            )
            raise
