"""`vlmdistill eval`: decode held-out prompts with and without drafters, here or with a running server."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console, forecasts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmdistill.pipelines.bench.records import Evaluation
    from vlmdistill.pipelines.bench.served import ServedDrafters
    from vlmdistill.pipelines.bench.statistics import Figures
    from vlmdistill.pipelines.workspace.workspace import Workspace

SERVER = "openai:"
HERE, VLLM, THERE = "transformers", "vllm", "openai:URL"
ENGINES = {
    **dict.fromkeys(
        ("dry_run", "tree", "threads", "attention", "compiled", "thinking"), (HERE,)
    ),
    "target_dtype": (HERE, VLLM),
    "concurrency": (VLLM, THERE),
    "name": (HERE, THERE),
    **dict.fromkeys(("baseline", "served_model"), (THERE,)),
}
"""Options that only some engines have."""


def evaluate(
    context: typer.Context,
    drafters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DRAFTER...", help="Drafters of the workspace; none with a server."
        ),
    ] = None,
    model: console.Model = "demo",
    prompts: console.PromptsFile = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@PAPER]",
            help="Evaluate on a set of a paper, with its prompts; may be repeated; `demo`: the demo's.",
        ),
    ] = None,
    bench_data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --bench: folder with copies of the sets; default: the hub.",
        ),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            help="With --bench: frames per second to sample from each video; default: the target's."
        ),
    ] = None,
    frames: console.Frames = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="Sampling temperature; 0 (default) is greedy; may be repeated."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Decode at most N held-out prompts; default: 100, or each set's number in its paper.",
        ),
    ] = None,
    max_new_tokens: console.MaxNewTokens = 512,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE|auto",
            help="Draft tree: total-depth-k, such as 30-3-8, or chain-5, or chain-8-0.3; auto: the fastest "
            "here, which is kept with the drafter; default: the drafter's own; may be repeated.",
        ),
    ] = None,
    seed: console.Seed = 0,
    threads: Annotated[
        int,
        typer.Option(min=0, help="CPU threads; 0: 1 or all, whichever decodes faster."),
    ] = 0,
    thinking: console.Thinking = None,
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    compiled: console.Compiled = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="transformers|vllm|openai:URL",
            help="What decodes: this process, servers of vLLM that are started for it, or a running "
            "OpenAI-compatible server.",
        ),
    ] = "transformers",
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            help="With a server: requests at a time; default: 1; may be repeated."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With a server: the same one without a drafter, for the speedup.",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With a server: its name of the target; default: that of --model.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the evaluation, to find it; default: none, or the address of the server."
        ),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the evaluations there are (of DRAFTER...) and end."
        ),
    ] = False,
    dry_run: console.DryRun = False,
    anyway: console.Anyway = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Measure drafters on held-out prompts, and check losslessness.

    Each prompt is decoded by the target alone and with each drafter. The table shows speed, and how many
    responses are identical. The evaluation is added to those of the workspace, which --list prints and
    `report` selects from; it replaces none.

    With --engine openai:URL, the prompts are sent to a running server at each --concurrency. Times are
    the client's, acceptance is what the server's metrics count. The key is OPENAI_API_KEY. With --engine
    vllm, each drafter is exported and served by vLLM, beside a server without a drafter; needs `make
    engine` once. The exit status is 1 when a response at temperature 0 differs from the target's by more than
    a near-tie, a request failed, or a drafter could not be served.
    """
    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.data.prompts import prompt_table

    if listed:
        show_list(console.workspace(model, runs), drafters or [], as_json)
        return
    kind = _engine(context, engine, drafters or [])
    workspace = console.workspace(model, runs)
    if bench:
        from vlmdistill.pipelines.prompts import import_evaluation_sets

        if prompts is not None:
            raise typer.BadParameter("--bench has its own", param_hint="--prompts")
        with console.progress("importing", "rows") as read:
            prompts, limit = import_evaluation_sets(
                workspace, bench, bench_data, limit, read, fps=fps, frames=frames
            )
    else:
        of_sets = {"--bench-data": bench_data, "--fps": fps, "--frames": frames}
        for option, value in of_sets.items():
            if value is not None:
                raise typer.BadParameter("it needs --bench", param_hint=option)
    if kind == HERE:
        prompt_table.load(
            prompts or workspace.prompts, model, "eval", 1
        )  # before the slow imports
    for drafter in drafters or []:
        describe(workspace.drafter(drafter))
    from vlmdistill.pipelines.bench import evaluate as pipeline

    how = console.loading(attention, target_dtype, compiled=compiled)
    settings = pipeline.Settings(
        temperatures=tuple(dict.fromkeys(temperature or (0.0,))),
        max_new_tokens=max_new_tokens,
        limit=100 if limit is None else limit,
        trees=pipeline.trees_of(tree or ()),
        seed=seed,
        threads=threads,
        how={**how, "thinking": thinking} if thinking else how,
        concurrencies=tuple(dict.fromkeys(concurrency or (1,))),
    )
    if kind == HERE:
        for text in pipeline.oversized_trees(workspace, drafters or [], settings):
            console.note(f"warning: {text}")
    if kind == HERE and (dry_run or not anyway):
        from vlmdistill.pipelines.planning import forecast

        planned = forecast.evaluation(
            workspace, drafters or [], settings, prompts, timed=dry_run
        )
        if dry_run:
            forecasts.show_evaluation(planned, as_json)
            return
        planned.check(workspace.reports)
    if kind != HERE:
        from vlmdistill.pipelines.bench import served

        errors: list[str] = []
        with console.progress("sending", "prompts") as report:
            if kind == VLLM:
                found = served.evaluate_drafters(
                    workspace,
                    drafters or [],
                    settings,
                    prompts_file=prompts,
                    on_prompt=report,
                    on_failure=errors.append,
                )
            else:
                one = served.evaluate_server(
                    workspace,
                    engine.removeprefix(SERVER),
                    settings,
                    baseline=baseline,
                    name=name,
                    served_model=served_model,
                    prompts_file=prompts,
                    on_prompt=report,
                    on_failure=errors.append,
                )
                found = served.ServedDrafters([one])
        show_served(found, as_json, errors, by_name=kind == VLLM)
        return
    with console.progress("decoding", "prompts", str(workspace.reports)) as report:
        evaluations = pipeline.evaluate(
            workspace,
            drafters or [],
            settings,
            prompts_file=prompts,
            title=name or "",
            on_prompt=report,
        )
    if as_json:
        console.result({one.name: _facts(one) for one in evaluations}, as_json=True)
    else:
        show(evaluations)
    check_lossless(evaluations)


