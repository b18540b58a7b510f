"""Drafter folders: `config.json` and `model.safetensors`, without the target's frozen tables."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmdistill.drafters.checkpoints.settings import from_dict, to_dict
from vlmdistill.drafters.core import catalogue
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.config import DrafterConfig, TrainConfig
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.schema import Provenance, TargetInfo
from vlmdistill.stores.suggestions import did_you_mean

FORMAT = 2


@dataclass(frozen=True)
class Origin:
    """What a drafter was trained on, and how."""

    provenance: Provenance  # of the features
    settings: TrainConfig
    training: dict[str, Any]  # signature, steps, samples, view, seed, history


def save(drafter: Drafter, name: str, folder: Path, origin: Origin) -> None:
    """Write the drafter to a temporary folder, then rename it, so that it is complete or absent.

    TrainingError when it cannot be written; an earlier folder is then kept.
    """
    weights = {key: value.detach().cpu().contiguous() for key, value in drafter.state_dict().items()}
    description = {
        "format": FORMAT,
        "drafter": name,
        "config": to_dict(DrafterConfig(drafter.config, origin.settings, drafter.tree)),
        "target": drafter.info.to_dict(),
        "provenance": origin.provenance.to_dict(),
        "training": origin.training,
    }
    put(folder, description, weights)


def put(folder: Path, description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Make the folder hold this `config.json` and `model.safetensors`; see `save`."""
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}{end}") for end in ("", ".old"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        metadata = {"format": "pt"}  # one item only: their order in the file is random
        save_file(dict(weights), new / "model.safetensors", metadata=metadata)
        (new / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except (OSError, SafetensorError) as error:
        if old.exists():
            old.rename(folder)
        raise TrainingError(f"the drafter cannot be written to {folder}: {error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def describe(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`; TrainingError when it is missing or not a drafter's.

    A method without training needs no folder: its name is enough.
    """
    name, file = folder.name, folder / "config.json"
    if not folder.exists() and name in catalogue.NAMES and not catalogue.is_trained(name):
        return {"drafter": name, "config": to_dict(catalogue.config(name)), "training": {}}
    try:
        description: dict[str, Any] = json.loads(file.read_text())
        missing = {"format", "drafter", "config", "target", "provenance"} - set(description)
    except FileNotFoundError:
        raise TrainingError(f"no drafter in {folder}{_instead(folder)}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise TrainingError(f"{file} is not readable JSON ({error}); train the drafter again") from None
    if missing or description["format"] not in (1, FORMAT):
        raise TrainingError(
            f"{file} is not a drafter of format {FORMAT}: it lacks {sorted(missing) or 'nothing'}"
        )
    return description


def _instead(folder: Path) -> str:
    """What to do about a missing drafter: the nearest name, or how to train it."""
    there = sorted(file.parent.name for file in folder.parent.glob("*/config.json"))
    if near := did_you_mean(folder.name, there):
        return near
    known = did_you_mean(folder.name, catalogue.NAMES)
    name = folder.name if folder.name in catalogue.NAMES else "sparrow"
    return f"{known}: train one first, for example `vlmdistill train {name}`"


def load(folder: Path, head: Head, info: TargetInfo, *, provenance: Provenance | None = None) -> Proposer:
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
    try:
        config = from_dict(catalogue.config(description["drafter"]), description["config"])
        info = TargetInfo.from_dict(description["target"])  # as it was then: the shapes of the weights
        drafter = build(description["drafter"], config, info, head)
    except DataError as error:
        raise TrainingError(f"{folder / 'config.json'}: {error}") from None
    file = folder / "model.safetensors"
    try:
        weights = load_file(file, device=str(head.embed_VD.device))
        if description["format"] == 1:
            weights = {_since_2(key, drafter): value for key, value in weights.items()}
        drafter.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"{file} is missing or corrupt ({reason}); train the drafter again") from None
    if not all(torch.isfinite(value).all() for value in weights.values()):
        raise TrainingError(f"{file} holds values that are not finite; train the drafter again")
    return drafter


def build(name: str, config: DrafterConfig, info: TargetInfo, head: Head) -> Proposer:
    """A drafter with these settings and fresh weights, in evaluation mode, on the device of `head`."""
    drafter: Proposer = catalogue.load(name)(config.model, info, head)
    drafter.tree = config.tree
    return drafter.to(device=head.embed_VD.device, dtype=head.embed_VD.dtype).eval()


def _since_2(key: str, drafter: Proposer) -> str:
    """The name of a weight that format 1 kept under `key`: EAGLE's layers were not a block of their own."""
    return f"block.{key}" if hasattr(drafter, "block") and key.startswith(("fc.", "layer.")) else key
