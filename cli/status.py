"""`vlmdistill status`: what is in a workspace, what is missing, and what comes next."""

from dataclasses import asdict, replace

from vlmdistill.cli import console, hints


def status(
    model: console.Model = "demo",
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Show what the workspace holds, what is missing or stale, and the next command."""
    from vlmdistill.pipelines.planning.status import status as read

    workspace = console.workspace(model, runs)
    found = read(workspace)
    found = replace(found, next=hints.completed(found.next))
    if as_json:
        console.result(asdict(found), as_json)
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in found.dropped.items())
    facts = {
        "workspace": found.root,
        "target": found.target,
        "prompts": f"{found.prompts} to train on, {found.held_out} held out",
        "responses": f"{found.responses} of {found.prompts}"
        + (f"; dropped: {reasons}" if reasons else ""),
        "features": f"{found.samples} samples"
        + (f": {', '.join(found.features)}" if found.samples else ""),
        "evaluations": found.evaluations,
        "report": found.report or "none",
    }
    if found.uncaptured:
        facts["features"] = (
            f"{facts['features']}; {found.uncaptured} responses without features"
        )
    console.result(facts, as_json)
    if found.drafters:
        console.echo("")
        console.rows(
            ("drafter", "method", "steps", "samples", "measured", "tau", "speedup", ""),
            [
                (
                    one.name,
                    one.method,
                    one.steps,
                    one.samples,
                    one.measured[:16].replace("T", " ") or "never",
                    "-" if one.tau is None else f"{one.tau:.2f}",
                    "-" if one.speedup is None else f"{one.speedup:.2f}",
                    "; ".join(one.remarks),
                )
                for one in found.drafters
            ],
        )
    for line in found.stale:
        console.note(f"stale: {line}")
    console.echo(f"\nnext: {found.next}" if found.next else "\nnothing is missing")
    if beside := workspace.beside():
        console.note(beside)
