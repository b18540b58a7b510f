"""Trains and evaluates all methods on `demo-small` over several seeds: `docs/measurements/results.md`.

    python -m research.methods [--seeds 3] [--jobs 2] [--limit 50] [--runs DIR] [--out FILE]

All methods share one store, recipe (half of the samples have images), number of steps, tree and prompts. The
seed changes weights, order and noise, not the prompts, responses and features. Each method is trained twice
more: for as many steps as take the CPU seconds of `eagle2`, and, with the first seed, by its paper's own
schedule of images and text. Finished work is not repeated. Each method is also decoded untrained on a few
prompts: its gain must come from training.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from research import say
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.cluster.processes import FunctionDone
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace

UNTRAINED = 4  # prompts for the untrained drafters
EQUAL = "eagle2"  # whose CPU seconds the others have


def main(arguments: Sequence[str] | None = None) -> None:
    """Train missing drafters, evaluate all in one process, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument("--limit", type=int, default=50, help="held-out prompts")
    parser.add_argument("--drafters", default="all")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument(
        "--out", type=Path, default=Path("docs/measurements/results.md")
    )
    options = parser.parse_args(arguments)
    names = (
        catalogue.NAMES
        if options.drafters == "all"
        else tuple(options.drafters.split(","))
    )
    workspace = Workspace.of("demo-small", options.runs)
    trained = [name for name in names if catalogue.is_trained(name)]
    flow.prepare(workspace, flow.Plan(drafters=names), say)

    pairs = [(name, seed) for seed in range(options.seeds) for name in trained]
    made = partial(train_missing, workspace, options.jobs)
    planned = partial(train.planned, workspace)
    folders = made(
        [
            planned(name, "demo", name=_folder(name, seed), seed=seed)
            for name, seed in pairs
        ]
    )
    paced = []
    for name, seed in ((name, seed) for name, seed in pairs if name != EQUAL):
        other, own = (
            cpu_seconds(workspace, [_folder(one, at) for at in range(options.seeds)])
            for one in (EQUAL, name)
        )
        share = statistics.mean(other) / statistics.mean(own)
        steps = f"steps={round(resolve(name, 'demo', ()).training.steps * share)}"
        paced.append(
            planned(
                name, "demo", [steps], name=_folder(name, seed, "-equal"), seed=seed
            )
        )
    folders += made(paced)
    folders += made(
        [
            planned(name, "demo-paper", name=_folder(name, 0, "-paper"))
            for name in trained
        ]
    )
    folders += [name for name in names if name not in trained]
    tree = resolve(EQUAL, "demo", ()).tree
    settings = evaluate.Settings(
        temperatures=(0.0, 1.0), limit=options.limit, trees=(tree,)
    )
    drafters = open_drafters(workspace, folders)
    reports = evaluate.kept(workspace, drafters, settings)
    reports = reports or evaluate.evaluate(
        workspace, drafters, settings, on_prompt=_progress
    )
    for warning in (
        text
        for ranking in rank(reports)
        for one in ranking.results
        for text in one.warnings
    ):
        say(f"warning: {warning}")
    first, of_folder = reports[0], {one.name: one for one in reports}
    results = {
        "conditions": {
            "hardware": first.hardware,
            "threads": first.threads,
            "dtype": first.dtype,
            "prompts": {"count": len(first.keys), "hash": first.prompt_set},
            "max_new_tokens": first.max_new_tokens,
        },
        "seeds": options.seeds,
        "methods": [
            _method(workspace, name, options.seeds, of_folder) for name in names
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    options.out.write_text(page(results))
    say(f"wrote {options.out} and {options.out.with_suffix('.json')}")


def _progress(done: int, total: int, remark: str = "") -> None:
    if done % 10 == 0 or done == total:
        say(f"decoded {done} of {total} {remark}")


def _folder(name: str, seed: int, kind: str = "") -> str:
    return f"{name}{kind}" if seed == 0 else f"{name}{kind}-seed{seed}"


def train_missing(
    workspace: Workspace, parallel: int, runs: Sequence[Run]
) -> list[str]:
    """Train the drafters that are not there, and keep what each took; the names of all."""

    def keep(run: Run, cost: FunctionDone) -> None:
        _cost(workspace, run.out.name).write_text(json.dumps(asdict(cost)))
        say(f"trained {run.out.name}, {cost.cpu_seconds:.0f} CPU-seconds")

    train.several([run for run in runs if not run.out.exists()], parallel, on_done=keep)
    return [run.out.name for run in runs]


def cpu_seconds(workspace: Workspace, names: Iterable[str]) -> list[float]:
    """What each training took, of those of which it was kept."""
    files = (_cost(workspace, name) for name in names)
    return [
        float(json.loads(file.read_text())["cpu_seconds"])
        for file in files
        if file.exists()
    ]


def _cost(workspace: Workspace, name: str) -> Path:
    return workspace.drafter(f"{name}.training") / "cost.json"


def _method(
    workspace: Workspace, name: str, seeds: int, reports: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """The results of one method; a list over seeds for each metric and temperature."""
    of_seeds = [
        reports[_folder(name, seed)]
        for seed in range(seeds)
        if _folder(name, seed) in reports
    ]
    result: dict[str, Any] = {
        "name": name,
        "tree": of_seeds[0].tree,
        "parameters": of_seeds[0].parameters,
        "steps": of_seeds[0].training.steps,
    }
    kinds = {"": range(seeds), "-equal": range(seeds), "-paper": range(1)}
    for trained, numbers in kinds.items():
        suffix = "" if name == EQUAL and trained == "-equal" else trained
        some_seeds = [
            reports[one]
            for seed in numbers
            if (one := _folder(name, seed, suffix)) in reports
        ]
        for kind in ("image", "text"):
            some = [
                one.temperatures[0].by(lambda row: row.kind).get(kind)
                for one in some_seeds
            ]
            result[f"tau@0 {kind}{trained}"] = [figures(one).tau for one in some if one]
    for temperature in (0, 1):
        measured = [
            figures(at)
            for one in of_seeds
            for at in one.temperatures
            if at.temperature == temperature
        ]
        result[f"tau@{temperature}"] = [one.tau for one in measured]
        result[f"accepted@{temperature}"] = [one.accepted for one in measured]
        result[f"speedup@{temperature}"] = [one.speedup for one in measured]
        result[f"decode_speedup@{temperature}"] = [
            one.decode_speedup for one in measured
        ]
        result[f"intervals@{temperature}"] = [
            {
                rate: [between.low, between.high]
                for rate, between in one.intervals.items()
            }
            for one in measured
        ]
        result[f"accounted@{temperature}"] = [
            min(one.accounted, one.plain_accounted) for one in measured
        ]
        result[f"alpha@{temperature}"] = measured[0].alpha
        result[f"lossless@{temperature}"] = [asdict(one.lossless) for one in measured]
    if catalogue.is_trained(name):
        result["cpu_seconds"] = cpu_seconds(
            workspace, [_folder(name, seed) for seed in range(seeds)]
        )
        result["untrained_tau"] = _untrained(workspace, name)
    return result


def _untrained(workspace: Workspace, name: str) -> float:
    """Tau at temperature 0 of the untrained method, on a few prompts."""
    target = load(workspace.model)
    torch.manual_seed(0)
    config = resolve(name, "demo", ())
    drafter: Proposer = catalogue.load(name)(
        config.model, target.info, target.head
    ).eval()
    gained = calls = 0
    for prompt in evaluate.held_out(workspace.prompts, UNTRAINED):
        encoded = target.encode(prompt.messages)
        cycles = list(
            speculate(target, drafter, encoded, tree=config.tree, max_new_tokens=128)
        )
        gained += sum(len(cycle.ids) for cycle in cycles[1:])
        calls += len(cycles) - 1
    return gained / max(1, calls)


def page(results: dict[str, Any]) -> str:
    """The results as Markdown: one row per method, the best first."""
    where = results["conditions"]
    rows = sorted(
        results["methods"], key=lambda one: -statistics.mean(one["tau@0 image"])
    )
    titles = "method, tau on images, on text, speedup, tau at T=1, speedup, equal CPU-s: images, text, CPU-s"
    lines = [f"| {' | '.join(titles.split(', '))} |", "|---" * 9 + "|"]
    for one in rows:
        cells = [
            f"`{one['name']}`",
            spread(one["tau@0 image"]),
            spread(one["tau@0 text"]),
            _rate(one, "speedup@0"),
            _rate(one, "tau@1"),
            _rate(one, "speedup@1"),
            spread(one["tau@0 image-equal"]) if one["tau@0 image-equal"] else "-",
            spread(one["tau@0 text-equal"]) if one["tau@0 text-equal"] else "-",
            spread(one["cpu_seconds"], 0) if one.get("cpu_seconds") else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    own = ["| method | tau on images | on text |", "|---" * 3 + "|"]
    for one in rows:
        if one["tau@0 image-paper"]:
            image, text = one["tau@0 image-paper"][0], one["tau@0 text-paper"][0]
            own.append(
                f"| `{one['name']}`, its paper's schedule | {image:.2f} | {text:.2f} |"
            )
    schedules = "\n".join(own)
    positions = max(len(one["alpha@0"]) for one in rows)
    numbers = " | ".join(str(position + 1) for position in range(positions))
    header = f"| method | {numbers} |\n{'|---' * (positions + 1)}|"
    alphas = "\n".join(
        f"| `{one['name']}` | {' | '.join(f'{value:.2f}' for value in one['alpha@0'])} |"
        for one in rows
    )
    counts = [verdict for one in rows for verdict in one["lossless@0"]]
    total = sum(sum(one.values()) for one in counts)
    same = sum(one["identical"] for one in counts)
    ties = sum(one["near_tie"] for one in counts)
    least = min(
        share
        for one in rows
        for temperature in (0, 1)
        for share in one[f"accounted@{temperature}"]
    )
    untrained = max(one.get("untrained_tau", 0) for one in rows)
    more = f" ({ties} of the others differ only from a near-tie on)" if ties else ""
    seeds = "One seed per method, with 95% intervals over prompts in parentheses"
    if results["seeds"] > 1:
        seeds = f"{results['seeds']} seeds per method: the mean, with minimum and maximum in parentheses"
    return f"""# Results on `demo-small`

`python -m research.methods` writes this page; the raw numbers are in [results.json](results.json).
{seeds};
{where["prompts"]["count"]} held-out prompts, {where["dtype"]}, {where["threads"]} thread(s),
{where["hardware"]}. One process decoded everything.

- **Recipe `demo`**: for all methods the same optimizer steps, tokens per step (visual tokens count for
  methods that
  read them), learning rate, data, share of samples with images (half), and tree, except `lookahead`, whose
  tree is its own window.
- **`tau`** counts the bonus token ([papers.md](../papers.md) says which papers do). Untrained, no method is
  above {untrained:.2f}.
- **CPU-s**: CPU seconds of one training, start-up included. **Equal CPU-s**: trained again for as many
  steps as take the CPU seconds of `{EQUAL}`.

{table}

Greedy responses identical to those of `model.generate`: {same} of {total}{more}. Times are from a clock
outside the decoders; the decoders' cycles account for at least {least:.2%} of them.

Each method by its paper's schedule of images and text, else alike (recipe `demo-paper`, seed 0, T=0):
schedules that end with images alone forget text.

{schedules}

Acceptance rate of the n-th token of the most likely chain, given the tokens before it (seed 0, T=0):

{header}
{alphas}

The target is small, and its images are simple, with nine visual tokens each. The ranking shows how the
methods learn under equal conditions, not how they rank on a large model or on long videos.
"""


def _rate(method: dict[str, Any], key: str) -> str:
    """A rate with its spread over seeds, or for a single seed with its interval over prompts."""
    if len(method[key]) > 1:
        return spread(method[key])
    rate, temperature = key.split("@")
    low, high = method[f"intervals@{temperature}"][0][rate]
    return f"{method[key][0]:.2f} ({low:.2f}-{high:.2f})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean of some values, with minimum and maximum in parentheses."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
