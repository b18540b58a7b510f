"""A trained drafter in the form that serving engines load: `config.json` and `model.safetensors`."""

from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters import catalogue, checkpoint
from vlmdistill.drafters.base import Drafter, Head
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.schema import TargetInfo


def exportable() -> list[str]:
    """The drafters that serving engines load for targets with images."""
    trained = (name for name in catalogue.NAMES if catalogue.is_trained(name))
    return [name for name in trained if catalogue.trained(name).published is not Drafter.published]


def export(folder: Path, out: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """Write the drafter in `folder` to the folder `out` as serving engines load it; what was written.

    Embeddings stay with the target, which shares them. TrainingError when the drafter cannot be read, when
    no engine has its method or would feed it as it was trained, and when `out` is there already.
    """
    description = checkpoint.describe(folder)
    name = description["drafter"]
    if name not in exportable():
        served = ", ".join(exportable())
        raise TrainingError(
            f"{name} cannot be exported: for targets with images, serving engines load {served}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} is there already: name a new folder")
    info = TargetInfo.from_dict(description["target"])
    nothing = torch.empty(0, info.hidden_size)
    drafter = checkpoint.load(folder, Head(nothing, nothing), info)
    assert isinstance(drafter, Drafter)
    published = drafter.published()
    assert published is not None
    settings, weights = published
    number = getattr(torch, dtype)
    held = {  # copies: parts of one matrix share its memory, which a file cannot
        key: value.detach().to(number if value.is_floating_point() else value.dtype, copy=True)
        for key, value in weights.items()
    }
    checkpoint.put(out, {**settings, "torch_dtype": dtype}, held)
    return {
        "drafter": name,
        "target": description["provenance"]["target"],
        "out": str(out),
        "dtype": dtype,
        "parameters": sum(value.numel() for value in held.values() if value.is_floating_point()),
        "draft_vocabulary": settings["draft_vocab_size"],
        "layers": settings["eagle_aux_hidden_state_layer_ids"],
    }
