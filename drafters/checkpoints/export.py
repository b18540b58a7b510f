"""Export: a trained drafter in the form that serving engines load, `config.json` and `model.safetensors`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.serving import KEY, Exportable, unserved
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.input_files import read_bytes, regular
from vlmdistill.stores.schema import Provenance, TargetInfo

DRAFT_TOKENS = (
    4  # of a served chain, where the drafter has as many and its own tree is no chain
)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how vLLM is to be started with it."""

    drafter: str
    target: str
    out: str
    dtype: str
    parameters: int
    draft_vocabulary: int
    target_vocabulary: int
    """vLLM pads the logits of each drafted token to this many."""
    layers: tuple[int, ...]
    """The layers of the target whose inputs it reads; none: the last state alone."""
    engines: tuple[str, ...]
    method: str
    """What vLLM calls it in `--speculative-config`."""
    drops_visual: bool
    """It drafts without visual tokens, or with a few compressed ones."""
    whole_images: bool
    """It needs all visual tokens of an image in one step."""
    draft_tokens: int
    """How many tokens it is to draft."""


def exportable() -> list[str]:
    """The drafters that serving engines load for targets with images."""
    trained = (name for name in catalogue.NAMES if catalogue.is_trained(name))
    return [name for name in trained if issubclass(catalogue.trained(name), Exportable)]


def export(folder: Path, out: Path, dtype: str = "bfloat16") -> Exported:
    """Write the drafter in `folder` to the folder `out` as serving engines load it.

    Embeddings stay with the target, which shares them. TrainingError when the drafter cannot be read, when
    no engine has its method or would feed it as it was trained, when a weight is too large for `dtype`, and
    when `out` holds anything else.
    """
    description = describe(folder)
    name = description["drafter"]
    if name not in exportable():
        served = ", ".join(exportable())
        raise TrainingError(
            f"{name} cannot be exported: for targets with images, serving engines load {served}"
        )
    info = TargetInfo.from_dict(description["target"])
    nothing = torch.empty(0, info.hidden_size)
    drafter = checkpoint.load(folder, Head(nothing, nothing), info)
    if drafter.config.attention_window:
        raise unserved("attention_window", drafter.config.attention_window, 0)
    assert isinstance(drafter, Exportable)
    served_as = drafter.published()
    number = getattr(torch, dtype)
    held = {  # copies: slices of one matrix share its storage, which a file cannot
        key: value.detach().to(
            number if value.is_floating_point() else value.dtype, copy=True
        )
        for key, value in served_as.weights.items()
    }
    files = {
        file: {
            key: one.detach().to(number, copy=True) if isinstance(one, Tensor) else one
            for key, one in content.items()
        }
        for file, content in served_as.files.items()
    }
    if odd := [key for key, value in held.items() if not value.isfinite().all()]:
        raise TrainingError(
            f"{folder}: {odd[0]} holds values too large for {dtype}: use bfloat16 or float32"
        )
    trained = Provenance.from_dict(description["provenance"])
    feeding = msgspec.to_builtins(
        msgspec.structs.replace(served_as.feeding, trained=trained)
    )
    settings = {**served_as.settings, "torch_dtype": dtype, KEY: feeding}
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        checkpoint.put(out, settings, held, files=files)
    elif not _holds(out, settings, held, files):
        raise TrainingError(f"{out} exists: name a new folder")
    most = served_as.feeding.draft_tokens
    wanted = _chain_length(drafter.tree)
    return Exported(
        drafter=name,
        target=trained.target,
        out=str(out),
        dtype=dtype,
        parameters=sum(
            value.numel() for value in held.values() if value.is_floating_point()
        ),
        draft_vocabulary=served_as.draft_vocabulary,
        target_vocabulary=info.vocab_size,
        layers=served_as.layers,
        engines=served_as.engines,
        method=served_as.method,
        drops_visual=served_as.feeding.visual == "dropped",
        whole_images=served_as.feeding.whole_images,
        draft_tokens=most if served_as.whole_block else min(wanted, most or wanted),
    )


def _chain_length(tree: Tree) -> int:
    """How many tokens an engine, which knows chains alone, is to draft.

    A chain that ends where it is unsure is no guide: engines draft all of it.
    """
    own = str(tree) == f"chain-{tree.total - 1}"
    return tree.total - 1 if own else DRAFT_TOKENS


def _holds(
    folder: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
) -> bool:
    """Whether a folder has exactly these settings, weights and further files."""
    try:
        there = read_weights(folder / "model.safetensors")
        others = {
            name: torch.load(regular(folder / name), weights_only=True)
            for name in files
        }
        same = json.loads(read_bytes(folder / "config.json")) == json.loads(
            json.dumps(settings)
        )
    except Exception:  # noqa: BLE001 (bytes of a stranger: the unpickler raises what it meets)
        return False
    return (
        same
        and _equal(there, weights)
        and all(_equal(others[name], one) for name, one in files.items())
    )


def _equal(ones: object, others: Mapping[str, Any]) -> bool:
    """Whether both hold the same tensors and numbers under the same names, bit by bit."""
    if not isinstance(ones, Mapping) or ones.keys() != others.keys():
        return False
    pairs = [(ones[key], other) for key, other in others.items()]
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else type(one) is type(other) and one == other
        for one, other in pairs
    )
