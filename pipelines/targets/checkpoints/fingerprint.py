"""Hashes of a checkpoint: cheap enough for every start, and different for another fine-tune.

Files of weights up to 64 MB are hashed in full. Of larger ones, samples of every tensor are: they see a
fine-tune of whole tensors, of the projector alone as well, a merged LoRA, and most quantisations. They do not
see a change of some rows of a tensor, such as the embeddings of a few added tokens.

A hash has grown since earlier versions: it begins with theirs, and `agree` compares what both know.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.targets.checkpoints.folder import (
    check_safetensors,
    read_json,
    resolve,
    safetensors_header,
    tensors_in,
    weight_files,
)
from vlmdistill.stores.schema import HASH_DIGITS, content_hash

SMALL = 64 << 20  # bytes: files up to this size are hashed in full
# Of larger files, so many samples of so many bytes are hashed, evenly spread: all that earlier versions read.
SAMPLES = 32
SAMPLE_BYTES = 64 << 10
# Of each of their tensors, two samples at its ends are hashed, and one more for each so many bytes.
TENSOR_SAMPLE_BYTES = 4 << 10
BYTES_A_SAMPLE = 16 << 20
MOST_SAMPLES = 8
ADDED_DIGITS = 8  # to a hash of an earlier version
IGNORED_IN_CONFIG = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
)
PROCESSING = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER = "tokenizer_config.json"
TOKEN_SETTINGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "bos_token",
    "eos_token",
    "unk_token",
)
"""The settings of these two files that decide tokens. The others are in tokenizer.json as well, or differ
between equal tokenizers that other versions of transformers saved."""
GENERATION = "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json", TOKENIZER)


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of a target that a store records; `str()` combines them."""

    config: str
    weights: str
    processor: str
    template: str
    revision: str

    def __str__(self) -> str:
        weights, processor = self.weights[:HASH_DIGITS], self.processor[:HASH_DIGITS]
        former = content_hash([self.config, weights, processor, self.template])
        return former + content_hash([self.weights, self.processor])[:ADDED_DIGITS]


def fingerprint(folder: Path, template: Any) -> Fingerprint:
    """Hash a complete checkpoint folder; `template` is the chat template in use."""
    is_snapshot = folder.parent.name == "snapshots"  # of the hub's cache
    return Fingerprint(
        config=config_hash(folder),
        weights=_weights_hash(weight_files(folder)),
        processor=_processor_hash(folder),
        template=content_hash(template),
        revision=folder.name if is_snapshot else "",
    )


def checkpoint(model: str) -> Fingerprint:
    """Hash a checkpoint by name, without loading it; TargetError if it cannot be found.

    The template hash is of the template files, not of the template in use: compare it only with another
    fingerprint from this function.
    """
    folder = resolve(model)
    files = [folder / name for name in TEMPLATES]
    return fingerprint(folder, [file.read_text() for file in files if file.is_file()])


def config_hash(folder: Path) -> str:
    """A hash of the configuration of a checkpoint, without what changes from file to file."""
    config = read_json(folder, "config.json")
    for name in IGNORED_IN_CONFIG:
        config.pop(name, None)
    return content_hash(config)


def _processor_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in PROCESSING:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    former = digest.hexdigest()[:HASH_DIGITS]
    return former + content_hash(_token_settings(folder))[:ADDED_DIGITS]


def _token_settings(folder: Path) -> dict[str, Any]:
    """By name, the settings that decide which tokens a prompt has, and the EOS ids of the generation."""
    settings = _optional(folder, SPECIAL_TOKENS) | _optional(folder, TOKENIZER)
    deciding = {}
    for name in TOKEN_SETTINGS:
        value = settings.get(name)
        if isinstance(value, dict):  # a token with its properties
            value = value.get("content")
        if value is not None:
            deciding[name] = value
    eos_ids = _optional(folder, GENERATION).get("eos_token_id")
    listed = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    return {**deciding, "eos_token_id": sorted(map(str, listed))}


def _optional(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint; empty if there is no such file."""
    return read_json(folder, name) if (folder / name).is_file() else {}


def _weights_hash(files: list[Path]) -> str:
    former, by_tensor = hashlib.sha256(), hashlib.sha256()
    has_large = False
    for path in files:
        size = path.stat().st_size
        header = safetensors_header(path)
        former.update(f"{path.name} {size}\n".encode())
        former.update(header)
        with path.open("rb") as file:
            if size <= SMALL:
                former.update(file.read())
                continue
            check_safetensors(path)
            has_large = True
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                former.update(file.read(SAMPLE_BYTES))
            for position, length in _samples(header):
                file.seek(position)
                by_tensor.update(file.read(length))
    added = by_tensor.hexdigest()[:ADDED_DIGITS] if has_large else ""
    return former.hexdigest()[:HASH_DIGITS] + added


def _samples(header: bytes) -> Iterator[tuple[int, int]]:
    """The positions and lengths, in bytes of a safetensors file, of the samples of its tensors.

    The last sample of a tensor and the first one of the next lie in one block of the file.
    """
    start = 8 + len(header)
    for begin, end in sorted(tensor["data_offsets"] for tensor in tensors_in(header)):
        length = min(TENSOR_SAMPLE_BYTES, end - begin)
        count = min(2 + (end - begin) // BYTES_A_SAMPLE, MOST_SAMPLES)
        for number in range(count):
            yield start + begin + (end - begin - length) * number // (count - 1), length
