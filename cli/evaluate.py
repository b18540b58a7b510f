"""`vlmdistill eval`: decode held-out prompts with and without drafters, here or with a running server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console, forecasts

if TYPE_CHECKING:
    from vlmdistill.pipelines.bench.records import Evaluation
    from vlmdistill.pipelines.bench.served import (
        OnFailure,
        ServedDrafters,
        ServerOptions,
    )
    from vlmdistill.pipelines.bench.settings import Settings
    from vlmdistill.pipelines.planning.stages import StagePlan
    from vlmdistill.pipelines.report.results import DrafterResult, ServerResult
    from vlmdistill.pipelines.workspace.trained import Trained
    from vlmdistill.pipelines.workspace.workspace import Workspace
    from vlmdistill.stores.progress import Progress

SERVER_PREFIX = "openai:"
TRANSFORMERS, VLLM, SERVER = "transformers", "vllm", "openai:URL"
LOCAL_OPTIONS = (
    "dry_run",
    "anyway",
    "tree",
    "threads",
    "attention",
    "compiled",
)
ENGINES_OF: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(LOCAL_OPTIONS, (TRANSFORMERS,)),
    "target_dtype": (TRANSFORMERS, VLLM),
    "concurrency": (VLLM, SERVER),
    "name": (TRANSFORMERS, SERVER),
    **dict.fromkeys(("baseline", "served_model"), (SERVER,)),
}
"""The engines of an option, by its parameter; other options are of all engines."""
LIMIT = 100  # prompts to decode, unless --bench or --limit gives another number


def evaluate(
    context: typer.Context,
    drafters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DRAFTER",
            help="Drafters of the workspace; none with a server; separate several by spaces or commas.",
        ),
    ] = None,
    model: console.Model = "demo",
    prompts: console.PromptsFile = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@PAPER]",
            help=f"Evaluate on the prompts of a paper's set; `demo`: the demo's set; {console.LIST}.",
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
        list[str] | None,
        typer.Option(
            metavar="NUMBERS",
            help=f"Sampling temperatures; 0 (default) is greedy; {console.LIST}.",
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
            help="Draft trees: total-depth-k, such as 30-3-8, or chain-5, or chain-8-0.3; auto: the fastest "
            f"here, which is kept with the drafter; default: the drafter's own; {console.LIST}.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=console.LAST_SEED,
            help="Seed of sampling, to repeat it; default: for each prompt one that no drafter can guess.",
        ),
    ] = None,
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
        list[str] | None,
        typer.Option(
            metavar="NUMBERS",
            help=f"With a server: requests at a time; default: 1; {console.LIST}.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With a server: one with the same target and no drafter, for the speedup.",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With a server: its name for the target; default: that of --model.",
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
    a near-tie (two tokens that rounding decides between), a request failed, or a drafter could not be served.
    """
    if listed:
        show_list(console.workspace(model, runs), _names(drafters), as_json)
        return
    names = _names(drafters)
    kind = _engine(context, engine, names)
    workspace = console.workspace(model, runs)
    temperatures = console.numbers("--temperature", temperature, 0.0)
    concurrencies = console.numbers("--concurrency", concurrency, 1)
    if bench:
        if prompts is not None:
            raise typer.BadParameter("--bench has its own", param_hint="--prompts")
        sets = _EvaluationSets(console.separated(bench), bench_data, fps, frames)
        prompts, limit = sets.import_into(workspace, limit)
    else:
        set_options = {"--bench-data": bench_data, "--fps": fps, "--frames": frames}
        _require_bench(set_options)
    trained = _open_inputs(workspace, names, kind, prompts, untrained=dry_run)
    from vlmdistill.pipelines.bench import evaluate as pipeline

    loading = console.loading(attention, target_dtype, compiled=compiled)
    settings = pipeline.Settings(
        temperatures=tuple(temperatures or (0.0,)),
        max_new_tokens=max_new_tokens,
        limit=LIMIT if limit is None else limit,
        trees=pipeline.trees_of(console.separated(tree)),
        seed=seed,
        threads=threads,
        how={**loading, "thinking": thinking} if thinking else loading,
        concurrencies=tuple(concurrencies or (1,)),
    )
    task = _Task(workspace, trained, settings, prompts, as_json)
    if kind == TRANSFORMERS:
        run_here = _RunHere(task, name or "", dry_run=dry_run, anyway=anyway)
        run_here()
    elif kind == VLLM:
        _run_vllm(task)
    else:
        from vlmdistill.pipelines.bench.served import ServerOptions

        server = ServerOptions(
            url=engine.removeprefix(SERVER_PREFIX),
            baseline=baseline,
            name=name,
            served_model=served_model,
        )
        _run_server(task, server)


