"""The `vlmdistill` command: one table of verbs, and how errors reach the user.

A verb's file holds only a typer function or group; whatever is heavy it imports inside, so that
`vlmdistill --help` stays quick.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from vlmdistill.cli import (
    console,
    evaluate,
    export,
    features,
    generate,
    prompts,
    report,
    responses,
    run,
    store,
    target,
    train,
)
from vlmdistill.cli.entry import INTERRUPTED
from vlmdistill.stores.errors import VlmdistillError, one_line

GROUPS = {
    "target": target.app,
    "store": store.app,
}
VERBS: dict[str, Callable[..., Any]] = {
    "prompts": prompts.prompts,
    "responses": responses.responses,
    "features": features.features,
    "train": train.train,
    "eval": evaluate.evaluate,
    "report": report.report,
    "generate": generate.generate,
    "export": export.export,
    "run": run.run,
}

app = typer.Typer(
    name="vlmdistill",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # square brackets and long choices stay as written
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"vlmdistill {metadata.version('vlmdistill')}")
        raise typer.Exit


@app.callback()
def vlmdistill(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere on the line).")
    ] = False,
) -> None:
    """Train, prove lossless and compare drafters for vision-language models.

    The flow: prompts -> responses -> features -> train -> eval -> report. Each step finds what it
    needs in runs/<model>/ and does only what is missing.
    """
    console.log_to_stderr(debug)


for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in given
    given = (["--debug"] if debug else []) + [argument for argument in given if argument != "--debug"]
    try:
        app(given, prog_name="vlmdistill")
    except SystemExit as stop:
        if stop.code == 130:
            console.note(INTERRUPTED)
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has left
        return 1
    except (VlmdistillError, OSError) as error:
        if debug:
            traceback.print_exc()
        console.note(f"error: {_line(error)}")
        return 1
    return 0


def _line(error: VlmdistillError | OSError) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return one_line(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
