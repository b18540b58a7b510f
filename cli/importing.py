"""`vlmdistill import`: write a published drafter as one of this toolkit."""

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

    It must be of the target given by --model. A tensor or setting that would make it compute something else
    here is refused by its name.
    """
    from vlmdistill.drafters import catalogue
    from vlmdistill.stores.errors import DataError

    catalogue.check(drafter)  # before torch is loaded
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} has no config.json: give the folder of a published drafter"
        )
    from vlmdistill.drafters.checkpoints import published
    from vlmdistill.pipelines.targets.loading import load_embedding

    workspace = console.workspace(model, runs)
    published.read(folder, drafter)  # fails before the target is loaded
    target, head = load_embedding(workspace.model)
    provenance = target.provenance((), "float32")
    out = workspace.drafter(name or drafter)
    facts = published.load(folder, drafter, head, target.info, out, provenance)
    console.result(facts, as_json)
