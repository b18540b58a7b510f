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
SAMPLES, SAMPLE = (
    32,
    64 << 10,
)  # of larger files: this many samples of this many bytes, evenly spread
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
    config = {
        k: v
        for k, v in read_json(folder, "config.json").items()
        if k not in IGNORED_IN_CONFIG
    }
    digest = hashlib.sha256()
    for name in PROCESSING:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return Fingerprint(
        config=content_hash(config),
        weights=_weights_hash(weight_files(folder)),
        processor=digest.hexdigest()[:16],
        template=content_hash(template),
        revision=folder.name if folder.parent.name == "snapshots" else "",
    )


def checkpoint(model: str) -> Fingerprint:
    """Hash a checkpoint by name, without loading it; TargetError if it cannot be found.

    The template hash is of the template files, not of the template in use: compare it only with another
    fingerprint from this function.
    """
    folder = resolve(model)
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return fingerprint(
        folder,
        [(folder / name).read_text() for name in names if (folder / name).is_file()],
    )


def _weights_hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode() + safetensors_header(path))
        with path.open("rb") as file:
            if size <= SMALL:
                digest.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]
