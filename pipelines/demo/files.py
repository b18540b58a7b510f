"""Writes demo data as a user would have it: PNG and MP4 files, LLaVA JSON and ShareGPT JSON.

Scenes and clips are split by a hash of their content (`scenes.SPLITS`). The target was trained on the split
`target`; files are drawn from `drafter` or `evaluation`. So neither the target nor a drafter has been trained
on an image or video of `evaluation`.
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
    llava: (
        Path  # LLaVA JSON: conversations of one or two rounds, the image in the first
    )
    sharegpt: Path  # ShareGPT JSON: conversations without an image


@dataclass(frozen=True)
class WrittenVideos:
    """The files of `write_videos`."""

    videos: Path  # folder of MP4 files of eight seconds; the paths in `llava` are relative to it
    llava: (
        Path  # LLaVA JSON: conversations of one or two rounds, the video in the first
    )


def write(
    folder: Path, *, images: int, dialogues: int, seed: int, split: Side = "drafter"
) -> Written:
    """Write `images` conversations about one image each and `dialogues` without one; a seed fixes every byte.

    One call draws no image twice, and writes one dialogue per first question. The responses are reference
    texts, not the target's.
    """
    rng = random.Random(f"demo data {split} {seed}")
    made = Written(
        folder / "images", folder / "demo-scenes.json", folder / "demo-chats.json"
    )
    made.images.mkdir(parents=True, exist_ok=True)
    records = []
    for number, scene in enumerate(_distinct(images, lambda: random_scene(rng, split))):
        name = f"{split}-{seed}-{number:06d}"
        draw(scene).save(made.images / f"{name}.png")
        records.append(
            _record(name, "image", f"{name}.png", wording.rounds(scene, rng))
        )
    _write_json(made.llava, records)
    by_question: dict[str, dict[str, Any]] = {}
    for index in range(dialogues):
        turns = _turns(chat(rng, split))
        record = {"id": f"{split}-{seed}-text-{index:06d}", "conversations": turns}
        by_question.setdefault(turns[0]["value"], record)
    _write_json(made.sharegpt, list(by_question.values()))
    return made


def write_videos(
    folder: Path, *, videos: int, seed: int, tokens: int = 72, split: Side = "drafter"
) -> WrittenVideos:
    """Write `videos` conversations about one clip each; a seed fixes clips and texts. DataError without PyAV.

    All frames of a file make about `tokens` visual tokens. The default is two frames per second, the rate at
    which the demo target samples.
    """
    rng = random.Random(f"demo videos {split} {seed}")
    made = WrittenVideos(folder / "videos", folder / "demo-videos.json")
    made.videos.mkdir(parents=True, exist_ok=True)
    records = []
    for number, clip in enumerate(_distinct(videos, lambda: random_clip(rng, split))):
        name = f"{split}-{seed}-{tokens}-{number:06d}"
        film(clip, made.videos / f"{name}.mp4", tokens)
        records.append(
            _record(name, "video", f"{name}.mp4", narration.rounds(clip, rng))
        )
    _write_json(made.llava, records)
    return made


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
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24"))
            )
        container.mux(stream.encode())
    return path


def _distinct(count: int, draw_one: Callable[[], Medium]) -> Iterator[Medium]:
    """`count` different draws, each made when it is asked for: the texts are drawn in between."""
    seen: set[Medium] = set()
    while len(seen) < count:
        one = draw_one()
        if one not in seen:
            seen.add(one)
            yield one


def _record(
    name: str, kind: str, file: str, rounds: list[tuple[str, str]]
) -> dict[str, Any]:
    turns = _turns(rounds)
    turns[0]["value"] = f"<{kind}>\n{turns[0]['value']}"
    return {"id": name, kind: file, "conversations": turns}


def _turns(rounds: list[tuple[str, str]]) -> list[dict[str, str]]:
    pairs = ([("human", question), ("gpt", reply)] for question, reply in rounds)
    return [
        {"from": speaker, "value": value} for pair in pairs for speaker, value in pair
    ]


def _write_json(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
