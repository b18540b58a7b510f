"""Writes demo data as a user would have it: PNG and MP4 files, LLaVA JSON and ShareGPT JSON.

Scenes and clips are split by a hash of their content (`scenes.SPLITS`). The target was
trained on the split `target`; files are drawn from `drafter` or `evaluation`. So neither
the target nor a drafter has been trained on an image or video of `evaluation`.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from vlmdistill.pipelines.demo import narration, wording
from vlmdistill.pipelines.demo.chats import chat
from vlmdistill.pipelines.demo.clips import (
    SECONDS,
    Clip,
    frames,
    patches_for,
    random_clip,
)
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS, Scene, draw, random_scene
from vlmdistill.stores.errors import DataError

Side = Literal["drafter", "evaluation"]
Medium = TypeVar("Medium", Scene, Clip)


@dataclass(frozen=True)
class Written:
    """The files of `write`."""

    images: Path  # folder of PNG files; the paths in `llava` are relative to it
    llava: Path
    """LLaVA JSON: conversations of one or two rounds, the image in the first."""
    sharegpt: Path  # ShareGPT JSON: conversations without an image


@dataclass(frozen=True)
class WrittenVideos:
    """The files of `write_videos`."""

    videos: Path
    """Folder of MP4 files of eight seconds; the paths in `llava` are relative to it."""
    llava: Path
    """LLaVA JSON: conversations of one or two rounds, the video in the first."""


def write(
    folder: Path, *, images: int, dialogues: int, seed: int, split: Side = "drafter"
) -> Written:
    """Write conversations about `images` images, and `dialogues` conversations without one.

    A seed fixes every byte. One call draws no image twice, and writes one dialogue per
    first question. The responses are reference texts, not the target's.
    """
    rng = random.Random(f"demo data {split} {seed}")
    written = Written(
        images=folder / "images",
        llava=folder / "demo-scenes.json",
        sharegpt=folder / "demo-chats.json",
    )
    written.images.mkdir(parents=True, exist_ok=True)
    scenes = _distinct(images, lambda: random_scene(rng, split))
    records = []
    for number, scene in enumerate(scenes):
        name = f"{split}-{seed}-{number:06d}"
        draw(scene).save(written.images / f"{name}.png")
        rounds = wording.rounds(scene, rng)
        records.append(_record(name, "image", f"{name}.png", rounds))
    _write_json(written.llava, records)
    by_question: dict[str, dict[str, Any]] = {}
    for index in range(dialogues):
        turns = _turns(chat(rng, split))
        name = f"{split}-{seed}-text-{index:06d}"
        record = {"id": name, "conversations": turns}
        by_question.setdefault(turns[0]["value"], record)
    _write_json(written.sharegpt, list(by_question.values()))
    return written


def write_videos(
    folder: Path, *, videos: int, seed: int, tokens: int = 72, split: Side = "drafter"
) -> WrittenVideos:
    """Write `videos` conversations about one clip each; a seed fixes clips and texts.

    All frames of a file make about `tokens` visual tokens. The default is two frames per
    second, the rate at which the demo target samples. DataError without PyAV.
    """
    rng = random.Random(f"demo videos {split} {seed}")
    written = WrittenVideos(videos=folder / "videos", llava=folder / "demo-videos.json")
    written.videos.mkdir(parents=True, exist_ok=True)
    clips = _distinct(videos, lambda: random_clip(rng, split))
    records = []
    for number, clip in enumerate(clips):
        name = f"{split}-{seed}-{tokens}-{number:06d}"
        film(clip, written.videos / f"{name}.mp4", tokens)
        rounds = narration.rounds(clip, rng)
        records.append(_record(name, "video", f"{name}.mp4", rounds))
    _write_json(written.llava, records)
    return written


def film(clip: Clip, path: Path, tokens: int) -> Path:
    """Write a clip as a lossless MP4 file whose frames make about `tokens` visual tokens."""
    try:
        import av
    except ImportError:
        raise DataError(
            f"writing the video {path} needs PyAV: pip install 'vlmdistill[video]'"
        ) from None
    count = 2 * patches_for(tokens)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264rgb", rate=Fraction(count, SECONDS), options={"qp": "0"}
        )
        stream.width = stream.height = SIDE_PIXELS
        stream.pix_fmt = "rgb24"
        for image in frames(clip, count):
            frame_HWC = np.asarray(image)
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _distinct(count: int, draw_one: Callable[[], Medium]) -> Iterator[Medium]:
    """`count` different draws.

    Each is drawn on demand: the texts take their random numbers in between.
    """
    seen: set[Medium] = set()
    while len(seen) < count:
        medium = draw_one()
        if medium not in seen:
            seen.add(medium)
            yield medium


def _record(
    name: str, kind: str, file: str, rounds: list[tuple[str, str]]
) -> dict[str, Any]:
    turns = _turns(rounds)
    question = turns[0]["value"]
    turns[0]["value"] = f"<{kind}>\n{question}"
    return {"id": name, kind: file, "conversations": turns}


def _turns(rounds: list[tuple[str, str]]) -> list[dict[str, str]]:
    turns: list[dict[str, str]] = []
    for question, reply in rounds:
        turns.append({"from": "human", "value": question})
        turns.append({"from": "gpt", "value": reply})
    return turns


def _write_json(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
