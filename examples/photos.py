"""Train a drafter for your own photos, and measure it on some that it has not seen.

python -m examples.photos FOLDER --model qwen2.5-vl-7b

All other options are those of `vlmdistill run`, such as `--set steps=20000 --recipe fair`.
"""

import argparse
import sys

from vlmdistill.cli.main import main
from vlmdistill.pipelines.workspace.workspace import default_model


def photos(words: list[str]) -> int:
    """Import the folder and run all stages; the first bad exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="folder of images and videos")
    parser.add_argument(
        "-m",
        "--model",
        default=default_model(),
        help="target model; default: %(default)s",
    )
    parser.add_argument("--drafter", default="sparrow", help="method; default: sparrow")
    parser.add_argument(
        "--question", default="Describe the image.", help="what is asked about each"
    )
    parser.add_argument(
        "--runs", default="runs", help="folder or URL of the workspaces; default: runs"
    )
    given, more = parser.parse_known_args(words)
    where = ["--model", given.model, "--runs", given.runs]
    steps = (
        [
            "prompts",
            given.folder,
            "--ask",
            given.question,
            "--eval-share",
            "0.2",
            *where,
        ],
        ["run", "--drafters", given.drafter, *more, *where],
    )
    return next((status for step in steps if (status := main(step))), 0)


if __name__ == "__main__":
    sys.exit(photos(sys.argv[1:]))
