"""Write demo data as a user would have it: PNG and MP4 files, LLaVA JSON and ShareGPT JSON.

Scenes and clips are split by a hash of their content (`scenes.SPLITS`): the target was trained on the split
`target`, and what is written is drawn from `drafter` or `evaluation`, so neither the target nor a drafter saw
an evaluation image or video.
"""

import json
import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlmdistill.pipelines.demo import narration, wording
from vlmdistill.pipelines.demo.chats import chat
from vlmdistill.pipelines.demo.clips import SECONDS, Clip, frames, patches_for, random_clip
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS, draw, random_scene
from vlmdistill.stores.errors import DataError

Side = Literal["drafter", "evaluation"]


@dataclass(frozen=True)
class Written:
    """Where `write` put things."""

    images: Path
    """Folder of PNG files; the paths in `llava` are relative to it."""
    llava: Path
    """LLaVA JSON: conversations of one or two rounds, the image in the first."""
    sharegpt: Path
    """ShareGPT JSON: conversations without an image."""


def write(
    folder: Path,
    *,
    images: int,
    dialogues: int,
    seed: int,
    split: Side = "drafter",
) -> Written:
    """Write `images` conversations about an image each, and `dialogues` without one; a seed fixes every byte.

    Within one call no image is drawn twice. The answers are reference answers, not the target's own.
    """
    rng = random.Random(f"demo data {split} {seed}")
    made = Written(folder / "images", folder / "llava.json", folder / "sharegpt.json")
    made.images.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    seen = set()
    while len(records) < images:
        scene = random_scene(rng, split)
        if scene in seen:
            continue
        seen.add(scene)
        name = f"{split}-{seed}-{len(records):06d}"
        draw(scene).save(made.images / f"{name}.png")
        turns = _turns(wording.rounds(scene, rng))
        turns[0]["value"] = f"<image>\n{turns[0]['value']}"
        records.append({"id": name, "image": f"{name}.png", "conversations": turns})
    made.llava.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    talks = [
        {"id": f"{split}-{seed}-text-{index:06d}", "conversations": _turns(chat(rng, split))}
        for index in range(dialogues)
    ]
    made.sharegpt.write_text(json.dumps(talks, indent=1) + "\n", encoding="utf-8")
    return made


@dataclass(frozen=True)
class WrittenVideos:
    """Where `write_videos` put things."""

    videos: Path
    """Folder of MP4 files of eight seconds; the paths in `llava` are relative to it."""
    llava: Path
    """LLaVA JSON: conversations of one or two rounds, the video in the first."""


def write_videos(
    folder: Path, *, videos: int, seed: int, tokens: int = 72, split: Side = "drafter"
) -> WrittenVideos:
    """Write `videos` conversations about a clip each; a seed fixes clips and words. DataError without PyAV.

    All the frames of a file make about `tokens` visual tokens; 72 are two frames a second, which the demo
    target takes by itself.
    """
    rng = random.Random(f"demo videos {split} {seed}")
    made = WrittenVideos(folder / "videos", folder / "llava-videos.json")
    made.videos.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    seen = set()
    while len(records) < videos:
        clip = random_clip(rng, split)
        if clip in seen:
            continue
        seen.add(clip)
        name = f"{split}-{seed}-{tokens}-{len(records):06d}"
        film(clip, made.videos / f"{name}.mp4", tokens)
        turns = _turns(narration.rounds(clip, rng))
        turns[0]["value"] = f"<video>\n{turns[0]['value']}"
        records.append({"id": name, "video": f"{name}.mp4", "conversations": turns})
    made.llava.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return made


def film(clip: Clip, path: Path, tokens: int) -> Path:
    """Write a clip as an MP4 file, without loss, whose frames make about `tokens` visual tokens."""
    try:
        import av
    except ImportError:
        raise DataError(f"writing the video {path} needs PyAV: pip install 'vlmdistill[video]'") from None
    count = 2 * patches_for(tokens)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=Fraction(count, SECONDS), options={"qp": "0"})
        stream.width = stream.height = SIDE_PIXELS
        stream.pix_fmt = "rgb24"
        for image in frames(clip, count):
            shown_HWC = np.asarray(image)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown_HWC, format="rgb24")))
        container.mux(stream.encode())
    return path


def _turns(rounds: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"from": speaker, "value": value}
        for pair in rounds
        for speaker, value in zip(("human", "gpt"), pair, strict=True)
    ]
