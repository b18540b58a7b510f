"""`vlmdistill forget`: delete traffic of the workspace by its age."""

from dataclasses import asdict
from typing import Annotated

import typer

from vlmdistill.cli import console


def forget(
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Delete what was asked longer ago, such as 30d."
        ),
    ],
    model: console.Model = "demo",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count, but delete nothing.")
    ] = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Delete harvested traffic by its age: samples, responses, prompts, images and videos.

    Bytes leave the disk; evaluations keep their numbers and lose what they show of these prompts. Data that
    was not harvested stays. Drafters that were trained on it stay, too.
    """
    from vlmdistill.stores.schema import seconds

    age = seconds(older_than, "--older-than")
    workspace = console.workspace(model, runs)
    from vlmdistill.pipelines.traffic.forget import forget as delete

    console.result(asdict(delete(workspace, age, dry_run=dry_run)), as_json)
