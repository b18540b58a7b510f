"""What is generated stays what the embedded targets were trained on, word for word and pixel for pixel."""

import hashlib
import random

import pytest

from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import PHASES, frame, random_clip
from vlmdistill.pipelines.demo.scenes import SPLITS, draw, random_scene

MADE = {  # sha256, the first half
    "drafter": "98f638a77d192ea2404b1e20bc14cff2",
    "evaluation": "36ba5affa9ef223a8381885904b0b9b1",
    "target": "bfb34d6d4c9fe3a290b5169cc3d90709",
}


@pytest.mark.parametrize("split", sorted(set(SPLITS)))
def test_scenes_clips_and_words_are_those_of_the_training(split: str) -> None:
    rng, made = random.Random(f"demo {split}"), hashlib.sha256()
    for _ in range(60):
        scene, clip = random_scene(rng, split), random_clip(rng, split)
        made.update(draw(scene).tobytes())
        for phase in range(PHASES):
            made.update(frame(clip, phase).tobytes())
        words = [wording.ask(scene, task, rng) for task in wording.TASKS]
        words += [narration.ask(clip, task, rng) for task in narration.TASKS]
        words += [
            *wording.rounds(scene, rng),
            *narration.rounds(clip, rng),
            *chats.chat(rng, split),
        ]
        made.update(repr(words).encode())
    assert made.hexdigest()[:32] == MADE[split]
