"""Drafter folders: `config.json`, `model.safetensors` without the target's tables, and `samples.txt`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import (
    FORMAT,
    SAMPLES,
    WEIGHTS,
    describe,
)
from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.config import DrafterConfig, TrainConfig, at_least
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.drafters.core.settings import from_dict, to_dict
from vlmdistill.drafters.core.vocabulary import check_columns
from vlmdistill.stores.backends.local import atomic_folder
from vlmdistill.stores.errors import DataError, TrainingError, one_line
from vlmdistill.stores.schema import Provenance, TargetInfo, agree

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights
POSITIVE = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
    "rope_theta",
)
"""Facts of a target that a drafter cannot be built with if they are 0 or less."""


@dataclass(frozen=True)
class Origin:
    """What a drafter was trained on, and how."""

    provenance: Provenance  # of the features
    settings: TrainConfig
    training: dict[str, Any]  # signature, steps, samples, view, seed, history
    samples: Sequence[str] = ()  # their keys


def save(drafter: Drafter, name: str, folder: Path, origin: Origin) -> None:
    """Write the drafter to a temporary folder, then rename it, so that it is complete or absent.

    TrainingError when it cannot be written; an earlier folder is then kept.
    """
    weights = {
        key: value.detach().cpu().contiguous()
        for key, value in drafter.state_dict().items()
    }
    config = DrafterConfig(drafter.config, origin.settings, drafter.tree)
    description = {
        "format": FORMAT,
        "drafter": name,
        "config": to_dict(config),
        "target": drafter.info.to_dict(),
        "provenance": origin.provenance.to_dict(),
        "training": origin.training,
    }
    put(folder, description, weights, origin.samples)


def put(
    folder: Path,
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    samples: Sequence[str] = (),
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make the folder hold this `config.json`, `model.safetensors` and list of samples; see `save`.

    `files` are further ones, as torch saves them.
    """
    # One item only: the order of several in the file is random.
    metadata = {"format": "pt"}
    try:
        with atomic_folder(folder) as new:
            save_file(dict(weights), new / WEIGHTS, metadata=metadata)
            (new / "config.json").write_text(json.dumps(description, indent=2) + "\n")
            for name, content in (files or {}).items():
                torch.save(dict(content), new / name)
            if samples:
                lines = "".join(f"{key}\n" for key in samples)
                (new / SAMPLES).write_text(lines, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the drafter cannot be written to {folder}: {error}"
        ) from None


def load(
    folder: Path, head: Head, info: TargetInfo, *, provenance: Provenance | None = None
) -> Proposer:
    """The drafter in a folder, on the target's tables and in evaluation mode; see `describe`.

    TrainingError when the files are missing or corrupt, or when the drafter was trained for another target
    than that in `provenance`.
    """
    description = describe(folder)
    if "provenance" not in description:
        return build(folder.name, catalogue.config(folder.name), info, head)
    name = description["drafter"]
    trained = Provenance.from_dict(description["provenance"])
    if provenance is not None:
        _check_target(folder, trained, provenance)
    weights = _read_weights(folder / WEIGHTS)
    try:
        config = from_dict(catalogue.config(name), description["config"])
        trained_info = _trained_info(description, info)
        # On the meta device nothing is allocated for shapes that may be wrong.
        with torch.device("meta"):
            expected = catalogue.load(name)(config.model, trained_info, head)
    except (DataError, RuntimeError) as error:
        raise TrainingError(f"{folder / 'config.json'}: {one_line(error)}") from None
    _check_weights(folder / WEIGHTS, weights, expected.state_dict())
    drafter = build(name, config, trained_info, head)
    # Copied to a GPU, weights get the dtype of the target.
    drafter.load_state_dict(weights)
    check_columns(folder / WEIGHTS, drafter, trained_info.vocab_size)
    return drafter


def build(name: str, config: DrafterConfig, info: TargetInfo, head: Head) -> Proposer:
    """A drafter with these settings and fresh weights, in evaluation mode, on the device of `head`."""
    drafter: Proposer = catalogue.load(name)(config.model, info, head)
    drafter.tree = config.tree
    return drafter.to(device=head.embed_VD.device, dtype=head.embed_VD.dtype).eval()


def _check_target(folder: Path, trained: Provenance, provenance: Provenance) -> None:
    """TrainingError if the drafter was trained for another target."""
    for field in ("config_hash", "weights_hash"):
        trained_hash = getattr(trained, field)
        target_hash = getattr(provenance, field)
        if not agree(trained_hash, target_hash):
            raise TrainingError(
                f"the drafter in {folder} was trained for another target ({trained.target}): "
                f"{field} {trained_hash}, not {target_hash}"
            )


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return read_weights(file)
    except (FileNotFoundError, SafetensorError) as error:
        reason = one_line(error)[:300]
        raise TrainingError(
            f"{file} is missing or corrupt ({reason}); train the drafter again"
        ) from None
    except OSError as error:
        raise TrainingError(f"{file} cannot be read: {error.strerror}") from None


def _trained_info(description: Mapping[str, Any], info: TargetInfo) -> TargetInfo:
    """The target's facts at the time of training, which gave the weights their shapes.

    DataError if they are no facts of a target, or do not fit the target's tables now.
    """
    trained = TargetInfo.from_dict(description["target"])
    at_least(trained, 1, *POSITIVE)
    at_least(trained, 0, "rms_norm_eps")
    for name in ("hidden_size", "num_layers", "vocab_size"):
        trained_size = getattr(trained, name)
        size = getattr(info, name)
        if trained_size != size:
            raise DataError(f"{name} is {trained_size}, and {size} here")
    return trained


def _check_weights(
    file: Path, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """TrainingError if names, shapes or types of weights are wrong, or a number is not finite."""
    shapes = {key: [*value.shape] for key, value in weights.items()}
    expected_shapes = {key: [*value.shape] for key, value in expected.items()}
    for key in {**expected_shapes, **shapes}:
        if shapes.get(key) != expected_shapes.get(key):
            raise TrainingError(
                f"{file}: {key} is {shapes.get(key, 'missing')}, and by its config.json "
                f"{expected_shapes.get(key, 'there is none')}; train the drafter again"
            )
    for key, value in weights.items():
        is_table = value.dtype == expected[key].dtype  # such as a draft vocabulary
        if value.dtype not in FLOATS and not is_table:
            raise TrainingError(
                f"{file}: {key} is of type {value.dtype}, and weights are float32 or "
                "half precision; train the drafter again"
            )
        if not torch.isfinite(value).all():
            raise TrainingError(
                f"{file} holds values that are not finite; train the drafter again"
            )
