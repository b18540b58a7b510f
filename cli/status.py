"""`vlmdistill status`: what is in a workspace, what is missing, and what comes next."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from vlmdistill.cli import console, hints

if TYPE_CHECKING:
    from vlmdistill.pipelines.planning.status import DrafterStatus, WorkspaceStatus

HEADER = ("drafter", "method", "steps", "samples", "measured", "tau", "speedup", "")


def status(
    model: console.Model = "demo",
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Show what the workspace holds, what is missing or stale, and the next command."""
    from vlmdistill.pipelines.planning.status import status as read

    workspace = console.workspace(model, runs)
    contents = read(workspace)
    contents = replace(contents, next=hints.completed(contents.next))
    if as_json:
        console.result(asdict(contents), as_json)
        return
    console.result(_facts(contents), as_json)
    if contents.drafters:
        console.echo("")
        console.rows(HEADER, [_row(drafter) for drafter in contents.drafters])
    for text in contents.stale:
        console.note(f"stale: {text}")
    if contents.next:
        console.echo(f"\nnext: {contents.next}")
    else:
        console.echo("\nnothing is missing")
    if beside := workspace.beside():
        console.note(beside)


def _facts(status: "WorkspaceStatus") -> dict[str, Any]:
    """The contents of the workspace apart from its drafters."""
    prompts = f"{status.prompts} to train on, {status.held_out} held out"
    responses = f"{status.responses} of {status.prompts}"
    if status.dropped:
        reasons = [f"{reason} {count}" for reason, count in status.dropped.items()]
        responses += f"; dropped: {', '.join(reasons)}"
    features = f"{status.samples} samples"
    if status.samples:
        features += f": {', '.join(status.features)}"
    if status.uncaptured:
        features += f"; {status.uncaptured} responses without features"
    return {
        "workspace": status.root,
        "target": status.target,
        "prompts": prompts,
        "responses": responses,
        "features": features,
        "evaluations": status.evaluations,
        "report": status.report or "none",
    }


def _row(drafter: "DrafterStatus") -> list[Any]:
    measured = drafter.measured[:16].replace("T", " ") or "never"
    samples = str(drafter.samples)
    if drafter.validate:
        samples += f", {drafter.validate} validate"
    trained = [drafter.name, drafter.method, drafter.steps, samples]
    tau = "-" if drafter.tau is None else f"{drafter.tau:.2f}"
    remarks = "; ".join(drafter.remarks)
    return [*trained, measured, tau, drafter.speedup_text, remarks]
