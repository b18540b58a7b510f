"""The demo's prompts: files such as a user has, written to disk and imported like any others."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vlmdistill.pipelines.prompts import Choices, Split, Summary, import_prompts

IMAGES, DIALOGUES = 1200, 240  # to learn from
HELD_OUT_IMAGES, HELD_OUT_DIALOGUES, HELD_OUT_VIDEOS = 40, 10, 10


def import_demo(
    folder: Path,
    out: Path,
    choices: Choices | None = None,
    *,
    images: int = IMAGES,
    dialogues: int = DIALOGUES,
    videos: int = 0,
    video_tokens: int = 72,
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Summary:
    """Write scenes, dialogues and, if wanted, videos below `folder` and import them into `out`.

    `videos` are of about `video_tokens` visual tokens each, and ten more are held out; they need PyAV. What
    the two sides show is disjoint, and none of it has trained the demo target, whose shipped weights have not
    learnt to describe videos at all.
    """
    from vlmdistill.pipelines.demo import data
    from vlmdistill.pipelines.demo.clips import patches_for

    choices = choices or Choices()
    sides: tuple[tuple[Split, data.Side, int, int, int], ...] = (
        ("eval", "evaluation", HELD_OUT_IMAGES, HELD_OUT_DIALOGUES, HELD_OUT_VIDEOS * (videos > 0)),
        ("train", "drafter", images, dialogues, videos),
    )
    done = []
    for side, split, some_images, some_dialogues, some_videos in sides:
        written = data.write(
            folder / side, images=some_images, dialogues=some_dialogues, seed=seed, split=split
        )
        shown = dataclasses.replace(choices, images=written.images, split=side)
        files = [str(written.llava), str(written.sharegpt)]
        done.append(import_prompts(files, out, choices=shown, progress=progress))
        if some_videos:
            films = data.write_videos(
                folder / side, videos=some_videos, seed=seed, tokens=video_tokens, split=split
            )
            frames = 2 * patches_for(video_tokens)
            shown = dataclasses.replace(shown, images=films.videos, fps=None, frames=frames)
            done.append(import_prompts([str(films.llava)], out, choices=shown, progress=progress))
    return dataclasses.replace(
        done[-1],
        added=sum(one.added for one in done),
        present=sum(one.present for one in done),
        skipped=sum((one.skipped for one in done), Counter()),
    )
