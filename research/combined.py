"""The combination `wren` against the papers' methods, and without each of its ingredients.

    python -m research.combined [--model demo-small] [--length 0] [--seeds 5] [--steps 300] [--only NAME ...]

Settings are trained as in `research.claims`, with as many optimizer steps each, and printed with their CPU
seconds; `with a cell` takes 0.85 times the steps, since one costs more. Tau is counted without decoding
(`trial.py`), for chains of `--chain` tokens.
`--speed` decodes the held-out prompts with all drafters in turn, in one process, each with the tree that is
fastest for it on other prompts, or with every `--tree`.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from research.claimed import Setting
from research.trial import Trial, cost
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.bench.statistics import FEWEST_SEEDS, difference, figures
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace

WREN = Setting("wren")
DEMO = (
    "stages.text.epochs=1",
    "stages.multimodal.epochs=9",
)  # as the recipe `demo` divides the steps
SETTINGS = {
    "wren": WREN,
    "hivis": Setting("hivis"),
    "hass": Setting("hass", DEMO),
    "vispec": Setting("vispec", DEMO),
    "eagle3": Setting("eagle3", DEMO),
    "without the depths": WREN.but("depths=false"),
    "without the norms": WREN.but("normed=false"),
    "without sequential embeddings": WREN.but("threshold=0"),
    "with EAGLE's noise": WREN.but("noise=0.2"),
    "gradients cut between hops": WREN.but("detach=true"),
    "one hop alone": WREN.but("stages.stage2.epochs=0"),
}
CELL = (
    "cell=2",
    "stages.stage1.hops=4",
    "stages.stage2.hops=7",
    "stages.*.hop_decay=0.8",
)
PACE = 0.85  # steps with a cell for one without: 79 to 81% of its CPU seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, and print a table row for each setting as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo-small")
    parser.add_argument(
        "--length", type=int, default=0, help="visual tokens; 0: the held-out prompts"
    )
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument(
        "--only", action="append", help="a setting besides wren, may be repeated"
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=4,
        help="tokens of the chains of which tau is counted",
    )
    parser.add_argument(
        "--speed", action="store_true", help="decode the held-out prompts as well"
    )
    parser.add_argument(
        "--tree",
        action="append",
        help="to decode with, may be repeated; the fastest of each",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args(arguments)
    base = Workspace.of(options.model, options.runs)
    trial = Trial(
        base=base, seeds=options.seeds, steps=options.steps, limit=50, jobs=options.jobs
    )
    settings = {
        **SETTINGS,
        "with a cell": WREN.but(*CELL, f"steps={round(PACE * options.steps)}"),
    }
    chain = () if options.chain == 4 else (f"tree=chain-{options.chain}",)
    chosen = {
        name: settings[name].but(*chain)
        for name in ("wren", *(options.only or settings))
    }
    trial.prepare([*chosen.values()])
    first: list[Measurement] = []
    print(
        "| setting | tau | images | text | wren's is higher by | CPU-s |\n|---|---|---|---|---|---|"
    )
    for name, setting in chosen.items():
        trial.train([setting])
        trial.measure(setting, options.length)
        runs = trial.read(setting, options.length)
        found = [run.measured.measurement for run in runs]
        first = first or found
        cells = [f"{statistics.fmean(figures(one).tau for one in found):.2f}"]
        for kind in ("image", "text"):
            some = [one.by(lambda row: row.kind).get(kind) for one in found]
            cells.append(
                f"{statistics.fmean(figures(one).tau for one in some if one):.2f}"
                if all(some)
                else "-"
            )
        higher = "-" if name == "wren" else difference(first, found).text
        cells += [higher, cost(runs)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if not options.speed:
        return
    names = trial.all_folders([*chosen.values()])
    asked = evaluate.trees_of(options.tree or ["auto"])
    workspace = trial.at(0, "combined")
    made = evaluate.evaluate(
        workspace,
        open_drafters(workspace, names),
        replace(trial.evaluation(), trees=asked),
    )
    print(
        "\n| setting | trees | tau | speedup | wren's is higher by | times | identical |"
    )
    print("|---|---|---|---|---|---|---|")
    raced = [
        (name, seeds)
        for number in range(len(asked))
        for name, seeds in zip(
            chosen,
            trial.by_setting(made[number :: len(asked)], len(chosen)),
            strict=True,
        )
    ]
    for name, seeds in raced:
        if name == "wren":
            fastest = [side.temperatures[0] for side in seeds]
        found = [side.temperatures[0] for side in seeds]
        rates = [figures(one) for one in found]
        tau, speed = (
            statistics.fmean(r.tau for r in rates),
            statistics.fmean(r.speedup for r in rates),
        )
        between = difference(fastest, found, "speedup")
        same = f"{sum(r.lossless.identical for r in rates)} of {sum(r.lossless.total for r in rates)}"
        trees = ", ".join(dict.fromkeys(side.tree for side in seeds))
        cells = [
            trees,
            f"{tau:.2f}",
            f"{speed:.2f}",
            between.text,
            f"{1 + between.mean / speed:.2f}",
            same,
        ]
        print(f"| {name} | {' | '.join(cells)} |")
        for warning in (text for one in rates for text in one.warnings):
            print(f"warning: {name}: {warning}")


if __name__ == "__main__":
    main()
