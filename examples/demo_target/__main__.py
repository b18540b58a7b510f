"""Train an embedded target, and score it on held-out scenes and clips.

    python -m examples.demo_target [demo-small|demo|demo-video] --out DIR [--seed 0] [--json]

This takes about 40 minutes on one CPU core. After an interruption, the same command resumes the build.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmdistill.cli import console
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.stores.errors import FOR_USER, TargetError


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a target and print its scores; the exit status: 0 done, 1 failed, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=EMBEDDED,
        default="demo-small",
        help="demo is grown from demo-small, demo-video supports videos too; default: demo-small",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the new checkpoint"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    given = parser.parse_args(arguments)
    try:
        scores = _build(given.name, given.out, given.seed)
    except KeyboardInterrupt:
        console.note("interrupted: the same command continues from the last saved step")
        return 130
    except FOR_USER as error:
        console.note(f"error: {error}")
        return 1
    console.result({"out": str(given.out), **scores}, given.json)
    return 0


def _build(name: str, out: Path, seed: int) -> dict[str, Any]:
    from examples.demo_target.build import RECIPES, STATE, build, build_grown

    if (out / "model.safetensors").exists() and not (out / STATE).exists():
        raise TargetError(
            f"{out} already holds a checkpoint: empty it, or give another --out"
        )
    with console.progress(f"training the target {name}", "steps") as report:
        make = build_grown if name == "demo" else build
        return make(
            out,
            seed=seed,
            recipe=RECIPES[name],
            progress=lambda stage, step, steps, loss: report(
                step, steps, f"{stage}, loss {loss:.3f}"
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
