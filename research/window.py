"""What an attention window costs a drafter and what it saves: `docs/measurements/window.md`.

    python -m research.window [--case wren ...] [--window 64 ...] [--trained 64 ...] [--length 500 ...]

Drafters of `research.video` are trained alike, without a window and with those of `--trained`. No weight
depends on the window, so one trained without is also decoded with every `--window`. Tau is counted
(`trial.py`) on the held-out prompts (length 0) and on longer and longer videos; `--speed` decodes the videos
of one length with the first seed, all windows in turn, and prints bytes and times. Rows are printed as soon
as they are measured; trainings and responses are kept.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from research.claimed import Setting
from research.methods import spread
from research.trial import Trial, count
from research.video import MIB, race, setting, timing
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.bench.statistics import difference, figures
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.store import Store


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing; print a table of tau, or of bytes and times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", help="of research.video, may be repeated"
    )
    parser.add_argument(
        "--window", action="append", type=int, help="to decode with, may be repeated"
    )
    parser.add_argument(
        "--trained",
        action="append",
        type=int,
        help="to train with as well, may be repeated",
    )
    parser.add_argument(
        "--length", action="append", type=int, help="visual tokens, may be repeated"
    )
    parser.add_argument("--speed", type=int, help="decode the videos of this length")
    parser.add_argument("--clips", type=int, default=8, help="videos of each length")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of all workspaces"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trial = Trial(
        base=Workspace.of("demo-video", given.runs),
        seeds=given.seeds,
        steps=given.steps,
        limit=50,
        jobs=given.jobs,
        clips=given.clips,
    )
    cases, windows = (
        given.case or ["wren", "eagle2", "dflash-all"],
        given.window or [1024, 256, 64, 16],
    )
    lengths, trained = given.length or [0, 500, 1500, 6000], given.trained or [64]
    unlimited = [setting(case) for case in cases]
    trial.prepare(unlimited)
    trial.train(unlimited)
    if given.speed:
        speed(trial, cases, [0, *windows], given.speed)
        return
    for length in lengths:
        trial.lengthen(length)
    stores = {length: trial.greedy(length) for length in lengths}
    print(
        "| drafter | trained with | decoded with | "
        + " | ".join(map(str, lengths))
        + " |"
    )
    print("|---" * (len(lengths) + 3) + "|")
    for case in cases:
        first: list[list[Measurement]] = []
        for with_one in [0, *trained]:
            one = windowed(case, with_one)
            trial.train([one])
            for window in [with_one] if with_one else [0, *windows]:
                found = [
                    tau(trial, one, length, window, stores[length])
                    for length in lengths
                ]
                first = first or found
                cells = [
                    spread([figures(seed).tau for seed in at])
                    + ("" if at is base else f", {difference(at, base).text}")
                    for at, base in zip(found, first, strict=True)
                ]
                row = [f"`{case}`", str(with_one or "-"), str(window or "-"), *cells]
                print(f"| {' | '.join(row)} |", flush=True)


def windowed(case: str, window: int) -> Setting:
    """A case trained with a window."""
    return setting(case).but(*([f"attention_window={window}"] if window else []))


def seeing(drafter: Proposer, window: int) -> Drafter:
    """The drafter with another window."""
    assert isinstance(drafter, Drafter)
    drafter.config = replace(drafter.config, attention_window=window)
    return drafter


def tau(
    trial: Trial, one: Setting, length: int, window: int, store: Store
) -> list[Measurement]:
    """The counts of every seed on the greedy responses to the prompts of a length, decoded with a window."""
    keys, head = (
        sorted(store.keys().intersection(trial.keys(length))),
        Head.of(store.head()),
    )
    folders = [trial.at(0).drafter(folder) for folder in trial.folders(one)]
    return [
        count(seeing(checkpoint.load(at, head, store.info), window), store, keys)
        for at in folders
    ]


def speed(
    trial: Trial, cases: Sequence[str], windows: Sequence[int], length: int
) -> None:
    """Decode the clips of a length with the first seed of each case, trained without a window."""
    trial.lengthen(length)
    workspace = trial.at(length)
    target = load(workspace.model)
    prompts = [
        target.encode(one.messages)
        for one in evaluate.held_out(workspace.prompts, trial.clips)
    ]
    print(
        f"{statistics.fmean(int(prompt.visual_L.sum()) for prompt in prompts):,.0f} visual tokens"
    )
    titles = "drafter, window, MiB, drafting (ms), to none, prefill to none, identical"
    print(f"| {' | '.join(titles.split(', '))} |\n{'|---' * 7}|")
    for case in cases:
        folder = workspace.drafter(trial.folders(setting(case))[0])
        drafters = {
            str(window or "-"): seeing(target.drafter(folder), window)
            for window in windows
        }
        of_plain, of_window = race(target, drafters, prompts)
        base = timing(of_plain, of_window["-"])
        for window, own in of_window.items():
            made = timing(of_plain, own)
            cells = [
                f"`{case}`",
                window,
                f"{made.kept / MIB:.2f}",
                f"{made.draft[1]:.2f}",
            ]
            cells += [f"{made.draft[1] / base.draft[1]:.2f}"]
            cells += [f"{made.drafter_prefill / base.drafter_prefill:.2f}"]
            print(
                f"| {' | '.join([*cells, f'{made.identical} of {made.clips}'])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
