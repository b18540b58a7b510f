"""`vlmdistill target`: the models that drafters are trained for."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Targets: list them, look at one, build the demo again."
)


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that are known by name."""


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A name, a hub id or a checkpoint folder.")],
    as_json: console.Json = False,
) -> None:
    """Show the facts of one target that drafters are built from."""


@app.command("build-demo")
def build_demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint; default: the package's own.")
    ] = None,
) -> None:
    """Train the embedded demo target again, from scratch, with its fixed seed."""
