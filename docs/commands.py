"""Write docs/commands.md from the commands themselves; `make docs` runs it."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from vlmdistill.cli.main import app

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """\
# Commands

Results go to stdout, progress and logs to
stderr. Exit status 0 says that all work is done, 1 that something failed, 2 that the command line is wrong.
`--help` after any command shows what is below. `--debug` adds the traceback to an error. Run
`vlmdistill --install-completion` once, and the shell completes commands and options.
"""
OPTION = re.compile(r"(?<![\w`-])--[a-z][a-z-]*")


def page() -> str:
    """The whole page."""
    command = typer.main.get_command(app)
    return "\n".join(
        [
            INTRODUCTION,
            *_sections(command, typer.Context(command, info_name="vlmdistill")),
        ]
    )


def _sections(command: Any, context: typer.Context) -> Iterator[str]:
    """One section for each command of a group, and for each of a group in it."""
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        inner = typer.Context(child, info_name=name, parent=context)
        yield f"{'##' if context.parent is None else '###'} {inner.command_path}\n"
        if hasattr(child, "list_commands"):
            yield _prose(child.help)
            yield from _sections(child, inner)
        else:
            usage = " ".join([inner.command_path, *child.collect_usage_pieces(inner)])
            yield f"```text\n{usage}\n```\n"
            yield _prose(child.help)
            yield _table(child, inner)


def _prose(text: str) -> str:
    """Help as Markdown: what follows the mark of a verbatim paragraph is a block of code."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    verbatim = "```text\n{}\n```"
    shown = [
        verbatim.format(part[1:].strip()) if part[0] == "\b" else _code(part)
        for part in paragraphs
    ]
    return "\n\n".join(shown) + "\n"


def _code(text: str) -> str:
    """Options in running text as code, but for those that are in code already."""
    return re.sub(
        rf"`[^`]*`|{OPTION.pattern}", lambda found: f"`{found[0].strip('`')}`", text
    )


def _table(command: Any, context: typer.Context) -> str:
    """Arguments and options with their help."""
    rows = ["| argument or option | meaning |", "|---|---|"]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or parameter.name == "help":
            continue
        name, text = (part.replace("|", "\\|") for part in record)
        rows.append(f"| `{name}` | {_code(text)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
