"""Conversations: every form of content, and one line for each that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import tiny
from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoint) -> VisionLanguageTarget:
    return load(str(checkpoint("qwen2_5_vl")))


def test_strings_paths_and_images_in_all_their_forms(target: VisionLanguageTarget, tmp_path: Path) -> None:
    image = tiny.picture(60, 90)
    image.save(tmp_path / "a.png")
    text = target.encode([{"role": "user", "content": "hello"}])
    assert torch.equal(text.ids_L, target.encode(tiny.message("hello")).ids_L)
    seen = target.encode(tiny.message("hello", image))
    for part in (
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "image", "image": tmp_path / "a.png"},
    ):
        other = target.encode([{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}])
        assert torch.equal(seen.ids_L, other.ids_L)
        assert torch.equal(seen.inputs["pixel_values"], other.inputs["pixel_values"])


def test_other_modes_and_orientations_are_read(target: VisionLanguageTarget, tmp_path: Path) -> None:
    image = tiny.picture(30, 90)
    for mode in ("L", "P", "RGBA", "CMYK"):
        assert target.encode(tiny.message("x", image.convert(mode))).spans
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held sideways
    image.save(tmp_path / "side.jpg", exif=exif)
    grid = target.encode(tiny.message("x", tmp_path / "side.jpg")).inputs["image_grid_thw"][0].tolist()
    assert grid[1] < grid[2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image", "path": "/nowhere/cat.png"}], "image /nowhere/cat.png does not exist"),
        ([{"type": "image", "path": __file__}], "test_prompt.py cannot be read"),
        ([{"type": "image", "path": None}], "image None cannot be read"),
        ([{"type": "audio", "path": "a.wav"}], "a message part is a text or an image"),
        ([{"type": "image"}], "a message part is a text or an image"),
        ([{"type": "text", "text": 5}], "a message part is a text or an image"),
        (None, "a role and a content"),
        ("look: <|image_pad|>", "placeholder"),
        ("x" * 1100, "tokens and the target reads at most 1024"),
    ],
    ids=str,
)
def test_what_cannot_be_used(target: VisionLanguageTarget, content: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        target.encode([{"role": "user", "content": content}])
    assert said in str(caught.value)


def test_an_empty_conversation(target: VisionLanguageTarget) -> None:
    with pytest.raises(DataError, match="at least one message"):
        target.encode([])


def test_a_truncated_image_names_its_file(target: VisionLanguageTarget, tmp_path: Path) -> None:
    tiny.picture(60, 90).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.png cannot be read"):
        target.encode(tiny.message("x", tmp_path / "cut.png"))


def test_an_image_that_the_processor_refuses(target: VisionLanguageTarget) -> None:
    with pytest.raises(DataError, match="refuses this prompt: absolute aspect ratio"):
        target.encode(tiny.message("x", tiny.picture(3000, 2)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_placeholder_typed_by_the_user(checkpoint: Checkpoint, family: str) -> None:
    target = load(str(checkpoint(family)))
    for images in ([], [tiny.picture(40, 40)]):
        with pytest.raises(DataError, match="placeholder"):
            target.encode(tiny.message(f"an {target.processor.image_token} here", *images))