def show_list(workspace: "Workspace", drafters: list[str], as_json: bool) -> None:
    """Print a line for each evaluation and temperature, the latest first."""
    from vlmdistill.pipelines.report import selection

    rows = selection.read(workspace.reports).table.to_dicts()
    rows = [row for row in rows if not drafters or row["drafter"] in drafters]
    if as_json:
        console.result({"evaluations": rows}, as_json=True)
    elif rows:
        columns = list(selection.LISTED)
        console.rows(columns, [[_cell(row[name]) for name in columns] for row in rows])
    else:
        of = f" of {', '.join(drafters)}" if drafters else ""
        console.note(f"no evaluations{of} in {workspace.reports}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".removesuffix(".00")
    return "-" if value in (None, "") else str(value)


def _engine(context: typer.Context, engine: str, drafters: list[str]) -> str:
    """The kind of `--engine`; BadParameter when an argument is of another one."""
    kind = THERE if engine.startswith(SERVER) else engine
    if kind not in (HERE, VLLM, THERE):
        raise typer.BadParameter(
            f"unknown engine '{engine}': choose {HERE}, {VLLM} or {THERE}",
            param_hint="--engine",
        )
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        needed = ENGINES.get(option.name or "", (kind,))
        if kind not in needed and source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(
                f"it needs --engine {' or '.join(needed)}", param_hint=option.opts[0]
            )
    if kind == THERE and drafters:
        raise typer.BadParameter(
            "with openai:URL the server picks the drafter: remove DRAFTER",
            param_hint="DRAFTER...",
        )
    if kind != THERE and not drafters:
        raise typer.BadParameter("name at least one", param_hint="DRAFTER...")
    return kind


def show_served(
    found: "ServedDrafters",
    as_json: bool,
    errors: "Sequence[str]",
    *,
    by_name: bool = False,
) -> None:
    """Print a line for each temperature, concurrency and server; Exit 1 if something failed.

    `errors` are what servers said of failed requests.
    """
    import msgspec

    from vlmdistill.pipelines.report.results import ServerResult
    from vlmdistill.pipelines.report.tables import SERVED, served

    results = [ServerResult(made, load) for made in found.made for load in made.loads]
    if as_json:
        facts = {
            made.name: {
                **msgspec.to_builtins(made),
                "loads": [
                    asdict(one.figures) for one in results if one.evaluation is made
                ],
            }
            for made in found.made
        }
        console.result(known(facts if by_name else facts.popitem()[1]), as_json=True)
    elif results:
        console.rows(SERVED, served(results))
    for warning in (warning for one in results for warning in one.warnings):
        console.note(f"warning: {warning}")
    for made in found.made:
        if made.failed:
            sent = sum(len(run.requests) + len(run.failed) for run in made.runs)
            first = made.failed[0]
            console.note(
                f"{len(made.failed)} of {sent} requests failed, prompt {first.key}: {first.reason}"
            )
    if errors:
        console.note(f"the first error: {errors[0]}")
    for name, error in found.failed.items():
        if log := getattr(error, "log", ""):
            console.note(f"{log}\n")
        console.note(f"{name} was not measured: {error}")
    if found.failed or any(made.failed for made in found.made):
        raise typer.Exit(1)


def known(facts: Any) -> Any:
    """Without what the server did not report."""
    if isinstance(facts, dict):
        return {
            name: known(value) for name, value in facts.items() if value is not None
        }
    return [known(one) for one in facts] if isinstance(facts, list) else facts


def show(evaluations: "list[Evaluation]") -> None:
    """Print one line per drafter and temperature; warnings on stderr."""
    from vlmdistill.pipelines.report.comparison import drifts, rank
    from vlmdistill.pipelines.report.tables import (
        COLUMNS,
        PARTS,
        budgets,
        calibrations,
        divided,
        responses,
    )

    names = (
        "drafter",
        "T",
        "tau",
        "speedup",
        "CPU speedup",
        "decode speedup",
        "cycle cost",
        "tokens/s",
    )
    header = [*names, "identical"]
    rankings = rank(evaluations)
    results = [one for ranking in rankings for one in ranking.results]
    lines = [
        [*(COLUMNS[name](one) for name in names), responses(one.figures.lossless, "")]
        for one in results
    ]
    warnings = [warning for one in results for warning in one.warnings]
    console.rows(header, lines)
    if parts := divided(results):
        console.echo("")
        console.rows(PARTS, parts)
    if table := budgets(results):
        console.echo("")
        console.rows(table[0], table[1:])
        console.echo("")
    if table := calibrations(results):
        console.rows(table[0], table[1:])
        console.echo("")
    for ranking in rankings:
        console.echo(ranking.text)
    for warning in [*warnings, *drifts(evaluations)]:
        console.note(f"warning: {warning}")


def check_lossless(evaluations: "Sequence[Evaluation]") -> None:
    """Exit 1 if a response at temperature 0 is not the target's, or counts contradict each other."""
    from vlmdistill.pipelines.bench.audit import failures

    contradictions = [
        f"{one.name}: {text}" for one in evaluations for text in failures(one)
    ]
    for text in contradictions:
        console.note(f"error: {text}")
    if odd := [one.name for one in evaluations if not one.lossless]:
        console.note(
            f"not lossless: responses at temperature 0 differ from the target's: {', '.join(odd)}"
        )
    if odd or contradictions:
        raise typer.Exit(1)


def _rates(figures: "Figures") -> dict[str, Any]:
    """The metrics; null: there is no such rate, as nothing was drafted."""
    from vlmdistill.pipelines.bench.statistics import OF_CYCLES

    absent = OF_CYCLES if not figures.calls else ()
    return {**asdict(figures), **dict.fromkeys(absent)}


def _facts(evaluation: "Evaluation") -> dict[str, Any]:
    """An evaluation as JSON, with figures instead of the numbers of each prompt, which are in its file."""
    import msgspec

    from vlmdistill.pipelines.bench.records import LABELS
    from vlmdistill.pipelines.bench.statistics import figures

    facts: dict[str, Any] = msgspec.to_builtins(evaluation)
    prompts = {"count": len(evaluation.keys), "hash": evaluation.prompt_set}
    measured = [
        {
            "temperature": at.temperature,
            **_rates(figures(at)),
            **{
                f"by_{name}": {
                    value: _rates(figures(part)) for value, part in at.by(label).items()
                }
                for name, label in LABELS.items()
            },
        }
        for at in evaluation.temperatures
    ]
    return {**facts, "prompts": prompts, "temperatures": measured}
