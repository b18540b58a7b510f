"""`vlmdistill replay`: where would the target have rejected a drafter's guesses?"""

from dataclasses import asdict
from typing import Annotated

import typer

from vlmdistill.cli import console


def replay(
    drafter: Annotated[
        str, typer.Argument(help="Name or folder of a trained drafter.")
    ],
    model: console.Model = "demo",
    store: console.StoreName = None,
    view: Annotated[
        str | None, typer.Option(help="Only the samples of this view.")
    ] = None,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Draft the stored responses again, and keep in the store where the target would have rejected.

    Neither the target nor its weights are needed. Training with `--set stages.*.anchors=failed` then takes
    these positions; views select by the column replayed_tau, the tokens for each call of the target.
    """
    from vlmdistill.drafters.checkpoints.description import describe

    workspace = console.workspace(model, runs)
    folder = workspace.trained(drafter)
    describe(folder)  # before torch
    from vlmdistill.pipelines.traffic import replay as traffic
    from vlmdistill.stores.store import Store

    with console.progress("drafting", "responses") as report:
        found = traffic.replay(
            folder, Store.open(store or workspace.features), view, report
        )
    console.result(asdict(found), as_json)