def _names(drafters: Sequence[str] | None) -> list[str]:
    """The drafters: `a b` and `a,b` name two; a folder may have a comma in its path."""
    names: list[str] = []
    for word in drafters or ():
        names += [word] if "/" in word else console.separated([word])
    return names


@dataclass(frozen=True)
class _Task:
    """What is evaluated, whatever decodes."""

    workspace: "Workspace"
    drafters: "Sequence[Trained]"  # none with a running server
    settings: "Settings"
    prompts_file: Path | None
    as_json: bool


@dataclass(frozen=True)
class _EvaluationSets:
    """Sets of papers, from the hub or from a folder."""

    names: Sequence[str]
    folder: Path | None
    fps: float | None
    frames: int | None

    def import_into(
        self, workspace: "Workspace", limit: int | None
    ) -> tuple[Path, int]:
        """The file of their prompts, and how many to decode."""
        from vlmdistill.pipelines.prompts import import_evaluation_sets

        with console.progress("importing", "rows") as report:
            return import_evaluation_sets(
                workspace,
                [*self.names],
                self.folder,
                limit,
                report,
                fps=self.fps,
                frames=self.frames,
            )


def _require_bench(options: Mapping[str, object]) -> None:
    """BadParameter for an option that has an effect only with --bench."""
    for option, value in options.items():
        if value is not None:
            raise typer.BadParameter("it requires --bench", param_hint=option)


def _open_inputs(
    workspace: "Workspace",
    names: Sequence[str],
    kind: str,
    prompts: Path | None,
    *,
    untrained: bool,
) -> "list[Trained]":
    """The drafters; DataError or TrainingError for mistakes in prompts or names, before the slow imports.

    Methods may be `untrained` if nothing is decoded. With servers, prompts are read later, but before any
    server is started or asked.
    """
    from vlmdistill.pipelines.data.prompts import prompt_table
    from vlmdistill.pipelines.workspace.trained import open_drafters

    if kind == TRANSFORMERS:
        file = prompts or workspace.prompts
        prompt_table.load(file, workspace.model, "eval", 1)  # only to find mistakes
    return open_drafters(workspace, names, untrained=untrained)


@dataclass(frozen=True)
class _RunHere:
    """Decode in this process."""

    task: _Task
    title: str
    dry_run: bool
    anyway: bool

    def __call__(self) -> None:
        """Decode, unless this is a dry run or memory will not suffice, and print the results."""
        from vlmdistill.pipelines.bench import evaluate as pipeline

        task = self.task
        for warning in pipeline.oversized_trees(task.drafters, task.settings):
            console.note(f"warning: {warning}")
        if self.dry_run:
            forecasts.show([self._forecast()], task.as_json)
            return
        if not self.anyway:
            self._forecast().check()
        reports = str(task.workspace.reports)
        with console.progress("decoding", "prompts", reports) as report:
            evaluations = pipeline.evaluate(
                task.workspace,
                task.drafters,
                task.settings,
                prompts_file=task.prompts_file,
                title=self.title,
                on_prompt=report,
            )
        if task.as_json:
            facts = {evaluation.name: _facts(evaluation) for evaluation in evaluations}
            console.result(facts, as_json=True)
        else:
            show(evaluations)
        check_lossless(evaluations)

    def _forecast(self) -> "StagePlan":
        """What decoding takes; its time on a dry run only."""
        from vlmdistill.pipelines.planning import forecast

        task = self.task
        return forecast.evaluation(
            task.workspace,
            [drafter.name for drafter in task.drafters],
            task.settings,
            task.prompts_file,
            untrained=self.dry_run,
            timed=self.dry_run,
        )


def _run_vllm(task: _Task) -> None:
    """Measure servers of vLLM that are started for the drafters."""
    from vlmdistill.pipelines.bench import served

    def measure(report: "Progress", on_failure: "OnFailure") -> "ServedDrafters":
        return served.evaluate_drafters(
            task.workspace,
            task.drafters,
            task.settings,
            prompts_file=task.prompts_file,
            on_prompt=report,
            on_failure=on_failure,
        )

    _show_measured(measure, task.as_json, by_name=True)


def _run_server(task: _Task, server: "ServerOptions") -> None:
    """Measure a running server."""
    from vlmdistill.pipelines.bench import served

    def measure(report: "Progress", on_failure: "OnFailure") -> "ServedDrafters":
        evaluation = served.evaluate_server(
            task.workspace,
            server,
            task.settings,
            prompts_file=task.prompts_file,
            on_prompt=report,
            on_failure=on_failure,
        )
        return served.ServedDrafters([evaluation])

    _show_measured(measure, task.as_json, by_name=False)


