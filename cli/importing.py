"""`vlmdistill import`: a published drafter as one of this toolkit."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console


def import_drafter(
    folder: Annotated[
        Path, typer.Argument(help="Published checkpoint: config.json and its weights.")
    ],
    drafter: Annotated[
        str, typer.Option("--as", metavar="METHOD", help="Its method, such as eagle3.")
    ],
    model: console.Model = "demo",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the imported drafter; default: the same as METHOD."),
    ] = None,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Write a checkpoint in its authors' format as a drafter that `eval` and `export` accept.

    It must be of the target given by --model. What would compute something else here is refused by the name
    of its tensor or setting.
    """
    from vlmdistill.drafters import catalogue
    from vlmdistill.stores.errors import DataError

    catalogue.check(drafter)  # what is cheap to check comes before torch
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} has no config.json: give the folder of a published drafter"
        )
    from vlmdistill.drafters.checkpoints import published
    from vlmdistill.pipelines.targets.loading import load_embedding

    workspace = console.workspace(model, runs)
    published.read(folder, drafter)  # fails before the target is loaded
    target, head = load_embedding(workspace.model)
    origin = target.provenance((), "float32")
    out = workspace.drafter(name or drafter)
    console.result(
        published.load(folder, drafter, head, target.info, out, origin), as_json
    )
