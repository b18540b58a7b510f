"""All methods side by side on the demo target, over several seeds: `docs/results.md` and its numbers.

    python -m benchmarks.methods [--seeds 3] [--jobs 2] [--limit 50] [--runs DIR] [--out docs/results.md]

One store, one recipe, the same steps, tree and prompts for all. Another seed gives other weights, order and
noise; the prompts, responses and features are those of one run of the target. Whatever is done already is not
done again. Untrained selves are decoded on a few prompts: what a method gains, it has learnt.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters import catalogue, checkpoint
from vlmdistill.drafters.base import Proposer
from vlmdistill.drafters.decoding.generate import speculate
from vlmdistill.pipelines import evaluate, flow, train
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace import Workspace

UNTRAINED = 4  # prompts that the untrained selves are decoded on


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, evaluate everything in one process, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="drafters trained side by side")
    parser.add_argument("--limit", type=int, default=50, help="held-out prompts")
    parser.add_argument("--drafters", default="all")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args(arguments)
    names = catalogue.NAMES if options.drafters == "all" else tuple(options.drafters.split(","))
    workspace = Workspace.of("demo", options.runs)
    trained = [name for name in names if catalogue.is_trained(name)]
    flow.prepare(workspace, flow.Plan(drafters=names, recipe="demo"), _say, flow.silent)

    pairs = [(name, seed) for seed in range(options.seeds) for name in trained]
    jobs = [train.Job(name, _folder(name, seed), seed) for name, seed in pairs]
    missing = [job for job in jobs if not workspace.drafter(job.name).exists()]

    def keep(job: train.Job, cost: train.Cost) -> None:
        _cost(workspace, job.name).write_text(json.dumps(asdict(cost)))
        _say(f"trained {job.name}, {cost.cpu_seconds:.0f} CPU-seconds")

    train.several(workspace, missing, options.jobs, recipe="demo", on_done=keep)

    folders = [_folder(name, seed) for name, seed in pairs] + [n for n in names if n not in trained]
    tree = train.resolve("eagle2", "demo", ()).tree
    settings = evaluate.Settings(temperatures=(0.0, 1.0), limit=options.limit, max_new_tokens=512, tree=tree)
    reports = _measured(workspace, folders, settings)
    reports = reports or evaluate.evaluate(workspace, folders, settings, on_prompt=_progress)
    results = {
        "conditions": {
            key: reports[0][key] for key in ("hardware", "threads", "dtype", "prompts", "max_new_tokens")
        },
        "seeds": options.seeds,
        "methods": [
            _method(workspace, name, options.seeds, {one["name"]: one for one in reports}) for name in names
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    options.out.write_text(page(results))
    _say(f"wrote {options.out} and {options.out.with_suffix('.json')}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _progress(done: int, total: int, remark: str) -> None:
    if done % 10 == 0 or done == total:
        _say(f"decoded {done} of {total} {remark}")


def _measured(
    workspace: Workspace, folders: Sequence[str], settings: evaluate.Settings
) -> list[dict[str, Any]]:
    """The evaluations of all folders, if they are there, of these very drafters, and made in one run."""
    reports = []
    for name in folders:
        file = workspace.reports / f"{name}.json"
        if not file.exists():
            return []
        report = json.loads(file.read_text())
        now = checkpoint.describe(workspace.drafter(name))["training"].get("signature")
        count = len(evaluate.held_out(workspace.prompts, settings.limit))
        asked = (now, settings.max_new_tokens, count, list(settings.temperatures))
        temperatures = [one["temperature"] for one in report["temperatures"]]
        limits = report["max_new_tokens"], report["prompts"]["count"]
        if (report["training"].get("signature"), *limits, temperatures) != asked:
            return []
        reports.append(report)
    return reports if len({report["measured"] for report in reports}) == 1 else []


def _folder(name: str, seed: int) -> str:
    return name if seed == 0 else f"{name}-seed{seed}"


def _cost(workspace: Workspace, name: str) -> Path:
    return workspace.drafter(f"{name}.training") / "cost.json"


def _method(workspace: Workspace, name: str, seeds: int, reports: dict[str, Any]) -> dict[str, Any]:
    """All that is told of one method."""
    of_seeds = [reports[_folder(name, seed)] for seed in range(seeds) if _folder(name, seed) in reports]
    told: dict[str, Any] = {
        "name": name,
        "tree": of_seeds[0]["tree"],
        "parameters": of_seeds[0]["parameters"],
        "steps": of_seeds[0]["training"].get("steps", 0),
    }
    for place, temperature in enumerate((0, 1)):
        measured = [report["temperatures"][place] for report in of_seeds]
        for key in ("tau", "accepted", "speedup", "decode_speedup"):
            told[f"{key}@{temperature}"] = [one[key] for one in measured]
        told[f"alpha@{temperature}"] = measured[0]["alpha"]
        told[f"lossless@{temperature}"] = [one["lossless"] for one in measured]
    if catalogue.is_trained(name):
        costs = [_cost(workspace, _folder(name, seed)) for seed in range(seeds)]
        told["cpu_seconds"] = [json.loads(file.read_text())["cpu_seconds"] for file in costs if file.exists()]
        told["untrained_tau"] = _untrained(workspace, name)
    return told


def _untrained(workspace: Workspace, name: str) -> float:
    """Tau at temperature 0 of the method as it is before training, on a few prompts."""
    target = load(workspace.model)
    torch.manual_seed(0)
    config = train.resolve(name, "demo", ())
    drafter: Proposer = catalogue.load(name)(config, target.info, target.head).eval()
    gained = calls = 0
    for prompt in evaluate.held_out(workspace.prompts, UNTRAINED):
        encoded = target.encode(prompt.messages)
        cycles = list(speculate(target, drafter, encoded, tree=config.tree, max_new_tokens=128))
        gained += sum(len(cycle.ids) for cycle in cycles[1:])
        calls += len(cycles) - 1
    return gained / max(1, calls)


def page(results: dict[str, Any]) -> str:
    """The results as Markdown: one row a method, best first."""
    where = results["conditions"]
    rows = sorted(results["methods"], key=lambda one: -statistics.mean(one["tau@0"]))
    titles = "method, tau at T=0, accepted, speedup, tau at T=1, speedup, untrained tau, parameters, CPU-s"
    lines = [f"| {' | '.join(titles.split(', '))} |", "|---" * 9 + "|"]
    for one in rows:
        cells = [
            f"`{one['name']}`",
            _spread(one["tau@0"]),
            _spread(one["accepted@0"]),
            _spread(one["speedup@0"]),
            _spread(one["tau@1"]),
            _spread(one["speedup@1"]),
            f"{one['untrained_tau']:.2f}" if "untrained_tau" in one else "-",
            f"{one['parameters']:,}" if one["parameters"] else "-",
            _spread(one["cpu_seconds"], 0) if one.get("cpu_seconds") else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    places = max(len(one["alpha@0"]) for one in rows)
    header = f"| method | {' | '.join(str(place + 1) for place in range(places))} |\n{'|---' * (places + 1)}|"
    alphas = "\n".join(
        f"| `{one['name']}` | {' | '.join(f'{value:.2f}' for value in one['alpha@0'])} |" for one in rows
    )
    counts = [verdict for one in rows for verdict in one["lossless@0"]]
    total = sum(sum(one.values()) for one in counts)
    same = sum(one["identical"] for one in counts)
    ties = sum(one["near_tie"] for one in counts)
    more = f"; of the others, {ties} part where two tokens score alike to rounding" if ties else ""
    seeds = "One seed a method: no spread is known"
    if results["seeds"] > 1:
        seeds = f"{results['seeds']} seeds a method: the mean, and the least and the most in brackets"
    return f"""# Results on the demo target

Made by `python -m benchmarks.methods`, in one process for all decoding; raw numbers in
[results.json](results.json). {seeds};
{where["prompts"]["count"]} held-out prompts, {where["dtype"]}, {where["threads"]} thread(s),
{where["hardware"]}.
Recipe `demo`: the same number of optimizer steps, tokens a step, learning rate, data and tree for all, but
for `lookahead`, whose tree is its own window. `tau` counts the bonus token, `accepted` does not
([methods.md](methods.md) says which of them each paper prints). CPU-s is what one training took, its start
included; other work on the machine makes it more.

{table}

Greedy answers identical to those of `model.generate`: {same} of {total}{more}.

Acceptance of the n-th token of the best-guess chain, given the ones before it (seed 0, T=0):

{header}
{alphas}

The target is small, its pictures simple and its images nine visual tokens each: the order of the methods here
says how they learn under equal means, not how they rank on a large model or on long video.
"""


def _spread(values: Sequence[float], digits: int = 2) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
