"""Writes the demo data to files and imports them as prompts, like a user's own files."""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.data.prompts.importing import (
    Choices,
    ImportSummary,
    import_prompts,
)
from vlmdistill.pipelines.data.prompts.prompt_table import Split
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.demo import files as data
from vlmdistill.pipelines.demo import narration, wording
from vlmdistill.pipelines.demo.chats import chat
from vlmdistill.pipelines.demo.clips import patches_for, random_clip
from vlmdistill.pipelines.demo.scenes import draw, random_scene
from vlmdistill.stores.progress import Progress, silent


@dataclass(frozen=True)
class DemoSize:
    """The numbers of demo prompts for training and evaluation."""

    images: int
    dialogues: int
    videos: int = 0
    held_out: tuple[int, int, int] = (
        40,
        10,
        0,
    )  # images, dialogues and videos for evaluation
    video_tokens: int = 72  # of a video, approximately


# By embedded target.
AMOUNTS = {
    "demo": DemoSize(1200, 240),
    "demo-video": DemoSize(300, 240, 600, (10, 10, 30)),
}


def import_demo(
    folder: Path,
    out: Path,
    amount: DemoSize = AMOUNTS["demo"],
    choices: Choices | None = None,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> ImportSummary:
    """Write scenes, dialogues and videos below `folder` and import them into `out`. Videos need PyAV.

    Training and evaluation share no image or video, and the embedded targets were trained on none of them.
    """
    choices = choices or Choices()
    choices.check()
    sides: tuple[tuple[Split, data.Side, tuple[int, int, int]], ...] = (
        ("eval", "evaluation", amount.held_out),
        ("train", "drafter", (amount.images, amount.dialogues, amount.videos)),
    )
    done = []
    for side, split, (images, dialogues, videos) in sides:
        written = data.write(
            folder / side, images=images, dialogues=dialogues, seed=seed, split=split
        )
        shown = dataclasses.replace(choices, images=written.images, split=side)
        files = [str(written.llava), str(written.sharegpt)]
        done.append(import_prompts(files, out, choices=shown, progress=progress))
        if videos:
            tokens = amount.video_tokens
            films = data.write_videos(
                folder / side, videos=videos, seed=seed, tokens=tokens, split=split
            )
            shown = dataclasses.replace(
                shown, images=films.videos, fps=None, frames=2 * patches_for(tokens)
            )
            done.append(
                import_prompts(
                    [str(films.llava)], out, choices=shown, progress=progress
                )
            )
    return dataclasses.replace(
        done[-1],
        added=sum(one.added for one in done),
        present=sum(one.present for one in done),
        outdated=sum(one.outdated for one in done),
        skipped=sum((one.skipped for one in done), Counter()),
    )


EACH = 20  # prompts of each kind in the evaluation set `demo`
KINDS = {  # of questions about one image
    "description": ("describe", "list", "rows", "sizes", "reverse", "story"),
    "questions": ("where", "count"),
}


def evaluation_rows(folder: Path, *, videos: bool) -> Iterator[Row]:
    """Prompts of each kind in turn, of the split `evaluation`; their images and videos are below `folder`."""
    rng = random.Random("demo benchmark")
    folder.mkdir(parents=True, exist_ok=True)

    def image(name: str) -> tuple[Any, Any]:
        scene = random_scene(rng, "evaluation")
        draw(scene).save(folder / name)
        return scene, {"type": "image", "image": name}

    for number in range(EACH):
        shown: dict[str, tuple[list[Any], str]] = {}
        for kind, tasks in KINDS.items():
            scene, part = image(f"{kind}-{number}.png")
            shown[kind] = [part], wording.ask(scene, tasks[number % len(tasks)], rng)[0]
        parts = [image(f"images-{number}-{which}.png")[1] for which in range(2)]
        shown["several images"] = parts, "Describe the images."
        shown["text only"] = [], chat(rng, "evaluation")[0][0]
        if videos:
            clip, tokens = random_clip(rng, "evaluation"), DemoSize.video_tokens
            data.film(clip, folder / f"video-{number}.mp4", tokens)
            part = {
                "type": "video",
                "video": f"video-{number}.mp4",
                "frames": 2 * patches_for(tokens),
            }
            shown["video"] = [part], narration.rounds(clip, rng)[0][0]
        for kind, (files, question) in shown.items():
            content = [*files, {"type": "text", "text": question}]
            row = {"messages": [{"role": "user", "content": content}]}
            yield Row(str(folder), f"demo/{kind}", number + 1, row)
