"""The demo's prompts: files such as a user has, written to disk and imported like any others."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from vlmdistill.pipelines.prompts import Choices, Summary, import_prompts

IMAGES, DIALOGUES = 1200, 240  # to learn from
HELD_OUT_IMAGES, HELD_OUT_DIALOGUES = 40, 10


def import_demo(
    folder: Path,
    out: Path,
    choices: Choices | None = None,
    *,
    images: int = IMAGES,
    dialogues: int = DIALOGUES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Summary:
    """Write scenes and dialogues below `folder` and import them into `out`.

    The scenes of the two sides are disjoint, and neither has trained the demo target.
    """
    from vlmdistill.pipelines.demo import data

    choices = choices or Choices()
    train = data.write(folder / "train", images=images, dialogues=dialogues, seed=seed, split="drafter")
    held = data.write(
        folder / "eval", images=HELD_OUT_IMAGES, dialogues=HELD_OUT_DIALOGUES, seed=seed, split="evaluation"
    )
    sides: tuple[tuple[data.Written, Literal["train", "eval"]], ...] = ((held, "eval"), (train, "train"))
    done = [
        import_prompts(
            [str(written.llava), str(written.sharegpt)],
            out,
            choices=dataclasses.replace(choices, images=written.images, split=side),
            progress=progress,
        )
        for written, side in sides
    ]
    return dataclasses.replace(
        done[-1],
        added=sum(one.added for one in done),
        present=sum(one.present for one in done),
        skipped=sum((one.skipped for one in done), Counter()),
    )
