import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers.utils import logging

from examples.demo_target import build as building
from examples.demo_target.__main__ import main
from examples.demo_target.build import CLIPS, RECIPES, STATE, Recipe, build
from examples.demo_target.lessons import Sample, visuals
from examples.demo_target.model import IMAGE_TOKENS, config, new_model, positions
from examples.demo_target.scoring import FACTS
from examples.demo_target.text import (
    SPECIALS,
    VOCABULARY,
    conversation,
    train_tokenizer,
)
from examples.demo_target.training import Course, Progress, train
from examples.demo_target.wiring import wired
from tests.thorough import THOROUGH
from vlmdistill.cli import console
from vlmdistill.pipelines.demo.clips import SECONDS, frames, random_clip
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores import progress
from vlmdistill.stores.errors import TargetError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not THOROUGH, reason="a build of the demo target: make test-nightly"
    ),
]

TINY = replace(CLIPS, vision_steps=2, steps=3, tokens=400, polish_steps=1)


class _StopError(Exception):
    """As if the build had been killed."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def _build(out: Path, recipe: Recipe = TINY, **options: Any) -> dict[str, Any]:
    return build(
        out,
        layers=2,
        hidden=64,
        recipe=recipe,
        scenes=1,
        clips=1,
        lengths=(36,),
        texts=200,
        max_new_tokens=16,
        **options,
    )


def _bytes(folder: Path) -> dict[str, bytes]:
    """All files except the model card, which contains the build time."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "README.md"
    }


def test_the_card_of_a_target_without_videos_does_not_mention_them(
    tmp_path: Path,
) -> None:
    scores = _build(tmp_path, replace(TINY, clips=0.0))
    assert "clips" not in scores
    assert "a video of" not in (tmp_path / "README.md").read_text()
    assert Recipe().clips == 0


