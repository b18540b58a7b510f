"""Compare two methods: several seeds of each under one recipe, and whether they differ by more than luck.

python -m examples.compare hivis msd --set steps=300

It needs prompts (`vlmdistill prompts`). Other options are those of `vlmdistill train`.
"""

import argparse
import sys

from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.statistics import FEWEST_SEEDS, Rate, difference
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.workspace.workspace import Workspace, default_model

RATES: tuple[Rate, ...] = ("tau", "decode_speedup")


def compare(words: list[str]) -> int:
    """Capture, train, evaluate in one process, print the differences; the first bad exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("methods", nargs=2, metavar="method")
    parser.add_argument(
        "-m",
        "--model",
        default=default_model(),
        help="target model; default: %(default)s",
    )
    parser.add_argument(
        "--runs", default="runs", help="folder or URL of the workspaces; default: runs"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=FEWEST_SEEDS,
        help="of each method; fewer give no interval",
    )
    parser.add_argument("--limit", default="50", help="held-out prompts; default: 50")
    given, more = parser.parse_known_args(words)
    if len(set(given.methods)) < 2:
        parser.error(
            f"two different methods are compared, not {given.methods[0]} with itself"
        )
    if odd := {"--name", "--seed"} & {word.partition("=")[0] for word in more}:
        parser.error(
            f"{odd.pop()} is set for each training: the number of seeds is --seeds"
        )
    where = ["--model", given.model, "--runs", given.runs]
    names = {
        method: [f"{method}-{seed}" for seed in range(given.seeds)]
        for method in given.methods
    }
    jobs = [
        (method, name, seed)
        for method in names
        for seed, name in enumerate(names[method])
    ]
    steps = [
        ["features", "--for", ",".join(names), *where],
        *(
            ["train", method, "--name", name, "--seed", str(seed), *more, *where]
            for method, name, seed in jobs
        ),
        ["eval", *(name for _, name, _ in jobs), "--limit", given.limit, *where],
    ]
    if status := next((status for step in steps if (status := main(step))), 0):
        return status
    workspace = Workspace.of(given.model, given.runs)
    measured = {
        one.name: one.measurement
        for one in reversed(selection.read(workspace.reports).drafter_results)
    }
    one, other = ([measured[name] for name in of_seed] for of_seed in names.values())
    for rate in RATES:
        found = difference(one, other, rate)
        remark = "" if found.interval else " (too few seeds)"
        sys.stdout.write(f"{rate}, {' minus '.join(names)}: {found.text}{remark}\n")
    return 0


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
