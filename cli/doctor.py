"""`vlmdistill doctor`: check that every machine has what the stages need."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.cluster.doctor import MachineReport

CHECKS = ("model", "media", "store")  # with a column each


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
        facts = {name: vars(report) for name, report in reports.items()}
        console.result(facts, as_json)
    else:
        software = ("python", *PACKAGES)
        console.rows(
            ("machine", *software, *CHECKS, "free disk", "GPUs", "clock"),
            [_row(name, report, software) for name, report in reports.items()],
        )
    failed = False
    for name, report in reports.items():
        for advice in report.failures.values():
            console.note(f"{name}: {advice}")
            failed = True
    if failed:
        raise typer.Exit(1)


def _row(name: str, report: "MachineReport", software: Sequence[str]) -> list[str]:
    """The line of a machine in the table."""
    versions = [report.versions.get(package) or "-" for package in software]
    states = [_state(report, check) for check in CHECKS]
    disk = console.size(report.free_bytes) if report.free_bytes else "-"
    kinds = sorted(set(report.gpus))
    gpus = "; ".join(f"{report.gpus.count(kind)} x {kind}" for kind in kinds)
    clock = f"{report.clock:+.1f} s"
    return [name, *versions, *states, disk, gpus or "none", clock]


def _state(report: "MachineReport", check: str) -> str:
    if check in report.failures:
        return "failed"
    return "ok" if check in report.checked else "-"
