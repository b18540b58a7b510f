"""The combination `wren` against the papers' methods, and without each of its ingredients.

    python -m benchmarks.combined [--model demo] [--length 0] [--seeds 5] [--steps 300] [--only NAME ...]

Settings are trained as in `benchmarks.claims`, with as many optimizer steps each, and printed with their CPU
seconds. Tau is counted without decoding: at temperature 0 a chain commits what the target says, however it
was drafted. So a training forward pass over the target's greedy responses to the held-out prompts says which
guesses are right after every token, and a walk over these tokens takes the cycles that decoding takes.
`--speed` decodes the held-out prompts with the first seed of every setting, side by side.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import say
from benchmarks.claimed import Setting
from benchmarks.claims import Trial, cost_file
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.drafters.training.unroll import supervised, unroll
from vlmdistill.pipelines import flow
from vlmdistill.pipelines.evaluation import evaluate
from vlmdistill.pipelines.evaluation.records import (
    Decoding,
    Measurement,
    PromptKind,
    PromptResult,
    chain_counts,
)
from vlmdistill.pipelines.evaluation.statistics import FEWEST_SEEDS, advantage, difference, figures
from vlmdistill.pipelines.features.capturer import CaptureSettings
from vlmdistill.pipelines.prompts import prompt_table
from vlmdistill.pipelines.responses.dataset import SamplingSettings
from vlmdistill.pipelines.runtime.workers import WorkerOptions
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.store import Store

WREN = Setting("wren")
DEMO = ("stages.text.epochs=1", "stages.multimodal.epochs=9")  # as the recipe `demo` divides the steps
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


def greedy(trial: Trial, length: int, names: Sequence[str]) -> Store:
    """The target's greedy responses to the held-out prompts, or to clips of a length, with their features."""
    trial.lengthen(length)
    root = trial.at(length).root / "greedy"
    flow.capture_features(
        trial.base.model,
        prompt_table.load(trial.at(length).prompts, trial.base.model, "eval"),
        root / "responses",
        str(root / "features"),
        CaptureSettings(drafters=names),
        WorkerOptions(),
        sampling=SamplingSettings(max_new_tokens=256, temperature=0.0),
    )
    return Store.open(str(root / "features"))


@torch.no_grad()
def measure(drafter: Proposer, store: Store, guesses: int) -> Measurement:
    """The counts of decoding every response of a store with chains of `guesses` tokens; no seconds."""
    assert isinstance(drafter, Drafter)
    stage = Stage(name="probe", hops=guesses)
    rows = []
    for key in sorted(store.keys()):
        (samples,) = Epoch(store, drafter.config.needs(store.info), keys=[key], token_budget=1)
        batch = as_batch(samples, store.provenance.dtype).to("cpu", torch.float32)
        agree_HR = torch.stack([one.agree_R & one.count_R for one in unroll(drafter, batch, stage).scores])
        right_R = agree_HR.cumprod(0).sum(0).tolist()
        assert len(right_R) == int(supervised(batch).sum())
        plain, own = walk(right_R, guesses)
        kind: PromptKind = "image" if len(batch.start_M) else "text"
        rows.append(PromptResult(key=key, dataset="", kind=kind, plain=plain, drafted=own))
    return Measurement(temperature=0.0, prompts=tuple(rows))


def walk(right: Sequence[int], guesses: int) -> tuple[Decoding, Decoding]:
    """Plain decoding of a response and that with a chain, by the number of right guesses after each token."""
    chains, at, end = list[tuple[int, int]](), 0, len(right)
    while at < end:
        chains.append((right[at], min(guesses, end - at)))
        at += right[at] + 1
    tried, accepted = chain_counts(chains)
    plain = Decoding(tokens=end + 1, calls=end, accepted=0, seconds=0, prefill_seconds=0, decode_seconds=0)
    own = Decoding(
        tokens=end + 1,
        calls=len(chains),
        accepted=sum(taken for taken, _ in chains),
        seconds=0,
        prefill_seconds=0,
        decode_seconds=0,
        chain_tried=tried,
        chain_accepted=accepted,
    )
    return plain, own


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, and print a table row for each setting as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--length", type=int, default=0, help="visual tokens; 0: the held-out prompts")
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="drafters trained in parallel")
    parser.add_argument("--only", action="append", help="a setting besides wren, may be repeated")
    parser.add_argument("--speed", action="store_true", help="decode the held-out prompts as well")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args(arguments)
    base = Workspace.of(options.model, options.runs)
    trial = Trial(base=base, seeds=options.seeds, steps=options.steps, limit=50, jobs=options.jobs)
    chosen = {name: SETTINGS[name] for name in ("wren", *(options.only or SETTINGS))}
    names = tuple(dict.fromkeys(one.drafter for one in SETTINGS.values()))  # one store holds all features
    flow.prepare(base, flow.Plan(drafters=names), say, flow.silent)
    store = greedy(trial, options.length, names)
    frozen, made = store.head(), trial.at(0)
    head = Head(*(as_torch(table, frozen.dtype).float() for table in (frozen.embed_VD, frozen.lm_head_VD)))
    first: list[Measurement] = []
    print("| setting | tau | images | text | wren's is higher by | CPU-s |\n|---|---|---|---|---|---|")
    for name, setting in chosen.items():
        trial.train([setting])
        folders = trial.folders(setting)
        loaded = (checkpoint.load(made.drafter(folder), head, store.info) for folder in folders)
        found = [measure(drafter, store, options.guesses) for drafter in loaded]
        costs = [json.loads(cost_file(made, folder).read_text())["cpu_seconds"] for folder in folders]
        first = first or found
        cells = [f"{statistics.fmean(figures(one).tau for one in found):.2f}"]
        for kind in ("image", "text"):
            some = [one.by(lambda row: row.kind).get(kind) for one in found]
            cells.append(
                f"{statistics.fmean(figures(one).tau for one in some if one):.2f}" if all(some) else "-"
            )
        higher = "-" if name == "wren" else difference(first, found).text
        cells += [higher, f"{statistics.fmean(costs):.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if not options.speed:
        return
    sides = evaluate.evaluate(made, [trial.folders(one)[0] for one in chosen.values()], trial.evaluation())
    print("\n| setting | tau | speedup | wren's is times | identical |\n|---|---|---|---|---|")
    for name, side in zip(chosen, sides, strict=True):
        rates = figures(side.temperatures[0])
        times = advantage(sides[0].temperatures[0], side.temperatures[0])
        text = f"{figures(sides[0].temperatures[0]).speedup / rates.speedup:.2f}"
        if times:
            text += f" ({times.low:.2f} to {times.high:.2f})"
        same = f"{rates.lossless.identical} of {rates.lossless.total}"
        print(f"| {name} | {rates.tau:.2f} | {rates.speedup:.2f} | {text} | {same} |")


if __name__ == "__main__":
    main()
