"""The demo's prompts: files such as a user has, written to disk and imported like any others."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmdistill.pipelines.prompts import Choices, Split, Summary, import_prompts


@dataclass(frozen=True)
class Amount:
    """How many prompts there are to learn from, and how many are held out."""

    images: int
    dialogues: int
    videos: int = 0
    held_out: tuple[int, int, int] = (40, 10, 0)
    """The same three held out."""
    video_tokens: int = 72
    """About so many visual tokens a video."""


AMOUNTS = {"demo": Amount(1200, 240), "demo-video": Amount(300, 240, 600, (10, 10, 30))}
"""By embedded target."""


def import_demo(
    folder: Path,
    out: Path,
    amount: Amount = AMOUNTS["demo"],
    choices: Choices | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Summary:
    """Write scenes, dialogues and, if wanted, videos below `folder` and import them into `out`.

    What the two sides show is disjoint, and none of it has trained the embedded targets. Videos need PyAV.
    """
    from vlmdistill.pipelines.demo import data
    from vlmdistill.pipelines.demo.clips import patches_for

    choices = choices or Choices()
    sides: tuple[tuple[Split, data.Side, tuple[int, int, int]], ...] = (
        ("eval", "evaluation", amount.held_out),
        ("train", "drafter", (amount.images, amount.dialogues, amount.videos)),
    )
    done = []
    for side, split, (images, dialogues, videos) in sides:
        written = data.write(folder / side, images=images, dialogues=dialogues, seed=seed, split=split)
        shown = dataclasses.replace(choices, images=written.images, split=side)
        files = [str(written.llava), str(written.sharegpt)]
        done.append(import_prompts(files, out, choices=shown, progress=progress))
        if videos:
            tokens = amount.video_tokens
            films = data.write_videos(folder / side, videos=videos, seed=seed, tokens=tokens, split=split)
            shown = dataclasses.replace(shown, images=films.videos, fps=None, frames=2 * patches_for(tokens))
            done.append(import_prompts([str(films.llava)], out, choices=shown, progress=progress))
    return dataclasses.replace(
        done[-1],
        added=sum(one.added for one in done),
        present=sum(one.present for one in done),
        skipped=sum((one.skipped for one in done), Counter()),
    )