def _show_measured(
    measure: "Callable[[Progress, OnFailure], ServedDrafters]",
    as_json: bool,
    *,
    by_name: bool,
) -> None:
    errors: list[str] = []
    with console.progress("sending", "prompts") as report:
        measured = measure(report, errors.append)
    show_served(measured, as_json, errors, by_name=by_name)


def show_list(workspace: "Workspace", drafters: list[str], as_json: bool) -> None:
    """Print a line for each evaluation and temperature, the latest first."""
    from vlmdistill.pipelines.report import selection
    from vlmdistill.pipelines.report.comparison import drifts
    from vlmdistill.pipelines.report.page import beside_present_weights
    from vlmdistill.pipelines.report.results import DrafterResult

    kept = selection.read(workspace.reports)
    present = beside_present_weights(workspace, kept.drafter_results)
    kept = selection.Kept([*present, *kept.server_results])
    rows = []
    for result, row in zip(kept.results, kept.table.to_dicts(), strict=True):
        if drafters and result.drafter not in drafters:
            continue
        warnings = result.problems
        if isinstance(result, DrafterResult):
            warnings += drifts([result.evaluation])
        others = [text for text in warnings if text not in result.no_speedup]
        row["warnings"] = "; ".join(others) or None
        if not as_json:
            # A number in doubt is not shown.
            if row["not_ranked"]:
                row["speedup"] = None
            if isinstance(result, DrafterResult) and result.wrong_counts:
                row["tau"] = None
            row["temperature"] = f"{row['temperature']:g}"
        rows.append(row)
    if as_json:
        console.result({"evaluations": rows}, as_json=True)
    elif rows:
        columns = list(selection.LISTED)
        lines = [[_cell(row.get(name)) for name in columns] for row in rows]
        console.rows(columns, lines)
    else:
        of_drafters = f" of {', '.join(drafters)}" if drafters else ""
        console.note(f"no evaluations{of_drafters} in {workspace.reports}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".removesuffix(".00")
    return "-" if value in (None, "") else str(value)


def _engine(context: typer.Context, engine: str, drafters: list[str]) -> str:
    """Which engine `--engine` names; BadParameter if an option or argument is only of others."""
    kind = SERVER if engine.startswith(SERVER_PREFIX) else engine
    if kind not in (TRANSFORMERS, VLLM, SERVER):
        raise typer.BadParameter(
            f"unknown engine '{engine}': choose {TRANSFORMERS}, {VLLM} or {SERVER}",
            param_hint="--engine",
        )
    for option in context.command.params:
        parameter = option.name or ""
        engines = ENGINES_OF.get(parameter)
        source = context.get_parameter_source(parameter)
        is_given = source is not None and source.name != "DEFAULT"
        if is_given and engines and kind not in engines:
            raise typer.BadParameter(
                f"it requires --engine {' or '.join(engines)}",
                param_hint=option.opts[0],
            )
    if kind == SERVER and drafters:
        raise typer.BadParameter(
            "with openai:URL the server picks the drafter: remove DRAFTER",
            param_hint="DRAFTER...",
        )
    if kind != SERVER and not drafters:
        raise typer.BadParameter("name at least one", param_hint="DRAFTER...")
    return kind


def show_served(
    measured: "ServedDrafters",
    as_json: bool,
    errors: Sequence[str],
    *,
    by_name: bool = False,
) -> None:
    """Print a line for each temperature, concurrency and server; Exit 1 if something failed.

    `errors` are what servers said of failed requests. The JSON of several servers is `by_name`.
    """
    from vlmdistill.pipelines.report.results import ServerResult
    from vlmdistill.pipelines.report.tables import SERVED, served

    results = [
        ServerResult(evaluation, load)
        for evaluation in measured.evaluations
        for load in evaluation.loads
    ]
    if as_json:
        facts = _served_facts(results)
        if not by_name:  # there is one server
            (facts,) = facts.values()
        console.result(without_nulls(facts), as_json=True)
    elif results:
        console.rows(SERVED, served(results))
    for result in results:
        for warning in result.warnings:
            console.note(f"warning: {warning}")
    _note_failures(measured, errors)
    any_failed = any(evaluation.failed for evaluation in measured.evaluations)
    if measured.failed or any_failed:
        raise typer.Exit(1)


def _served_facts(results: "Sequence[ServerResult]") -> dict[str, Any]:
    """Evaluations of servers as JSON, by name, with figures instead of the requests."""
    import msgspec

    facts: dict[str, Any] = {}
    for result in results:
        evaluation = result.evaluation
        if evaluation.name not in facts:
            facts[evaluation.name] = {**msgspec.to_builtins(evaluation), "loads": []}
        facts[evaluation.name]["loads"].append(asdict(result.figures))
    return facts


def _note_failures(measured: "ServedDrafters", errors: Sequence[str]) -> None:
    """Say which requests and drafters failed, and why."""
    for evaluation in measured.evaluations:
        if evaluation.failed:
            runs = evaluation.runs
            sent = sum(len(run.requests) + len(run.failed) for run in runs)
            first = evaluation.failed[0]
            console.note(
                f"{len(evaluation.failed)} of {sent} requests failed, prompt {first.key}: {first.reason}"
            )
    if errors:
        console.note(f"the first error: {errors[0]}")
    for name, error in measured.failed.items():
        if log := getattr(error, "log", ""):
            console.note(f"{log}\n")
        console.note(f"{name} was not measured: {error}")


def without_nulls(facts: Any) -> Any:
    """Facts as JSON without nulls, which stand for what a server does not report."""
    if isinstance(facts, dict):
        return {
            name: without_nulls(value)
            for name, value in facts.items()
            if value is not None
        }
    if isinstance(facts, list):
        return [without_nulls(value) for value in facts]
    return facts


def show(evaluations: "list[Evaluation]") -> None:
    """Print one line per drafter and temperature; warnings on stderr."""
    from vlmdistill.pipelines.report.answer import answers
    from vlmdistill.pipelines.report.comparison import group
    from vlmdistill.pipelines.report.results import of_drafters

    groups = group(of_drafters(evaluations))
    _show_tables([result for alike in groups for result in alike.results])
    for alike in groups:
        for answer in answers(alike):
            console.echo(answer.text)
        for warning in alike.warnings:
            console.note(f"warning: {warning}")


def _show_tables(results: "Sequence[DrafterResult]") -> None:
    from vlmdistill.pipelines.report.tables import (
        COLUMNS,
        PARTS,
        budgets,
        calibrations,
        divided,
        responses,
    )

    speeds = ("speedup", "decode speedup", "cycle cost", "tokens/s")
    names = ("drafter", "T", "tau", *speeds)
    lines = []
    for result in results:
        cells = [COLUMNS[name](result) for name in names]
        identical = responses(result.figures.lossless, "")
        lines.append([*cells, identical])
    console.rows([*names, "identical"], lines)
    if part_rows := divided(results):
        console.echo("")
        console.rows(PARTS, part_rows)
    if budget_table := budgets(results):
        console.echo("")
        console.rows(budget_table[0], budget_table[1:])
        console.echo("")
    if calibration_table := calibrations(results):
        console.rows(calibration_table[0], calibration_table[1:])
        console.echo("")


def check_lossless(evaluations: "Sequence[Evaluation]") -> None:
    """Exit 1 if responses at temperature 0 are not the target's, or an evaluation fails its audit."""
    from vlmdistill.pipelines.bench.audit import failures

    audit_failures = [
        f"{evaluation.name}: {text}"
        for evaluation in evaluations
        for text in failures(evaluation)
    ]
    for text in audit_failures:
        console.note(f"error: {text}")
    lossy = [evaluation.name for evaluation in evaluations if not evaluation.lossless]
    if lossy:
        console.note(
            f"not lossless: responses at temperature 0 differ from the target's: {', '.join(lossy)}"
        )
    if lossy or audit_failures:
        raise typer.Exit(1)


def _facts(evaluation: "Evaluation") -> dict[str, Any]:
    """An evaluation as JSON, with figures instead of the numbers of each prompt, which are in its file."""
    import msgspec

    from vlmdistill.pipelines.bench.records import LABELS
    from vlmdistill.pipelines.bench.statistics import as_facts
    from vlmdistill.pipelines.report.results import DrafterResult

    temperatures = []
    for measurement in evaluation.temperatures:
        result = DrafterResult(evaluation, measurement)
        facts = {
            "temperature": measurement.temperature,
            **as_facts(result.figures),
        }
        facts["not_ranked"] = result.no_speedup
        for name, label in LABELS.items():
            facts[f"by_{name}"] = {
                value: as_facts(part.figures)
                for value, part in result.by(label).items()
            }
        temperatures.append(facts)
    return {
        **msgspec.to_builtins(evaluation),
        "prompts": {"count": len(evaluation.keys), "hash": evaluation.prompt_set},
        "temperatures": temperatures,
    }
