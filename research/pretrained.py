"""Measures drafters on the pretrained target `smollm2`: `docs/measurements/pretrained.md`.

    python -m research.pretrained [--questions 640] [--drafters wren,eagle2] [--steps 2000] [--runs DIR]

The target writes its own questions; every sixth shows a picture of the embedded targets, whose tokens carry
no information to it. All drafters share responses, recipe (`small`, with the data's own share of images) and
prompts. Finished work is not repeated. `--dtype` is that of the target and of training; each drafter is
decoded with the target in each of `--decoded`.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from research import say
from research.methods import cpu_seconds, train_missing
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Evaluation, Measurement
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.self_asked import questions
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace

EVERY = 6
"""One question of so many shows a picture."""
SETTINGS = {
    "eagle3": ("draft_vocab=8192",),
    "dspark": ("layers=2", "stages.*.anchors=32"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing of the data and drafters, evaluate, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=640)
    parser.add_argument("--drafters", default="wren,eagle2,eagle3,sparrow,hivis,dspark")
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
    parser.add_argument(
        "--out", type=Path, default=Path("docs/measurements/pretrained.md")
    )
    options = parser.parse_args(arguments)
    workspace = Workspace.of(packaged.NAME, options.runs)
    names = options.drafters.split(",")
    if not workspace.prompts.exists():
        import_questions(workspace, options.questions, options.dtype)
    plan = flow.Plan(
        drafters=names,
        max_new_tokens=options.tokens,
        batch=32,
        workers=WorkerOptions(workers=1, load=Options(dtype=options.dtype)),
    )
    flow.prepare(workspace, plan, say)
    runs = [
        replace(
            train.planned(
                workspace,
                name,
                "small",
                (
                    f"steps={options.steps}",
                    f"tree={options.tree}",
                    f"stages.*.visual=[{1 / EVERY:.2f},{1 / EVERY:.2f}]",
                    *SETTINGS.get(name, ()),
                ),
                name=name,
            ),
            held_out=0.1,
            dtype=options.dtype,
        )
        for name in names
    ]
    train_missing(workspace, options.jobs, runs)
    evaluations = [
        evaluation
        for dtype in options.decoded.split(",")
        for evaluation in _evaluations(workspace, names, dtype, options)
    ]
    facts = _facts(workspace, evaluations)
    options.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    options.out.write_text(page(facts))
    say(f"wrote {options.out}")


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
        threads=1,
        how=Options(dtype=dtype),
    )
    drafters = open_drafters(workspace, names)
    kept = evaluate.kept(workspace, drafters, settings)
    return kept or evaluate.evaluate(workspace, drafters, settings, title=dtype)


def _facts(workspace: Workspace, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The raw numbers of the page."""
    first = evaluations[0]
    responses = list(dataset.read(workspace.responses))
    return {
        "hardware": first.hardware,
        "threads": first.threads,
        "tree": str(first.tree),
        "prompts": len(first.keys),
        "responses": len(responses),
        "response_tokens": sum(len(row.ids) for row in responses),
        "rows": [
            _row(workspace, evaluation, measurement)
            for evaluation in evaluations
            for measurement in evaluation.temperatures
        ],
    }


def _row(
    workspace: Workspace, evaluation: Evaluation, measurement: Measurement
) -> dict[str, Any]:
    """One drafter at one temperature, with the target in one dtype."""
    found = figures(measurement)
    cycles = max(1, found.calls)
    phases = ("draft", "verify", "accept", "other")
    by_kind = measurement.by(lambda row: row.kind)
    return {
        "drafter": evaluation.name.partition("@")[0],
        "dtype": evaluation.dtype,
        "temperature": measurement.temperature,
        "steps": evaluation.training.steps if evaluation.training else 0,
        "parameters": evaluation.parameters,
        "cpu_seconds": cpu_seconds(workspace, [evaluation.name.partition("@")[0]]),
        "tau": {kind: figures(one).tau for kind, one in by_kind.items()},
        "all": found.tau,
        "intervals": {name: asdict(one) for name, one in found.intervals.items()},
        "alpha": found.alpha,
        "cycle": found.cycle_cost,
        "ms": {
            phase: 1e3 * max(0.0, getattr(found.budget, phase)) / cycles
            for phase in phases
        },
        "plain_ms": 1e3 / found.plain_tokens_per_second,
        "speedup": found.speedup,
        "cpu_speedup": found.cpu_speedup,
        "cpu_share": found.cpu_share,
        "lossless": asdict(found.lossless),
        "warnings": found.warnings,
    }


def page(facts: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = facts["rows"]
    titles = (
        "drafter, target in, T, tau on text, on images, acceptance by position, "
        "cycle (plain steps), draft + verify (ms), plain step (ms), speedup, CPU speedup"
    )
    columns = titles.split(", ")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in sorted(
        rows, key=lambda row: (row["temperature"], row["dtype"], -row["all"])
    ):
        taus = [
            f"{row['tau'][kind]:.2f}" if kind in row["tau"] else "-"
            for kind in ("text", "image")
        ]
        alpha = " ".join(f"{share:.2f}"[1:] for share in row["alpha"][:3])
        ms = row["ms"]
        cells = [
            f"`{row['drafter']}`",
            row["dtype"],
            f"{row['temperature']:g}",
            *taus,
            alpha,
            f"{row['cycle']:.2f}",
            f"{ms['draft']:.0f} + {ms['verify']:.0f}",
            f"{row['plain_ms']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['cpu_speedup']:.2f}" if row["cpu_speedup"] else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    costs = {row["drafter"]: (row["steps"], row["cpu_seconds"]) for row in rows}
    trained = "; ".join(
        f"`{name}` {steps} steps, {seconds[0]:.0f} CPU-s"
        for name, (steps, seconds) in costs.items()
        if seconds
    )
    greedy = [row["lossless"] for row in rows if row["temperature"] == 0]
    same = sum(one["identical"] for one in greedy)
    ties = sum(one["near_tie"] for one in greedy)
    total = sum(sum(one.values()) for one in greedy)
    share = statistics.mean(row["cpu_share"] for row in rows if row["cpu_share"])
    return f"""# A pretrained language model

`python -m research.pretrained` makes the data, trains, measures and writes this page; the raw numbers are in
[pretrained.json](pretrained.json). The target is `smollm2` (SmolLM2-135M-Instruct, four bits, dequantised).
Its visual tokens carry no information: *on images* is about context that is of no use.

{facts["responses"]} responses with {facts["response_tokens"]:,} tokens to questions that the target wrote;
one seed; {facts["prompts"]} held-out prompts, tree `{facts["tree"]}`, {facts["threads"]} thread(s),
{facts["hardware"]}. Trained: {trained}.

{table}

Greedy responses identical to those of `model.generate`: {same} of {total} ({ties} of the others differ only
from a near-tie on). The process had {share:.0%} of a CPU: other programs ran beside it.
"""


if __name__ == "__main__":
    main()