def test_a_build_writes_a_complete_folder_and_is_repeatable(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def note(stage: str, step: int, steps: int, loss: float) -> None:
        assert loss > 0
        seen.append((stage, step, steps))

    for name in ("one", "two"):
        scores = _build(tmp_path / name, progress=note)
        assert set(scores["facts"]) == set(FACTS)
        assert scores["clips"]["lengths"].keys() == {36}
    once = [
        ("vision", 1, 2),
        ("vision", 2, 2),
        *(("language", step, 3) for step in (1, 2, 3)),
        ("polish", 1, 1),
    ]
    assert seen == 2 * once
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    assert STATE not in _bytes(tmp_path / "one")
    assert "`tokens`: 400" in (tmp_path / "one" / "README.md").read_text()
    for count in (4, 7, 600):
        _encoded_as_in_training(tmp_path / "one", count)


def _encoded_as_in_training(folder: Path, count: int) -> None:
    """Ids, positions, patches and grid of a clip in `count` temporal patches, by the ordinary encode."""
    target, clip = load(str(folder)), random_clip(random.Random(0))
    shown_FHWC = np.stack([np.asarray(image) for image in frames(clip, 2 * count)])
    video = {"type": "video", "video": shown_FHWC, "fps": 2 * count / SECONDS}
    prompt = target.encode(
        [{"role": "user", "content": [video, {"type": "text", "text": "What is it?"}]}]
    )
    text = conversation([("What is it?", "")], video_tokens=IMAGE_TOKENS * count)
    assert text.startswith(target.tokenizer.decode(prompt.ids_L))
    seen = visuals([Sample(text, clip, count)])
    assert seen is not None
    ids = (target.model.config.image_token_id, target.model.config.video_token_id)
    assert torch.equal(
        positions(prompt.ids_L[None], ids, seen.seconds_B)[:, 0], prompt.rope_AL
    )
    assert (
        prompt.next_rope == int(prompt.rope_AL[0, -1]) + 1
    )  # a clip's time ends before the question does
    assert prompt.inputs["video_grid_thw"].tolist() == [[count, 6, 6]]
    pixels = seen.patches_IPC[seen.which_S].flatten(0, 1)
    torch.testing.assert_close(prompt.inputs["pixel_values_videos"], pixels)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(0, texts=200)


def _new(tokenizer: PreTrainedTokenizerFast) -> Model:
    torch.manual_seed(0)
    tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    return new_model(
        config(tokens, vocabulary=VOCABULARY, layers=2, hidden=128), tokenizer
    )


def _train(
    folder: Path, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, progress: Progress
) -> Model:
    model = _new(tokenizer)
    folder.mkdir(exist_ok=True)
    train(Course(model, tokenizer, recipe, 0, progress, folder / STATE, save_every=1))
    return model


def _stop_at(stage: str, step: int) -> Progress:
    def stop(name: str, now: int, steps: int, loss: float) -> None:
        if (name, now) == (stage, step):
            raise _StopError

    return stop


@pytest.mark.parametrize("stage", ["language", "polish"])
def test_an_interrupted_build_resumes_to_the_same_weights(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, stage: str
) -> None:
    recipe = replace(TINY, tokens=200, steps=24, polish_steps=24)
    seen: list[tuple[str, int]] = []

    def note(name: str, step: int, steps: int, loss: float) -> None:
        seen.append((name, step))

    with pytest.raises(_StopError):
        _train(tmp_path, tokenizer, recipe, _stop_at(stage, 23))
    resumed = _train(tmp_path, tokenizer, recipe, note)
    assert seen[0][0] == stage
    assert 1 < seen[0][1] <= 23
    whole = _train(tmp_path / "whole", tokenizer, recipe, note).state_dict()
    assert all(
        torch.equal(weight, whole[name])
        for name, weight in resumed.state_dict().items()
    )


def test_a_build_interrupted_during_scoring_keeps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(TINY, tokens=200, clips=0.0, steps=24, polish_steps=24)

    def stop(*_: Any, **__: Any) -> None:
        raise _StopError

    with monkeypatch.context() as scoring:
        scoring.setattr(building, "evaluate_loaded", stop)
        with pytest.raises(_StopError):
            _build(tmp_path, recipe, save_every=1)
    stages: list[str] = []
    _build(tmp_path, recipe, progress=lambda stage, *_: stages.append(stage))
    assert set(stages) == {"polish"}
    assert STATE not in _bytes(tmp_path)


def test_wired_weights_stay_and_all_others_train(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    fresh, taught = (_new(tokenizer) for _ in range(2))
    train(Course(taught, tokenizer, TINY, 0, lambda *_: None, tmp_path / STATE))
    pairs = zip(wired(fresh, tokenizer), wired(taught, tokenizer), strict=True)
    for (before, at), (after, _) in pairs:
        assert torch.equal(before[at], after[at])
        assert not torch.equal(before, after)


def test_an_unfinished_build_of_another_recipe_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(_StopError):
        _train(tmp_path, tokenizer, replace(TINY, steps=30), _stop_at("language", 29))
    with pytest.raises(
        TargetError, match="unfinished build with another seed or recipe"
    ):
        _train(tmp_path, tokenizer, TINY, _stop_at("language", 1))


def test_a_width_that_is_not_a_multiple_of_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        build(tmp_path, hidden=100)


def test_too_few_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers must be at least 2, not 1"):
        build(tmp_path, layers=1)


def test_a_finished_checkpoint_is_not_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, folder in EMBEDDED.items():
        before = (folder / "model.safetensors").stat()
        assert main([name, "--out", str(folder)]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert str(folder) in line
        assert (folder / "model.safetensors").stat() == before


def test_an_unknown_embedded_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo-audio", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_script_starts_the_whole_recipe_and_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def stopping(what: str, unit: str) -> Iterator[progress.Progress]:
        def report(done: int, total: int, remark: str = "") -> None:
            seen.append((done, total))
            if done == 2:
                raise KeyboardInterrupt

        yield report

    monkeypatch.setattr(console, "progress", stopping)
    monkeypatch.setattr(
        building,
        "train_tokenizer",
        lambda seed, texts: train_tokenizer(seed, texts=texts // 20),
    )
    assert main(["demo-video", "--out", str(tmp_path)]) == 130
    steps = RECIPES["demo-video"].vision_steps
    assert seen == [(1, steps), (2, steps)]
    assert len(capsys.readouterr().err.splitlines()) == 1
