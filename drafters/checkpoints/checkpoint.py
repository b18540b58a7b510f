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
from vlmdistill.stores.schema import Provenance, TargetInfo


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
    description = {
        "format": FORMAT,
        "drafter": name,
        "config": to_dict(DrafterConfig(drafter.config, origin.settings, drafter.tree)),
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
    try:
        with atomic_folder(folder) as new:
            metadata = {
                "format": "pt"
            }  # one item only: their order in the file is random
            save_file(dict(weights), new / WEIGHTS, metadata=metadata)
            (new / "config.json").write_text(json.dumps(description, indent=2) + "\n")
            for name, content in (files or {}).items():
                torch.save(dict(content), new / name)
            if samples:
                (new / SAMPLES).write_text(
                    "".join(f"{key}\n" for key in samples), encoding="utf-8"
                )
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
    trained = Provenance.from_dict(description["provenance"])
    for field in ("config_hash", "weights_hash"):
        mine, theirs = getattr(trained, field), getattr(provenance or trained, field)
        if mine != theirs:
            raise TrainingError(
                f"the drafter in {folder} was trained for another target ({trained.target}): "
                f"{field} {mine}, not {theirs}"
            )
    file = folder / WEIGHTS
    try:
        weights = read_weights(
            file
        )  # what is copied to a GPU has the dtype of the target
    except (FileNotFoundError, SafetensorError) as error:
        reason = one_line(error)[:300]
        raise TrainingError(
            f"{file} is missing or corrupt ({reason}); train the drafter again"
        ) from None
    except OSError as error:
        raise TrainingError(f"{file} cannot be read: {error.strerror}") from None
    try:
        config = from_dict(
            catalogue.config(description["drafter"]), description["config"]
        )
        described = TargetInfo.from_dict(
            description["target"]
        )  # as it was then: the shapes of the weights
        at_least(
            described,
            1,
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
            "rope_theta",
        )
        at_least(described, 0, "rms_norm_eps")
        for size in ("hidden_size", "num_layers", "vocab_size"):
            if getattr(described, size) != getattr(info, size):
                raise DataError(
                    f"{size} is {getattr(described, size)}, and {getattr(info, size)} here"
                )
        with torch.device("meta"):  # allocates nothing
            expected = catalogue.load(description["drafter"])(
                config.model, described, head
            )
    except (DataError, RuntimeError) as error:
        raise TrainingError(f"{folder / 'config.json'}: {one_line(error)}") from None
    there, asked = (
        {k: [*v.shape] for k, v in one.items()}
        for one in (weights, expected.state_dict())
    )
    if odd := next(
        (key for key in {**asked, **there} if there.get(key) != asked.get(key)), None
    ):
        raise TrainingError(
            f"{file}: {odd} is {there.get(odd, 'missing')}, and by its config.json "
            f"{asked.get(odd, 'there is none')}; train the drafter again"
        )
    if not all(torch.isfinite(value).all() for value in weights.values()):
        raise TrainingError(
            f"{file} holds values that are not finite; train the drafter again"
        )
    drafter = build(description["drafter"], config, described, head)
    drafter.load_state_dict(weights)
    check_columns(file, drafter, described.vocab_size)
    return drafter


def build(name: str, config: DrafterConfig, info: TargetInfo, head: Head) -> Proposer:
    """A drafter with these settings and fresh weights, in evaluation mode, on the device of `head`."""
    drafter: Proposer = catalogue.load(name)(config.model, info, head)
    drafter.tree = config.tree
    return drafter.to(device=head.embed_VD.device, dtype=head.embed_VD.dtype).eval()
