"""Writes the demo data to files and imports them as prompts, like a user's own files."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
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
from vlmdistill.pipelines.demo.clips import Clip, patches_for, random_clip
from vlmdistill.pipelines.demo.scenes import Scene, draw, random_scene
from vlmdistill.stores.progress import Progress, silent

_Side = tuple[Split, data.Side, tuple[int, int, int]]
Part = dict[str, Any]  # of a message: a text, an image or a video


@dataclass(frozen=True)
class DemoSize:
    """The numbers of demo prompts for training and evaluation."""

    images: int
    dialogues: int
    videos: int = 0
    held_out: tuple[int, int, int] = (40, 10, 0)
    """Images, dialogues and videos for evaluation."""
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
    """Write scenes, dialogues and videos below `folder` and import them into `out`.

    Training and evaluation share no image or video, and the embedded targets were trained
    on none of them. Videos need PyAV.
    """
    choices = choices or Choices()
    choices.check()
    trained = (amount.images, amount.dialogues, amount.videos)
    sides: tuple[_Side, ...] = (
        ("eval", "evaluation", amount.held_out),
        ("train", "drafter", trained),
    )
    summaries: list[ImportSummary] = []
    for side, split, (images, dialogues, videos) in sides:
        written = data.write(
            folder / side, images=images, dialogues=dialogues, seed=seed, split=split
        )
        files = [str(written.llava), str(written.sharegpt)]
        of_side = dataclasses.replace(choices, images=written.images, split=side)
        summary = import_prompts(files, out, choices=of_side, progress=progress)
        summaries.append(summary)
        if videos:
            tokens = amount.video_tokens
            films = data.write_videos(
                folder / side, videos=videos, seed=seed, tokens=tokens, split=split
            )
            frames = 2 * patches_for(tokens)
            of_films = dataclasses.replace(
                of_side, images=films.videos, fps=None, frames=frames
            )
            files = [str(films.llava)]
            summary = import_prompts(files, out, choices=of_films, progress=progress)
            summaries.append(summary)
    return _total(summaries)


def _total(summaries: Sequence[ImportSummary]) -> ImportSummary:
    """Several imports into one table as one."""
    total = summaries[0]
    for summary in summaries[1:]:
        total = dataclasses.replace(
            summary,
            added=total.added + summary.added,
            present=total.present + summary.present,
            outdated=total.outdated + summary.outdated,
            skipped=total.skipped + summary.skipped,
        )
    return total


EACH = 20  # prompts of each kind in the evaluation set `demo`
KINDS = {  # of questions about one image
    "description": ("describe", "list", "rows", "sizes", "reverse", "story"),
    "questions": ("where", "count"),
}


def evaluation_rows(folder: Path, *, videos: bool) -> Iterator[Row]:
    """Prompts of each kind in turn, of the split `evaluation`.

    Their images and videos are written below `folder`.
    """
    rng = random.Random("demo benchmark")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(EACH):
        for kind, content in _contents(folder, rng, number, videos=videos).items():
            row = {"messages": [{"role": "user", "content": content}]}
            yield Row(str(folder), f"demo/{kind}", number + 1, row)


def _contents(
    folder: Path, rng: random.Random, number: int, *, videos: bool
) -> dict[str, list[Part]]:
    """A message of each kind; the order of the kinds is part of the data."""
    contents: dict[str, list[Part]] = {}
    for kind, tasks in KINDS.items():
        scene, image = _draw_scene(folder / f"{kind}-{number}.png", rng)
        task = tasks[number % len(tasks)]
        question, _ = wording.ask(scene, task, rng)
        contents[kind] = [image, _text(question)]
    images: list[Part] = []
    for which in range(2):
        _, image = _draw_scene(folder / f"images-{number}-{which}.png", rng)
        images.append(image)
    contents["several images"] = [*images, _text("Describe the images.")]
    question, _ = chat(rng, "evaluation")[0]
    contents["text only"] = [_text(question)]
    if videos:
        clip = random_clip(rng, "evaluation")
        video = _film(clip, folder / f"video-{number}.mp4")
        question, _ = narration.rounds(clip, rng)[0]
        contents["video"] = [video, _text(question)]
    return contents


def _text(question: str) -> Part:
    return {"type": "text", "text": question}


def _draw_scene(file: Path, rng: random.Random) -> tuple[Scene, Part]:
    """A random scene, and its image as a part of a message."""
    scene = random_scene(rng, "evaluation")
    draw(scene).save(file)
    return scene, {"type": "image", "image": file.name}


def _film(clip: Clip, file: Path) -> Part:
    """A clip as a video, as a part of a message."""
    data.film(clip, file, DemoSize.video_tokens)
    frames = 2 * patches_for(DemoSize.video_tokens)
    return {"type": "video", "video": file.name, "frames": frames}
