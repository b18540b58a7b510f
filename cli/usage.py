"""Usage errors and help in the words of the command line; the library that reads it speaks of its inputs."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from vlmdistill.stores.suggestions import did_you_mean

WORDS = (  # of pydantic, and ours
    (r"Input should be a valid integer.*", "write a whole number"),
    (r"Input should be a valid number.*", "write a number"),
    (r"Input should be greater than or equal to (.*)", r"write \1 or more"),
    (r"Input should be less than or equal to (.*)", r"write \1 or less"),
    (r"Input should be greater than (.*)", r"write more than \1"),
    (r"Input should be less than (.*)", r"write less than \1"),
    (r"Value error, (.*)", r"\1"),
)
METAVARS: Mapping[str, str] = {"int": "N", "float": "NUMBER", "Path": "FILE"}
"""How help names a value, by its type; others by their option."""


def worded(message: str, value_name: str = "value") -> str:
    """A message about a value, such as a `dtype`."""
    for pattern, words in WORDS:
        if match := re.fullmatch(pattern, message):
            message = match.expand(words)
            break
    choice = re.fullmatch(r"'([^']*)' is not one of (.*)\.", message)
    if choice is None:
        return message
    value, choices = choice[1], re.findall(r"'([^']*)'", choice[2])
    article = "an" if value_name[0] in "aeiou" else "a"
    message = (
        f"'{value}' is not {article} {value_name}: choose from {', '.join(choices)}"
    )
    return message + did_you_mean(value, choices)


def _last_word(parameter: Any) -> str:
    """The last word of an option, such as `dtype` of --target-dtype, or the name of an argument."""
    name = max(parameter.opts, key=len)
    word: str = name.lstrip("-").replace("_", "-").rpartition("-")[2]
    return word


def _choices(parameter: Any) -> str:
    return "|".join(map(str, parameter.type_descriptor.choices or ()))


def _metavar(parameter: Any) -> str:
    """How help names a value: a|b for a choice, N for a number, else by the option."""
    described = parameter.type_descriptor
    if described.is_choice and parameter.param_type_name == "option":
        return _choices(parameter)
    kind = getattr(described.annotation, "__name__", "")
    word = _last_word(parameter).upper()
    if parameter.param_type_name == "option":
        return METAVARS.get(kind, word)
    return word


def _shown_choices(parameter: Any, ctx: Any) -> str:
    return _choices(parameter)


def _name_values(command: Any) -> None:
    """Name the values of all parameters that have no name for them."""
    for parameter in command.params:
        if parameter.metavar is None and not getattr(parameter, "is_flag", False):
            parameter.metavar = _metavar(parameter)
        if parameter.param_type_name == "argument":
            # In help, an argument is followed by its choices alone, not by its type.
            parameter.display_type_rich = partial(_shown_choices, parameter)
    for inner in getattr(command, "commands", {}).values():
        _name_values(inner)


class CommandGroup(TyperGroup):
    """The commands, whose usage errors and help are worded."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _name_values(command)
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            name = _last_word(error.param) if error.param is not None else "value"
            error.message = worded(error.message, name)
            raise
