"""A new option is a decision: `options.txt` has those of every command."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from vlmdistill.cli.main import app

LISTED = Path(__file__).with_name("options.txt")


def options(command: Any, context: typer.Context) -> Iterator[str]:
    """A line for each command: its path, arguments and options."""
    for name in sorted(command.list_commands(context)):
        child = command.get_command(context, name)
        inner = typer.Context(child, info_name=name, parent=context)
        if hasattr(child, "list_commands"):
            yield from options(child, inner)
        else:
            taken = sorted(
                spelling for given in child.params for spelling in given.opts
            )
            yield " ".join([inner.command_path, *taken])


def test_every_command_takes_the_options_that_are_listed() -> None:
    """After a decision, write the lines of `options` to the file."""
    command = typer.main.get_command(app)
    taken = list(options(command, typer.Context(command, info_name="vlmdistill")))
    assert taken == LISTED.read_text().splitlines()
