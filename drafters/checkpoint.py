"""A trained drafter as a folder: `config.json` and `model.safetensors`, without the frozen tables."""

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

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.base import Drafter, Head, Proposer
from vlmdistill.drafters.config import from_dict, to_dict
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.schema import Provenance, TargetInfo

FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """What a drafter was trained on: the features' provenance, and how."""

    provenance: Provenance
    training: dict[str, Any]  # steps, samples, view, seed, settings: for the reader, never compared


def save(drafter: Drafter, name: str, folder: Path, origin: Origin) -> None:
    """Write the drafter aside, then put the folder in place, so that it is whole or absent.

    TrainingError when it cannot be written; what was there before is still there then.
    """
    weights = {key: value.detach().cpu().contiguous() for key, value in drafter.state_dict().items()}
    description = {
        "format": FORMAT,
        "drafter": name,
        "config": to_dict(drafter.config),
        "target": drafter.info.to_dict(),
        "provenance": origin.provenance.to_dict(),
        "training": origin.training,
    }
    put(folder, description, weights)


def put(folder: Path, description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Make the folder hold this `config.json` and `model.safetensors`; see `save`."""
    aside, old = (folder.with_name(f".{folder.name}.{os.getpid()}{end}") for end in ("", ".old"))
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(
            dict(weights), aside / "model.safetensors", metadata={"format": "pt"}
        )  # one: their order is random
        (aside / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        if old.exists():
            old.rename(folder)
        raise TrainingError(f"the drafter cannot be written to {folder}: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def describe(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`; TrainingError when it is missing or not one of ours.

    A method that needs no training needs no folder: it is described by its name alone.
    """
    name, file = folder.name, folder / "config.json"
    if not folder.exists() and name in catalogue.NAMES and not catalogue.is_trained(name):
        return {"drafter": name, "config": to_dict(catalogue.config(name)), "training": {}}
    try:
        description: dict[str, Any] = json.loads(file.read_text())
        missing = {"format", "drafter", "config", "target", "provenance"} - set(description)
    except FileNotFoundError:
        raise TrainingError(
            f"no drafter in {folder}: train one first, for example `vlmdistill train sparrow`"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise TrainingError(f"{file} is not readable JSON ({error}); train the drafter again") from None
    if missing or description["format"] != FORMAT:
        raise TrainingError(
            f"{file} is not a drafter of format {FORMAT}: it lacks {sorted(missing) or 'nothing'}"
        )
    return description


def load(folder: Path, head: Head, info: TargetInfo, *, provenance: Provenance | None = None) -> Proposer:
    """Build the drafter in a folder on the target's tables, in evaluation mode; see `describe`.

    TrainingError when the files are missing or corrupt, or when the drafter was trained for another target
    than `provenance` tells of.
    """
    description = describe(folder)
    if "provenance" not in description:
        made = catalogue.load(folder.name)(catalogue.config(folder.name), info, head)
        return made.to(device=head.embed_VD.device, dtype=head.embed_VD.dtype).eval()
    trained = Provenance.from_dict(description["provenance"])
    for field in ("config_hash", "weights_hash"):
        mine, theirs = getattr(trained, field), getattr(provenance or trained, field)
        if mine != theirs:
            raise TrainingError(
                f"the drafter in {folder} was trained for another target ({trained.target}): "
                f"{field} {mine}, not {theirs}"
            )
    kind = catalogue.load(description["drafter"])
    try:
        config = from_dict(kind.Config, description["config"])
        info = TargetInfo.from_dict(description["target"])  # as it was then: the shapes of the weights
    except DataError as error:
        raise TrainingError(f"{folder / 'config.json'}: {error}") from None
    drafter: Proposer = kind(config, info, head).to(device=head.embed_VD.device, dtype=head.embed_VD.dtype)
    file = folder / "model.safetensors"
    try:
        weights = load_file(file, device=str(head.embed_VD.device))
        drafter.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"{file} is missing or corrupt ({reason}); train the drafter again") from None
    if not all(torch.isfinite(value).all() for value in weights.values()):
        raise TrainingError(f"{file} holds values that are not finite; train the drafter again")
    return drafter.eval()
