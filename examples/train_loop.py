"""A training loop of one's own: what `vlmdistill train` does in one process, written flat.

python -m examples.train_loop wren runs/demo/features runs/demo/drafters/mine --steps 600

It needs a store (`vlmdistill features`). Left as it is, every loss and the weights are those of `vlmdistill
train wren --set steps=600`; change the data, the losses or the optimizer, and compare with `vlmdistill eval`.
It counts steps, not epochs.
"""

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch

import vlmdistill

Report = Callable[[int, float], object]


def draw(*place: int) -> int:
    """A random number of a place in the run: the same whenever the run comes there."""
    return int(
        hashlib.sha256(json.dumps(place, separators=(",", ":")).encode()).hexdigest()[
            :16
        ],
        16,
    )


def train_loop(
    method: str,
    store: str,
    out: str,
    recipe: str,
    settings: Mapping[str, Any],
    seed: int,
    report: Report,
) -> Path:
    """Train `method` on a store and write its folder; `report` gets each step and its loss."""
    data = vlmdistill.open_store(store)
    new = vlmdistill.new_drafter(
        method, data, recipe=recipe, settings=settings, seed=seed
    )
    drafter, training, stages = new.drafter, new.config.training, new.config.schedule
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter.to(device)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
    )
    features = new.config.model.needs(data.info)
    micro = ceil(training.batch_tokens / 8192)  # batches of one step
    ends = list(
        itertools.accumulate(stage.epochs for stage in stages)
    )  # of the stages, in epochs
    ends = [round(training.steps * end / ends[-1]) for end in ends]  # in steps
    step = 0
    for number, stage in enumerate(stages):
        first, last, epoch = step, ends[number], 0
        while step < last:
            # Images and text: their share may move over the stage.
            ramp = (step - first) / (last - first)
            order = draw(seed, number, epoch) % 2**31
            keys = new.samples[number].draw(stage, ramp, order)
            if not keys:
                raise vlmdistill.VlmdistillError(
                    f"{store} has no samples for the stage {stage.name}"
                )
            tokens = training.batch_tokens // micro
            batches = vlmdistill.iterate_batches(
                data, tokens=tokens, features=features, keys=keys, seed=order
            )
            while step < last and (group := list(itertools.islice(batches, micro))):
                # The learning rate rises, then falls to zero.
                part, warmup = (step - first) / (last - first), training.warmup
                rise, fall = (part + 1e-3) / (warmup + 1e-3), (1 - part) / (1 - warmup)
                for weights in optimizer.param_groups:
                    weights["lr"] = stage.learning_rate * (
                        rise if part < warmup else fall
                    )
                # The loss is the mean over all rows of the step.
                found = []
                for place, batch in enumerate(group):
                    generator = torch.Generator(device).manual_seed(
                        draw(seed, step, place, 0) % 2**63
                    )
                    inputs = batch.to(device, torch.float32)
                    noise, detach = training.noise, training.detach
                    losses = vlmdistill.unroll(
                        drafter, inputs, stage, generator, noise=noise, detach=detach
                    )
                    found.append(losses)
                rows = sum(len(losses.segment_R) for losses in found)
                for losses in found:
                    torch.autograd.backward(losses.total * (1 / max(rows, 1)))
                torch.nn.utils.clip_grad_norm_(drafter.parameters(), training.clip)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                sums_H3 = torch.stack(
                    [
                        torch.stack([score.sums for score in losses.scores])
                        for losses in found
                    ]
                ).sum(0)
                report(step, float((sums_H3[:, 0] / sums_H3[:, 2].clamp(min=1)).sum()))
            epoch += 1
    return new.save(out, steps=step)


def main(words: Sequence[str] | None = None) -> None:
    """Read the options, train, print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("method", help="such as wren")
    parser.add_argument("store", help="folder or URL of a feature store")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)

    def report(step: int, loss: float) -> None:
        sys.stdout.write(f"step {step}: loss {loss:.4f}\n")

    settings = {"steps": given.steps}
    try:
        train_loop(
            given.method,
            given.store,
            given.out,
            given.recipe,
            settings,
            given.seed,
            report,
        )
    except vlmdistill.VlmdistillError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
