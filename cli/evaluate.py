"""`vlmdistill eval`: decode held-out prompts with and without drafters."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.evaluation.records import Evaluation
    from vlmdistill.pipelines.evaluation.statistics import Checks, Figures, Rate


def evaluate(
    drafters: Annotated[list[str], typer.Argument(metavar="DRAFTER...", help="Drafters of the workspace.")],
    model: console.Model = "demo",
    prompts: console.PromptsFile = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperature; 0 (default) is greedy; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Decode at most N held-out prompts.")] = 100,
    max_new_tokens: console.MaxNewTokens = 512,
    tree: console.TreeShape = None,
    seed: console.Seed = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads; 0: 1 or all, whichever decodes faster.")
    ] = 0,
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    compiled: console.Compiled = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Measure drafters on held-out prompts, and check losslessness.

    Each prompt is decoded by the target alone and with each drafter. The table shows speed, and how many
    responses are identical.
    """
    from vlmdistill.pipelines.prompts import importing

    workspace = console.workspace(model, runs)
    importing.select(importing.read(prompts or workspace.prompts, model), "eval")  # before the slow imports
    from vlmdistill.drafters.core.tree import Tree
    from vlmdistill.pipelines.evaluation import evaluate as pipeline

    settings = pipeline.Settings(
        temperatures=tuple(temperature or (0.0,)),
        max_new_tokens=max_new_tokens,
        limit=limit,
        tree=Tree.parse(tree) if tree else None,
        seed=seed,
        threads=threads,
        how=console.loading(attention, target_dtype, compiled=compiled),
    )
    with console.progress("decoding", "prompts") as report:
        evaluations = pipeline.evaluate(workspace, drafters, settings, prompts_file=prompts, on_prompt=report)
    if as_json:
        console.result({one.name: _facts(one) for one in evaluations}, as_json=True)
    else:
        show(evaluations)


def show(evaluations: "list[Evaluation]") -> None:
    """Print one line per drafter and temperature; warnings on stderr."""
    from vlmdistill.pipelines.evaluation.comparison import rank

    header = ["drafter", "T", "tau", "accepted", "speedup", "decode speedup", "tokens/s", "identical"]
    rankings = rank(evaluations)
    lines, warnings = [], []
    for one in (one for ranking in rankings for one in ranking.results):
        figures = one.figures
        rates = [rate(figures, name) for name in ("tau", "accepted", "speedup", "decode_speedup")]
        speed = f"{figures.tokens_per_second:.0f}"
        lines.append([one.name, f"{one.temperature:g}", *rates, speed, responses(figures.lossless, "")])
        warnings += one.warnings
    console.rows(header, lines)
    for ranking in rankings:
        typer.echo(ranking.text)
    for warning in warnings:
        console.note(f"warning: {warning}")


def rate(figures: "Figures", name: "Rate") -> str:
    """A rate with its confidence interval, as one cell."""
    shown, interval = f"{getattr(figures, name):.2f}", figures.intervals.get(name)
    return f"{shown} ({interval.low:.2f}-{interval.high:.2f})" if interval else shown


def responses(count: "Checks", kind: str = " identical") -> str:
    """How many responses equal the target's own, as one cell."""
    cell = f"{count.identical}/{count.total}{kind}" if count.total else "-"
    cell += f", {count.near_tie} near-tie" if count.near_tie else ""
    return cell + (f", {count.different} DIFFERENT" if count.different else "")


def _facts(evaluation: "Evaluation") -> dict[str, Any]:
    """An evaluation as JSON, with figures instead of the numbers of each prompt, which are in its file."""
    import msgspec

    from vlmdistill.pipelines.evaluation.statistics import figures

    facts: dict[str, Any] = msgspec.to_builtins(evaluation)
    prompts = {"count": len(evaluation.keys), "hash": evaluation.prompt_set}
    measured = [{"temperature": at.temperature, **asdict(figures(at))} for at in evaluation.temperatures]
    return {**facts, "prompts": prompts, "temperatures": measured}
