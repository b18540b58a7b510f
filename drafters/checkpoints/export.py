"""Export: a trained drafter in the form that serving engines load, `config.json` and `model.safetensors`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.speculators import in_speculators
from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.serving import KEY, Exportable, ServedDrafter, unserved
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.input_files import read_bytes, regular
from vlmdistill.stores.schema import Provenance, TargetInfo
from vlmdistill.stores.suggestions import did_you_mean

DTYPES = ("bfloat16", "float16", "float32")
Layout = Literal["engine", "speculators"]
DRAFT_TOKENS = 4
"""Of a served chain, where the drafter's own tree is none."""


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
    plugin: bool
    """Whether vLLM needs the plugin of this package for it, else the format is that of speculators."""
    method: str
    """What vLLM calls it in `--speculative-config`."""
    drops_visual: bool
    """It drafts without visual tokens, or with a few compressed ones."""
    whole_images: bool
    """It needs all visual tokens of an image in one step."""
    draft_tokens: int
    """How many tokens it is to draft."""
    thinking: str = ""
    """The `--thinking` of its training."""


def exportable() -> list[str]:
    """The drafters that serving engines load for targets with images."""
    trained = [name for name in catalogue.NAMES if catalogue.is_trained(name)]
    return [name for name in trained if issubclass(catalogue.trained(name), Exportable)]


def export(
    folder: Path, out: Path, dtype: str = "bfloat16", layout: Layout = "engine"
) -> Exported:
    """Write the drafter in `folder` to the folder `out` as serving engines load it, or as speculators does.

    Embeddings stay with the target, which shares them. TrainingError when the drafter cannot be read, when
    no engine has its method or would feed it as it was trained, when `dtype` is none or too small for a
    weight, and when `out` holds anything else.
    """
    if dtype not in DTYPES:
        near = did_you_mean(dtype, DTYPES)
        raise TrainingError(
            f"'{dtype}' is not a dtype: choose from {', '.join(DTYPES)}{near}"
        )
    description = describe(folder)
    name = description["drafter"]
    if name not in exportable():
        raise TrainingError(
            f"{name} cannot be exported: for targets with images, serving engines load "
            f"{', '.join(exportable())}"
        )
    info = TargetInfo.from_dict(description["target"])
    no_tables = torch.empty(0, info.hidden_size)
    drafter = checkpoint.load(folder, Head(no_tables, no_tables), info)
    if drafter.config.attention_window:
        raise unserved("attention_window", drafter.config.attention_window, 0)
    assert isinstance(drafter, Exportable)
    served = drafter.published()
    tokens = _draft_tokens(served, drafter.tree)
    trained = Provenance.from_dict(description["provenance"])
    if layout == "speculators":
        served = in_speculators(served, tokens, trained.target)
    weights = _cast(served.weights, dtype)
    for key, value in weights.items():
        if not value.isfinite().all():
            raise TrainingError(
                f"{folder}: {key} holds values too large for {dtype}: use bfloat16 or float32"
            )
    settings = {**served.settings, "torch_dtype": dtype}
    feeding = msgspec.structs.replace(served.feeding, trained=trained)
    if layout == "engine":
        settings[KEY] = msgspec.to_builtins(feeding)
    files = {
        name: _cast_values(content, dtype) for name, content in served.files.items()
    }
    _write(out, settings, weights, files)
    return Exported(
        drafter=name,
        target=trained.target,
        out=str(out),
        dtype=dtype,
        parameters=_count_parameters(weights),
        draft_vocabulary=served.draft_vocabulary,
        target_vocabulary=info.vocab_size,
        layers=served.layers,
        engines=served.engines,
        plugin=layout == "engine",
        method=served.method,
        drops_visual=feeding.visual == "dropped",
        whole_images=feeding.whole_images,
        draft_tokens=tokens,
        thinking=trained.thinking,
    )


def _cast(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of weights; floating-point ones in that dtype.

    Slices of one matrix share its storage, which the file of weights cannot: so all are copied.
    """
    floating = getattr(torch, dtype)
    cast: dict[str, Tensor] = {}
    for key, value in weights.items():
        kind = floating if value.is_floating_point() else value.dtype
        cast[key] = value.detach().to(kind, copy=True)
    return cast


def _count_parameters(weights: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in weights.values() if value.is_floating_point())


def _draft_tokens(served: ServedDrafter, tree: Tree) -> int:
    """How many tokens an engine is to draft: engines know chains only.

    A chain that ends where it is unsure is no guide, since engines draft all of it.
    """
    most = served.feeding.draft_tokens
    if served.whole_block:
        return most
    is_chain = str(tree) == f"chain-{tree.total - 1}"
    wanted = tree.total - 1 if is_chain else DRAFT_TOKENS
    return min(wanted, most or wanted)


def _write(
    out: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the folder; TrainingError if it holds anything else already."""
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if is_empty:
        checkpoint.put(out, settings, weights, files=files)
    elif not _holds(out, settings, weights, files):
        raise TrainingError(f"{out} exists: name a new folder")


def _cast_values(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of a further file, with tensors in that dtype."""
    floating = getattr(torch, dtype)
    return {
        key: value.detach().to(floating, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in content.items()
    }


def _holds(
    folder: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
) -> bool:
    """Whether a folder has exactly these settings, weights and further files."""
    try:
        stored_settings = json.loads(read_bytes(folder / "config.json"))
        stored_weights = read_weights(folder / "model.safetensors")
        stored_files = {
            name: torch.load(regular(folder / name), weights_only=True)
            for name in files
        }
    except Exception:  # noqa: BLE001 (bytes of a stranger: the unpickler raises what it meets)
        return False
    if stored_settings != json.loads(json.dumps(settings)):
        return False
    same_files = [_equal(stored_files[name], files[name]) for name in files]
    return _equal(stored_weights, weights) and all(same_files)


def _equal(stored: object, content: Mapping[str, Any]) -> bool:
    """Whether both hold the same tensors and numbers under the same names, bit by bit."""
    if not isinstance(stored, Mapping) or stored.keys() != content.keys():
        return False
    return all(_equal_value(stored[key], value) for key, value in content.items())


def _equal_value(stored: object, value: object) -> bool:
    if isinstance(stored, Tensor) and isinstance(value, Tensor):
        return stored.dtype == value.dtype and torch.equal(stored, value)
    return type(stored) is type(value) and stored == value
