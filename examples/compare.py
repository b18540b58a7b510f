"""Compare methods: several seeds of each under one recipe, and whether they differ by more than luck.

python -m examples.compare hivis msd --set steps=300

It needs prompts (`vlmdistill prompts`). Other options are those of `vlmdistill train`. `vlmdistill report`
then has a row for each method, with mean and spread over seeds and a paired test.
"""

import argparse
import sys

from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.statistics import FEWEST_SEEDS
from vlmdistill.pipelines.workspace.workspace import default_model


def compare(words: list[str]) -> int:
    """Capture, train, evaluate in one process, print the table over seeds; the first bad exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("methods", nargs="+", metavar="method")
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
    if len(set(given.methods)) < len(given.methods) or len(given.methods) < 2:
        parser.error("give at least two different methods")
    if odd := {"--name", "--seed"} & {word.partition("=")[0] for word in more}:
        parser.error(
            f"{odd.pop()} is set for each training: the number of seeds is --seeds"
        )
    where = ["--model", given.model, "--runs", given.runs]
    jobs = [
        (method, f"{method}.s{seed}", str(seed))
        for method in given.methods
        for seed in range(given.seeds)
    ]
    names = [name for _, name, _ in jobs]
    title = "-".join([*given.methods, "seeds"])
    steps = [
        ["features", "--for", ",".join(given.methods), *where],
        *(
            ["train", method, "--name", name, "--seed", seed, *more, *where]
            for method, name, seed in jobs
        ),
        ["eval", *names, "--limit", given.limit, "--name", title, *where],
        ["report", "--where", f"name = '{title}'", "--format", "md", *where],
    ]
    return next((status for step in steps if (status := main(step))), 0)


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
