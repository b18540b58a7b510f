"""A processor, tokenizer or template of another model is refused in one line when the target loads."""

import json
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.pipelines.targets.spoil import edit, refusal

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_processor_of_another_model(copy: Callable[[str], Path], family: str) -> None:
    folder = copy(family)
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "llava": ("processor_config.json", {"patch_size": 14}),
        "llava_next": (
            "preprocessor_config.json",
            {"image_grid_pinpoints": [[28, 56]]},
        ),
        "llava_onevision": ("processor_config.json", {"num_image_tokens": 729}),
    }
    name, values = changes.get(family, ("preprocessor_config.json", {"merge_size": 1}))
    edit(folder / name, **values)
    assert "the processor does not match the model" in refusal(folder)


PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
ALIKE = {"qwen2_vl", "qwen2_5_vl"}  # their processors are the same


@pytest.mark.parametrize(
    "whole", [False, True], ids=["settings", "settings and tokenizer"]
)
@pytest.mark.parametrize(
    ("family", "other"),
    [pair for pair in permutations(tiny.FAMILIES, 2) if set(pair) != ALIKE],
)
def test_processor_of_another_family(
    copy: Callable[[str], Path],
    checkpoint: Checkpoint,
    family: str,
    other: str,
    whole: bool,
) -> None:
    folder, theirs = copy(family), checkpoint(other)
    kept = {"config.json", "generation_config.json", "model.safetensors"}
    names = {path.name for path in (*folder.iterdir(), *theirs.iterdir())} - kept
    for name in names if whole else PROCESSORS:
        (folder / name).unlink(missing_ok=True)
        if (theirs / name).is_file():
            shutil.copy(theirs / name, folder)
    message = refusal(folder)
    assert "the processor does not match the model" in message
    found, wanted = (
        json.loads((checkpoint(name) / "preprocessor_config.json").read_text())[
            "image_processor_type"
        ]
        for name in (other, family)
    )
    assert (found in message and wanted in message) or found == wanted


@pytest.mark.parametrize("family", ["llava", "llava_siglip"])
def test_image_size_of_another_model(copy: Callable[[str], Path], family: str) -> None:
    folder = copy(family)
    sizes = {"height": 28, "width": 56}
    edit(
        folder / "preprocessor_config.json",
        **{"crop_size" if family == "llava" else "size": sizes},
    )
    assert "width is 56 in the processor and 28 in the model" in refusal(folder)
    edit(
        folder / "preprocessor_config.json",
        do_center_crop=False,
        size={"shortest_edge": 28},
    )
    assert "the image height is None in the processor" in refusal(folder)


@pytest.mark.parametrize(
    ("family", "file", "values", "said"),
    [
        (
            "llava",
            "processor_config.json",
            {"num_additional_image_tokens": 0},
            "num_additional_image_tokens is 0",
        ),
        (
            "llava_next",
            "processor_config.json",
            {"num_additional_image_tokens": 0},
            "image_tokens is 0 in",
        ),
        (
            "llava_next",
            "preprocessor_config.json",
            {"crop_size": 56, "size": 56},
            "the image height is 56 in",
        ),
        (
            "llava_next",
            "preprocessor_config.json",
            {"image_grid_pinpoints": []},
            "pinpoints is empty in",
        ),
        (
            "llava_onevision",
            "preprocessor_config.json",
            {"size": {"height": 56, "width": 28}},
            "height is 56 in",
        ),
        (
            "llava_onevision",
            "processor_config.json",
            {"vision_aspect_ratio": "square"},
            "aspect_ratio is square in",
        ),
        (
            "qwen2_vl",
            "preprocessor_config.json",
            {"size": {"min_pixels": 9, "max_pixels": 99}},
            "shortest_edge",
        ),
    ],
)
def test_settings_that_would_fail_at_the_first_image(
    copy: Callable[[str], Path],
    family: str,
    file: str,
    values: dict[str, Any],
    said: str,
) -> None:
    folder = copy(family)
    edit(folder / file, **values)
    assert said in refusal(folder)


def test_tiles_that_the_stock_model_cannot_put_together(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llava_next")
    for name in ("config.json", "processor_config.json"):
        edit(folder / name, vision_feature_select_strategy="full")
    assert "'full'" in refusal(folder)


@pytest.mark.parametrize("family", tiny.VIDEO)
def test_video_processor_of_another_model(
    copy: Callable[[str], Path], family: str
) -> None:
    folder = copy(family)
    file = folder / "video_preprocessor_config.json"
    whole = json.loads(
        (file if file.exists() else folder / "preprocessor_config.json").read_text()
    )
    square = family == "llava_onevision"
    for values, said in (
        (
            {"size": {"height": 56, "width": 28}} if square else {"patch_size": 8},
            "does not match the model",
        ),
        (
            {"size": {"height": 28, "width": 56}} if square else {"merge_size": 1},
            "does not match the model",
        ),
        (
            {"size": {"shortest_edge": 28}} if square else {"temporal_patch_size": 1},
            "not",
        ),
    ):
        file.write_text(json.dumps({**whole, **values}))
        assert said in refusal(folder)
    file.write_text("{")
    assert "does not load" in refusal(folder)


def test_tokenizer_of_another_model(
    copy: Callable[[str], Path], checkpoint: Checkpoint
) -> None:
    folder = copy("qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", image_token_id=config["image_token_id"] + 3)
    assert "the image placeholder is 5 in the processor and 8 in the model" in refusal(
        folder
    )
    folder = copy("llava")
    shutil.copytree(checkpoint("llava", vocabulary=24), folder, dirs_exist_ok=True)
    shutil.copy(checkpoint("llava") / "tokenizer.json", folder)
    assert "261 tokens, 24 embeddings" in refusal(folder)


def test_a_chat_template_for_text_only_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2_5_vl")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    )
    assert "chat_template.jinja" in refusal(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert "the chat template does not render" in refusal(folder)
