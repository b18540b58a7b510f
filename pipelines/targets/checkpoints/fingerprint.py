"""Hashes of a checkpoint: cheap enough for every start, and different for another fine-tune."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.targets.checkpoints.folder import (
    read_json,
    resolve,
    safetensors_header,
    weight_files,
)
from vlmdistill.stores.schema import content_hash

SMALL = 64 << 20  # bytes: files up to this size are hashed in full
# Of larger files, so many samples of so many bytes are hashed, evenly spread.
SAMPLES = 32
SAMPLE_BYTES = 64 << 10
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
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of a target that a store records; `str()` combines them."""

    config: str
    weights: str
    processor: str
    template: str
    revision: str

    def __str__(self) -> str:
        return content_hash([self.config, self.weights, self.processor, self.template])


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
    return digest.hexdigest()[:16]


def _weights_hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(safetensors_header(path))
        with path.open("rb") as file:
            if size <= SMALL:
                digest.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
