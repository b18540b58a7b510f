"""Measures drafters on the pretrained target `smollm2`: the tables of `docs/measurements/pretrained.md`.

    python -m research.pretrained [--questions 640] [--drafters wren,eagle2] [--steps 2000] [--runs DIR]

The target writes its own questions; every sixth shows a picture of the embedded targets, whose tokens carry
no information to it. All drafters share responses, recipe (`small`, with the data's own share of images) and
prompts. Finished work is not repeated. `--dtype` is that of the target and of training; each drafter is
decoded with the target in each of `--decoded`.

`--growth` trains its drafter again on fewer samples, in as many steps: how `tau` grows with data. `--whole`
trains its drafters again without a draft vocabulary. Tau of every training of an EAGLE-like drafter is also
counted on all held-out prompts without decoding (`research.trial`); `--temperatures ""` decodes nothing.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch

from research import say
from research.methods import cpu_seconds, train_missing
from research.trial import count, greedy_store
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Evaluation, Measurement
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.self_asked import questions
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

WHOLE = "whole"
"""In the names of drafters without a draft vocabulary."""
POINTS = 3
"""The amounts of data that a line needs."""
THREADS = 1
MOST_PROMPTS = 1000
"""Held-out prompts on which tau is counted."""
HELD_OUT = 0.1
"""The share of the samples that validates."""
EVERY = 6
"""One question of so many shows a picture."""
SETTINGS = {
    "dflash": ("layers=2", "stages.*.anchors=32"),
    "dspark": ("layers=2", "stages.*.anchors=32"),
}
WITHOUT_VOCABULARY = ("medusa",)
"""Drafters whose heads score all tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing of the data and drafters, evaluate, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=640)
    parser.add_argument(
        "--drafters",
        default="wren,eagle2,hass,eagle3,hivis,sparrow,vispec,medusa,dflash,dspark",
    )
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--whole", default="wren")
    parser.add_argument("--growth", default="wren")
    parser.add_argument("--shares", default="0.1,0.3", help="of the samples")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160, help="of a response")
    parser.add_argument("--eval-tokens", type=int, default=160, help="of a decoded one")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=50, help="held-out prompts")
    parser.add_argument("--tree", default="chain-3")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--decoded", default="float32,bfloat16")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("build/pretrained.md"))
    options = parser.parse_args(arguments)
    workspace = Workspace.of(packaged.NAME, options.runs)
    names = options.drafters.split(",")
    plan = flow.Plan(
        drafters=names,
        max_new_tokens=options.tokens,
        batch=32,
        workers=WorkerOptions(workers=1, load=Options(dtype=options.dtype)),
    )
    flow.prepare(workspace, plan, say)
    runs = [*_runs(workspace, names, options)]
    train_missing(workspace, options.jobs, runs)
    names = [run.out.name for run in runs]
    counts = _counts(workspace, names, options)
    evaluations = [
        evaluation
        for dtype in options.decoded.split(",")
        if options.temperatures
        for evaluation in _evaluations(workspace, names, dtype, options)
    ]
    facts = _facts(workspace, evaluations, counts, options)
    raw = json.dumps(asdict(facts), indent=1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(f"{raw}\n")
    options.out.write_text(page(facts))
    say(f"wrote {options.out}")


def _runs(
    workspace: Workspace, names: Sequence[str], options: argparse.Namespace
) -> Iterator[Run]:
    """The trainings: each drafter with each seed, then what differs from that."""
    for seed in range(options.seeds):
        for name in names:
            yield _run(workspace, name, f"{name}.s{seed}", options, seed=seed)
    for name in filter(None, options.whole.split(",")):
        yield _run(workspace, name, f"{name}-{WHOLE}", options, whole=True)
    for share in filter(None, options.shares.split(",")):
        view = _view(workspace, float(share))
        for name in filter(None, options.growth.split(",")):
            yield _run(workspace, name, f"{name}-{view}", options, view=view)


def _run(
    workspace: Workspace,
    drafter: str,
    name: str,
    options: argparse.Namespace,
    *,
    seed: int = 0,
    whole: bool = False,
    view: str | None = None,
) -> Run:
    """One training by the recipe `small`."""
    visual = f"{1 / EVERY:.2f}"
    settings = [
        f"steps={options.steps}",
        f"tree={options.tree}",
        f"stages.*.visual=[{visual},{visual}]",
        *SETTINGS.get(drafter, ()),
    ]
    if drafter not in WITHOUT_VOCABULARY and not whole:
        settings.append(f"draft_vocab={options.draft_vocab}")
    planned = train.planned(workspace, drafter, "small", settings, name=name, seed=seed)
    return replace(planned, held_out=HELD_OUT, dtype=options.dtype, view=view)


def _view(workspace: Workspace, share: float) -> str:
    """The name of a view of a share of the samples, which is made if it is not there."""
    store = Store.open(workspace.features)
    samples = round(share * len(store.index))
    name = f"{samples}samples"

    def keep(rows: pl.DataFrame) -> pl.Series:
        return (
            rows["key"].rank("ordinal") <= samples
        )  # keys are hashes: a random choice

    try:
        store.view(name)
    except StoreError:
        filter_store(store, name, filters=[Filter(f"over {samples} samples", keep)])
    return name


def import_questions(workspace: Workspace, count: int, dtype: str) -> None:
    """Let the target write its questions, show pictures with some, and import them as prompts."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    pictures = files.write(
        workspace.root / "demo-data", images=count // EVERY + 1, dialogues=0, seed=0
    ).images
    asked = questions(load(workspace.model, dtype=dtype), count)
    file = workspace.root / "questions.jsonl"
    lines = [json.dumps(row) for row in _rows(asked, sorted(pictures.glob("*.png")))]
    file.write_text("\n".join(lines) + "\n")
    import_prompts([str(file)], workspace.prompts, choices=Choices(eval_share=0.08))


def _rows(asked: Iterator[str], pictures: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Conversations of one question."""
    for number, question in enumerate(asked):
        content: list[dict[str, str]] = [{"type": "text", "text": question}]
        if number % EVERY == EVERY - 1:
            picture = pictures[number // EVERY]
            content.insert(0, {"type": "image", "image": str(picture.resolve())})
        yield {"messages": [{"role": "user", "content": content}]}


def _evaluations(
    workspace: Workspace, names: Sequence[str], dtype: str, options: Any
) -> list[Evaluation]:
    """Evaluations of all drafters in one process; existing ones if nothing has changed."""
    settings = evaluate.Settings(
        temperatures=tuple(map(float, options.temperatures.split(","))),
        max_new_tokens=options.eval_tokens,
        limit=options.limit,
        trees=(Tree.parse(options.tree),),
        threads=THREADS,
        how=Options(dtype=dtype),
    )
    drafters = open_drafters(workspace, names)
    kept = evaluate.kept(workspace, drafters, settings)
    return kept or evaluate.evaluate(workspace, drafters, settings, title=dtype)


@dataclass(frozen=True, kw_only=True)
class Count:
    """Tau of a training at temperature 0, counted without decoding."""

    drafter: str
    tau: float
    low: float
    high: float
    tau_by_kind: Mapping[str, float]


def _counts(
    workspace: Workspace, names: Sequence[str], options: argparse.Namespace
) -> list[Count]:
    """Those of EAGLE-like drafters, on the target's greedy responses to all held-out prompts."""
    store = _greedy(workspace, names, options)
    head = Head.of(store.head())
    keys = sorted(store.keys())
    rows = list[Count]()
    for name in names:
        drafter = checkpoint.load(workspace.drafter(name), head, store.info)
        if not isinstance(drafter, EagleDrafter):
            continue
        measurement = count(drafter, store, keys)
        result = figures(measurement)
        by_kind = measurement.by(lambda prompt: prompt.kind)
        rows.append(
            Count(
                drafter=name,
                tau=result.tau,
                low=result.intervals["tau"].low,
                high=result.intervals["tau"].high,
                tau_by_kind={kind: figures(part).tau for kind, part in by_kind.items()},
            )
        )
        say(f"counted {name}: tau {result.tau:.2f}")
    return rows


def _greedy(
    workspace: Workspace, names: Sequence[str], options: argparse.Namespace
) -> Store:
    """The target's greedy responses to the held-out prompts, with the features of all drafters."""
    return greedy_store(
        workspace,
        evaluate.held_out(workspace.prompts, MOST_PROMPTS, workspace.model),
        sorted({re.split(r"[.-]", name)[0] for name in names}),
        SamplingSettings(max_new_tokens=options.eval_tokens, temperature=0.0),
        WorkerOptions(workers=0, load=Options(dtype=options.dtype)),
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drafter at one temperature, with the target in one dtype; times in milliseconds."""

    drafter: str
    dtype: str
    temperature: float
    steps: int
    samples: int
    """Responses that it was trained on."""
    parameters: int
    cpu_seconds: float | None
    """Of the training."""
    tau: float
    tau_by_kind: Mapping[str, float]
    intervals: Mapping[str, Mapping[str, float]]
    alpha: Sequence[float]
    cycle: float
    """In plain steps."""
    draft: float
    verify: float
    plain: float
    speedup: float
    cpu_share: float | None
    identical: int
    near_tie: int
    compared: int
    warnings: Sequence[str]


def _row(workspace: Workspace, evaluation: Evaluation, measurement: Measurement) -> Row:
    result = figures(measurement)
    name = evaluation.name.partition("@")[0]
    by_kind = measurement.by(lambda prompt: prompt.kind)
    training = evaluation.training
    cycles = max(1, result.calls)
    lossless = asdict(result.lossless)
    return Row(
        drafter=name,
        dtype=evaluation.dtype,
        temperature=measurement.temperature,
        steps=training.steps,
        samples=training.samples,
        parameters=evaluation.parameters,
        cpu_seconds=next(iter(cpu_seconds(workspace, [name])), None),
        tau=result.tau,
        tau_by_kind={kind: figures(part).tau for kind, part in by_kind.items()},
        intervals={key: asdict(value) for key, value in result.intervals.items()},
        alpha=result.alpha,
        cycle=result.cycle_cost,
        draft=1e3 * result.budget.draft / cycles,
        verify=1e3 * result.budget.verify / cycles,
        plain=1e3 / result.plain_tokens_per_second,
        speedup=result.speedup,
        cpu_share=result.cpu_share,
        identical=lossless["identical"],
        near_tie=lossless["near_tie"],
        compared=sum(lossless.values()),
        warnings=result.warnings,
    )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The raw numbers of the page."""

    hardware: str
    threads: int
    tree: str
    prompts: int
    responses: int
    response_tokens: int
    rows: Sequence[Row]
    counts: Sequence[Count]


def _facts(
    workspace: Workspace,
    evaluations: Sequence[Evaluation],
    counts: Sequence[Count],
    options: argparse.Namespace,
) -> Facts:
    lengths = [len(response.ids) for response in dataset.read(workspace.responses)]
    return Facts(
        hardware=hardware.of(torch.device("cpu")).name,
        threads=THREADS,
        tree=options.tree,
        prompts=len(evaluations[0].keys) if evaluations else 0,
        responses=len(lengths),
        response_tokens=sum(lengths),
        rows=[
            _row(workspace, evaluation, measurement)
            for evaluation in evaluations
            for measurement in evaluation.temperatures
        ],
        counts=counts,
    )


def page(facts: Facts) -> str:
    """The results as Markdown."""
    parts = [
        f"""# A pretrained language model

`python -m research.pretrained` makes the data, trains, measures and writes these tables. The target is
`smollm2` (SmolLM2-135M-Instruct, four bits, dequantised). Its visual tokens carry no information: *on images*
is about context that is of no use.

{facts.responses} responses with {facts.response_tokens:,} tokens to questions that the target wrote; tree
`{facts.tree}`, {facts.threads} thread(s), {facts.hardware}.
"""
    ]
    if facts.rows:
        parts.append(_decoded(facts))
    if facts.counts:
        parts.append(_counted(facts.counts))
    return "\n".join(parts)


def _decoded(facts: Facts) -> str:
    """What was measured by decoding."""
    greedy = [row for row in facts.rows if row.temperature == 0]
    same = sum(row.identical for row in greedy)
    ties = sum(row.near_tie for row in greedy)
    total = sum(row.compared for row in greedy)
    shares = [row.cpu_share for row in facts.rows if row.cpu_share]
    return f"""{facts.prompts} held-out prompts:

{_table(facts.rows)}

Greedy responses identical to those of `model.generate`: {same} of {total} ({ties} of the others differ only
from a near-tie on). The process had {statistics.mean(shares):.0%} of a CPU: other programs ran beside it.

## How tau grows with data

{_growth(greedy, facts.response_tokens / facts.responses)}
"""


def _counted(counts: Sequence[Count]) -> str:
    """Tau of all trainings, without decoding."""
    lines = ["| drafter | tau, counted | on text | on images |", "|---|---|---|---|"]
    for row in sorted(counts, key=lambda row: -row.tau):
        cells = [
            f"`{row.drafter}`",
            f"{row.tau:.2f} ({row.low:.2f}-{row.high:.2f})",
            *_taus_by_kind(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["## Tau of all trainings, counted\n", *lines, ""])


TITLES = (
    "drafter",
    "target in",
    "T",
    "steps",
    "training, CPU-s",
    "tau",
    "on text",
    "on images",
    "acceptance by position",
    "cycle (plain steps)",
    "draft + verify (ms)",
    "plain step (ms)",
    "speedup",
)


def _table(rows: Sequence[Row]) -> str:
    """All rows, the best drafter of each temperature and dtype first."""
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for row in sorted(rows, key=lambda row: (row.temperature, row.dtype, -row.tau)):
        alpha = " ".join(f"{share:.2f}"[1:] for share in row.alpha[:3])
        cells = [
            f"`{row.drafter}`",
            row.dtype,
            f"{row.temperature:g}",
            f"{row.steps}",
            f"{row.cpu_seconds:.0f}" if row.cpu_seconds else "-",
            _with_interval(row, "tau"),
            *_taus_by_kind(row),
            alpha,
            f"{row.cycle:.2f}",
            f"{row.draft:.0f} + {row.verify:.0f}",
            f"{row.plain:.0f}",
            _with_interval(row, "speedup"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _taus_by_kind(row: Row | Count) -> list[str]:
    """The cells of tau on text and on images."""
    taus = [row.tau_by_kind.get(kind) for kind in ("text", "image")]
    return ["-" if tau is None else f"{tau:.2f}" for tau in taus]


def _with_interval(row: Row, figure: Literal["tau", "speedup"]) -> str:
    """A figure with its 95% interval over prompts."""
    text = f"{getattr(row, figure):.2f}"
    if interval := row.intervals.get(figure):
        text += f" ({interval['low']:.2f}-{interval['high']:.2f})"
    return text


def _growth(greedy: Sequence[Row], tokens_each: float) -> str:
    """Tau by the tokens that a drafter was trained on, in the first dtype, with a line through the points."""
    points = dict[str, list[Row]]()
    for row in sorted(greedy, key=lambda row: row.samples):
        drafter, _, variant = row.drafter.partition("-")
        if row.dtype == greedy[0].dtype and variant != WHOLE:
            points.setdefault(drafter.partition(".")[0], []).append(row)
    lines = [
        "| drafter | responses | their tokens | steps | tau |",
        "|---|---|---|---|---|",
    ]
    fits = list[str]()
    for drafter, rows in points.items():
        if len({row.samples for row in rows}) < POINTS:
            continue
        tokens = [row.samples * tokens_each for row in rows]
        for row, amount in zip(rows, tokens, strict=True):
            name = f"`{row.drafter}`"
            lines.append(
                f"| {name} | {row.samples} | {amount:,.0f} | {row.steps} | {row.tau:.2f} |"
            )
        fit = statistics.linear_regression(
            [math.log10(amount) for amount in tokens], [row.tau for row in rows]
        )
        million, ten = (fit.intercept + fit.slope * power for power in (6, 7))
        fits.append(
            f"`{drafter}`: a line through these points adds {fit.slope:.2f} for ten times the tokens. "
            f"Extended, it gives {million:.2f} at a million tokens and {ten:.2f} at ten million, in as "
            "many steps."
        )
    return "\n\n".join(["\n".join(lines), *fits])


if __name__ == "__main__":
    main()
