"""A drafter trained while its store is captured, and one trained afterwards: tau of both, seed by seed.

    python -m research.follow --runs runs --drafter msd --steps 400 --seeds 2

It needs `vlmdistill prompts demo` and `vlmdistill responses --limit N`. It captures anew for each seed, in
small shards.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capturer import CaptureSettings, capture
from vlmdistill.pipelines.data.features.store_part import StorePart
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.workspace.workspace import Workspace

MODEL = "demo"


def _train(
    workspace: Workspace, store: Path, name: str, seed: int, words: list[str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "vlmdistill", "train", *words, "--runs", str(workspace.root.parent)]
    command += ["--store", str(store), "--name", name, "--seed", str(seed), "--model", MODEL]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _steps(workspace: Workspace, name: str) -> int:
    """The optimizer steps that a run has recorded."""
    file = workspace.drafter(f"{name}.training") / "metrics.jsonl"
    return file.read_text().count("train/loss") if file.exists() else 0


def main() -> None:
    """Print a line of JSON for each drafter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--drafter", default="msd")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shard-bytes", type=int, default=1 << 21)
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    given = parser.parse_args()
    workspace = Workspace.of(MODEL, given.runs)
    prompts = prompt_table.load(workspace.prompts, MODEL, "train")
    settings = CaptureSettings(drafters=[given.drafter], shard_bytes=given.shard_bytes)
    words = [given.drafter, "--set", f"steps={given.steps}"]
    facts: dict[str, dict[str, object]] = {}
    for seed in range(given.seeds):
        store, name = workspace.root / f"followed{seed}-features", f"followed{seed}"
        following = _train(workspace, store, name, seed, [*words, "--follow"])
        captured = capture(
            prompts, workspace.responses, StorePart(store), MODEL, settings, WorkerOptions(workers=1)
        )
        facts[name] = {"samples": captured.samples, "steps_during_capture": _steps(workspace, name)}
        if following.wait():
            raise SystemExit(f"{name} was not trained")
        shards = describe(workspace.drafter(name))["training"]["shards"]
        facts[name] |= {"passes": sorted(shards.values())}
        facts[f"after{seed}"] = {}
        if _train(workspace, store, f"after{seed}", seed, words).wait():
            raise SystemExit(f"after{seed} was not trained")
    made = evaluate.evaluate(
        workspace,
        list(facts),
        evaluate.Settings(temperatures=(0.0,), limit=given.prompts, max_new_tokens=256),
    )
    show = partial(print, flush=True)
    for one in made:
        (greedy,) = one.temperatures
        show(json.dumps({"drafter": one.name, "tau": round(figures(greedy).tau, 3), **facts[one.name]}))


if __name__ == "__main__":
    main()
