import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmdistill.pipelines.targets.checkpoints.fingerprint import (
    SMALL,
    Fingerprint,
    checkpoint,
)
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import HASH_DIGITS, agree

Copy = Callable[[str], Path]


@pytest.fixture
def large(copy: Copy) -> Path:
    """A checkpoint with a file of weights that is too large to be hashed in full."""
    folder = copy("llava")
    file = folder / "model.safetensors"
    filler = {f"filler.{n}": torch.zeros(SMALL // 8) for n in (0, 1, 2)}
    save_file(load_file(file) | filler, file, {"format": "pt"})
    return folder


def hashes(folder: Path) -> Fingerprint:
    return checkpoint(str(folder))


def test_a_fine_tune_of_the_projector_alone_is_seen_in_a_large_file(
    large: Path,
) -> None:
    file = large / "model.safetensors"
    before = hashes(large)
    weights = load_file(file)
    names = [name for name in weights if "multi_modal_projector" in name]
    for name in names:
        save_file(
            {**weights, name: weights[name] * 1.01 + 0.01}, file, {"format": "pt"}
        )
        after = hashes(large)
        assert not agree(before.weights, after.weights), name
        assert str(before) != str(after)
    save_file(weights, file, {"format": "pt"})
    assert hashes(large) == before


def test_a_part_of_fused_weights_is_seen_in_a_large_file(large: Path) -> None:
    file = large / "model.safetensors"
    before = hashes(large).weights
    weights = load_file(file)
    for part in (slice(None, 100_000), slice(-100_000, None)):
        weights["filler.1"][:] = 0
        weights["filler.1"][part] = 0.01
        save_file(weights, file, {"format": "pt"})
        assert not agree(before, hashes(large).weights)


def test_a_hash_begins_with_that_of_earlier_versions(large: Path) -> None:
    whole = hashes(large)
    before = whole.weights[:HASH_DIGITS]
    assert before != whole.weights
    assert agree(before, whole.weights)
    assert agree(str(whole)[:HASH_DIGITS], str(whole))
    assert not agree("0" * HASH_DIGITS, whole.weights)
    assert not agree("", whole.weights)


def test_a_corrupt_large_file_is_refused(large: Path) -> None:
    file = large / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(b"?")
    with pytest.raises(TargetError, match="header is unreadable"):
        hashes(large)


@pytest.mark.parametrize(
    ("name", "settings", "is_other"),
    [
        ("generation_config.json", {"eos_token_id": [2, 5]}, True),
        ("generation_config.json", {"temperature": 0.1}, False),
        ("tokenizer_config.json", {"eos_token": "</other>"}, True),
        ("tokenizer_config.json", {"add_bos_token": "other"}, True),
        ("tokenizer_config.json", {"model_max_length": 77}, False),
        ("special_tokens_map.json", {"bos_token": {"content": "<other>"}}, True),
        ("special_tokens_map.json", {"pad_token": "<other>"}, False),
    ],
)
def test_what_decides_tokens_is_in_the_hash_of_the_processor(
    copy: Copy, name: str, settings: dict[str, Any], is_other: bool
) -> None:
    folder = copy("llava")
    before = hashes(folder).processor
    file = folder / name
    known = json.loads(file.read_text()) if file.is_file() else {}
    if name == "special_tokens_map.json":
        tokenizer = folder / "tokenizer_config.json"
        kept = json.loads(tokenizer.read_text())
        kept.pop("bos_token", None)
        tokenizer.write_text(json.dumps(kept))
        file.write_text("{}")
        before = hashes(folder).processor
    file.write_text(json.dumps(known | settings))
    assert agree(before, hashes(folder).processor) != is_other
    assert hashes(folder).processor[:HASH_DIGITS] == before[:HASH_DIGITS]


def test_settings_of_equal_meaning_have_an_equal_hash(copy: Copy) -> None:
    folder = copy("llava")
    generation = folder / "generation_config.json"
    tokenizer = folder / "tokenizer_config.json"
    known = json.loads(tokenizer.read_text())
    generation.write_text(json.dumps({"eos_token_id": [5, 2]}))
    tokenizer.write_text(json.dumps(known | {"eos_token": "</s>"}))
    before = hashes(folder).processor
    generation.write_text(json.dumps({"eos_token_id": [2, 5], "do_sample": True}))
    as_saved = {"content": "</s>", "lstrip": False, "special": True}
    tokenizer.write_text(
        json.dumps(known | {"eos_token": as_saved, "add_prefix_space": None})
    )
    assert hashes(folder).processor == before
