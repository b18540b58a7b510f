"""Measures block drafters with and without visual context: `docs/measurements/blocks.md`.

    python -m research.blocks [--seeds 3] [--jobs 2] [--limit 49] [--runs DIR] [--out FILE]

Block drafters of two layers and the best drafters of one layer share the store, recipe (half of the samples
have images), number of steps and prompts of the embedded target `demo-small`. The seed changes weights, order
and noise. Finished trainings are not repeated.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research import say
from research.methods import cpu_seconds, spread, train_missing
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines import flow
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.report.results import DrafterResult
from vlmdistill.pipelines.train import planned
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace

BLOCK = ("layers=2", "stages.*.anchors=32")
ALL = ("context=all", "positions=expanded")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dflash-text": ("dflash", BLOCK),
    "dflash-all": ("dflash", (*BLOCK, *ALL)),
    "dspark-text": ("dspark", BLOCK),
    "dspark-all": ("dspark", (*BLOCK, *ALL)),
    **{name: (name, ()) for name in ("wren", "hass", "hivis", "eagle3")},
}
TREES = ("chain-4", "chain-7", "chain-8-0.2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, evaluate all in one process, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument("--limit", type=int, default=49, help="held-out prompts")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/blocks.md"))
    options = parser.parse_args(arguments)
    chosen = options.cases.split(",")
    workspace = Workspace.of("demo-small", options.runs)
    methods = list(dict.fromkeys(CASES[case][0] for case in chosen))
    flow.prepare(workspace, flow.Plan(drafters=methods), say)
    runs = [
        planned(
            workspace,
            CASES[case][0],
            "demo",
            CASES[case][1],
            name=f"{case}-s{seed}",
            seed=seed,
        )
        for case in chosen
        for seed in range(options.seeds)
    ]
    names = train_missing(workspace, options.jobs, runs)
    settings = evaluate.Settings(
        limit=options.limit, threads=1, trees=tuple(map(Tree.parse, TREES))
    )
    drafters = open_drafters(workspace, names)
    made = evaluate.evaluate(workspace, drafters, settings, title="blocks")
    results = {one.name: one for ranking in rank(made) for one in ranking.results}
    for warning in dict.fromkeys(
        text for one in results.values() for text in one.warnings
    ):
        say(f"warning: {warning}")
    first = made[0]
    facts = {
        "conditions": {
            "hardware": first.hardware,
            "threads": first.threads,
            "dtype": first.dtype,
            "prompts": len(first.keys),
        },
        "seeds": options.seeds,
        "rows": [
            _row(workspace, case, tree, options.seeds, results)
            for case in chosen
            for tree in TREES
        ],
    }
    options.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    options.out.write_text(page(facts))
    say(f"wrote {options.out}")


def _row(
    workspace: Workspace,
    case: str,
    tree: str,
    seeds: int,
    results: dict[str, DrafterResult],
) -> dict[str, Any]:
    """The figures of one case with one tree; a list over seeds for each."""
    names = [f"{case}-s{seed}" for seed in range(seeds)]
    found = [results[f"{name}@{tree}"] for name in names]
    kinds = [one.measurement.by(lambda row: row.kind) for one in found]
    return {
        "case": case,
        "tree": tree,
        "parameters": found[0].evaluation.parameters,
        **{
            f"tau {kind}": [figures(one[kind]).tau for one in kinds]
            for kind in kinds[0]
        },
        "speedup": [one.figures.speedup for one in found],
        "cycle": [one.figures.cycle_cost for one in found],
        "draft": [charts.milliseconds(one, charts.CYCLE)["draft"] for one in found],
        "identical": sum(one.figures.lossless.identical for one in found),
        "compared": sum(one.figures.prompts for one in found),
        "cpu_seconds": cpu_seconds(workspace, names),
    }


def page(facts: dict[str, Any]) -> str:
    """The results as Markdown: one row for each case and tree, the fastest first."""
    where = facts["conditions"]
    titles = "drafter, tree, tau on images, on text, speedup, cost of a cycle, drafting (ms), CPU-s"
    lines = [f"| {' | '.join(titles.split(', '))} |", "|---" * 8 + "|"]
    for one in sorted(facts["rows"], key=lambda row: -statistics.mean(row["speedup"])):
        cells = [f"`{one['case']}`", f"`{one['tree']}`"]
        cells += [
            spread(one[name])
            for name in ("tau image", "tau text", "speedup", "cycle", "draft")
        ]
        cells.append(spread(one["cpu_seconds"], 0) if one["cpu_seconds"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    identical, compared = (
        sum(one[name] for one in facts["rows"]) for name in ("identical", "compared")
    )
    return f"""# Block drafters

`python -m research.blocks` writes this page; the raw numbers are in [blocks.json](blocks.json). Target
`demo-small`, recipe `demo` (half of the samples with images) for all, {facts["seeds"]} seeds: the mean, with
minimum and maximum in parentheses; {where["prompts"]} held-out prompts at temperature 0, {where["dtype"]},
{where["threads"]} thread, {where["hardware"]}. One process decoded everything.

`dflash` and `dspark` have two layers here and train 32 positions of each sample in a step
({", ".join(f"`{one}`" for one in BLOCK)}). `-text` reads the target's states at text positions alone,
`-all` at visual ones too ({", ".join(f"`{one}`" for one in ALL)}). The cost of a cycle is in plain
steps, CPU-s are the CPU seconds of one training (-: not recorded).

{table}

Greedy responses identical to those of `model.generate`: {identical} of {compared}; the others differ only
from a near-tie on.

The images of `demo-small` have nine visual tokens each, so the page says whether hiding them costs tau;
what it saves on long inputs is on [another page](video.md).
"""


if __name__ == "__main__":
    main()
