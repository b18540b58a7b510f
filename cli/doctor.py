"""`vlmdistill doctor`: check that every machine has what the stages need."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.cluster.doctor import MachineReport


def doctor(
    model: console.Model = "demo",
    store: console.StoreName = None,
    media: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of images and videos; default: those of the prompts.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="RAY_ADDRESS",
            help="Ray cluster; default: this machine alone.",
        ),
    ] = None,
    least: Annotated[
        int,
        typer.Option(
            "--machines",
            metavar="N",
            min=1,
            help="Wait for N machines; fail if fewer join.",
        ),
    ] = 1,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Longest time until a machine joins, or replies.",
        ),
    ] = 120.0,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Check that every machine of a Ray cluster has what the stages need.

    On each machine: versions equal to those here, the same model, readable images and videos, a store that
    can be read and written (which proves its credentials), free disk, GPUs that torch can use, and the clock.
    The exit status is 1 if a check fails; a line on stderr says what to do.
    """
    from vlmdistill.pipelines.cluster.doctor import PACKAGES, examine
    from vlmdistill.pipelines.data.prompts.importing import media_of

    workspace = console.workspace(model, runs)
    with console.waiting("waiting for the machines"):
        reports = examine(
            workspace.model,
            store or workspace.features,
            lambda: media_of(workspace.prompts, media),
            address or "",
            least,
            wait,
        )
    if as_json:
        console.result(
            {name: vars(report) for name, report in reports.items()}, as_json
        )
    else:
        console.rows(
            (
                "machine",
                "python",
                *PACKAGES,
                "model",
                "media",
                "store",
                "free disk",
                "GPUs",
                "clock",
            ),
            [
                (
                    name,
                    *(one.versions.get(what) or "-" for what in ("python", *PACKAGES)),
                    *(_state(one, check) for check in ("model", "media", "store")),
                    console.size(one.free_bytes) if one.free_bytes else "-",
                    "; ".join(
                        f"{one.gpus.count(kind)} x {kind}"
                        for kind in sorted(set(one.gpus))
                    )
                    or "none",
                    f"{one.clock:+.1f} s",
                )
                for name, one in reports.items()
            ],
        )
    failures = [
        (name, why) for name, one in reports.items() for why in one.failures.values()
    ]
    for name, why in failures:
        console.note(f"{name}: {why}")
    if failures:
        raise typer.Exit(1)


def _state(report: "MachineReport", check: str) -> str:
    return (
        "failed"
        if check in report.failures
        else "ok"
        if check in report.checked
        else "-"
    )
