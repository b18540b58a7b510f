"""`vlmdistill eval`: decode held-out prompts with drafters and without."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vlmdistill.cli import console


def evaluate(
    drafters: Annotated[list[str], typer.Argument(metavar="DRAFTER...", help="Names in the workspace.")],
    model: console.Model = "demo",
    prompts: Annotated[Path | None, typer.Option(help="Prompts; the workspace's own by default.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Decode at most N prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    tree: Annotated[str | None, typer.Option(help="total-depth-k such as 30-3-8, or chain-5.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=console.LAST_SEED, help="Seed of sampling.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 measures which is best.")] = 0,
    attention: console.Kernels = console.Attention.sdpa,
    target_dtype: console.Precision = console.TargetDtype.auto,
    compiled: console.Compiled = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Measure drafters on the prompts held out for it, and check that nothing is lost."""
    from vlmdistill.drafters.base import Tree
    from vlmdistill.pipelines import evaluate as pipeline
    from vlmdistill.pipelines.workspace import Workspace

    settings = pipeline.Settings(
        temperatures=tuple(temperature or (0.0,)),
        max_new_tokens=max_new_tokens,
        limit=limit,
        tree=Tree.parse(tree) if tree else None,
        seed=seed,
        threads=threads,
        how=console.loading(attention, target_dtype, compiled=compiled),
    )
    workspace = Workspace.of(model, Path(runs) if runs else None)
    with console.progress("decoding", "prompts") as report:
        reports = pipeline.evaluate(workspace, drafters, settings, prompts_file=prompts, on_prompt=report)
    if as_json:
        console.result({one["name"]: one for one in reports}, as_json=True)
    else:
        show(reports)


def show(reports: list[dict[str, Any]]) -> None:
    """Print one line per drafter and temperature."""
    header = ["drafter", "T", "tau", "accepted", "speedup", "decode speedup", "tokens/s", "identical"]
    lines = []
    for report in reports:
        for one in report["temperatures"]:
            counts = one["lossless"]
            verdict = f"{counts['identical']}/{sum(counts.values())}" if any(counts.values()) else "-"
            verdict += f", {counts['near_tie']} near-tie" if counts["near_tie"] else ""
            verdict += f", {counts['different']} DIFFERENT" if counts["different"] else ""
            figures = [one[name] for name in ("tau", "accepted", "speedup", "decode_speedup")]
            shown = [f"{figure:.2f}" for figure in figures]
            rate = f"{one['tokens_per_second']:.0f}"
            lines.append([report["name"], f"{one['temperature']:g}", *shown, rate, verdict])
    console.rows(header, lines)
