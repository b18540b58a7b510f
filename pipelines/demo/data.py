"""Write demo data as a user would have it: PNG files, LLaVA JSON and ShareGPT JSON.

Scenes are split by a hash of their content (`scenes.SPLITS`): the target was trained on the split `target`,
and `write` draws from `drafter` or `evaluation`, so neither the target nor a drafter saw an evaluation
image.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.demo import wording
from vlmdistill.pipelines.demo.chats import chat
from vlmdistill.pipelines.demo.scenes import draw, random_scene


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
    split: Literal["drafter", "evaluation"] = "drafter",
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


def _turns(rounds: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"from": speaker, "value": value}
        for pair in rounds
        for speaker, value in zip(("human", "gpt"), pair, strict=True)
    ]
