"""Checkpoints with the matrices of their text layers in the formats that are published."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 16
PLACES = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # the columns in an int32 of AutoAWQ, from the lowest bits on
EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**EIGHT, "strategy": "channel", "dynamic": False},
                "input_activations": {**EIGHT, "strategy": "token", "dynamic": True},
            }
        },
    },
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": BLOCK,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["visual"],
    },
}

Parts = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by their kind, and the numbers that they stand for."""


def quantised(target: Path, out: Path, kind: str) -> dict[str, Tensor]:
    """Write the target in a format to `out`; the numbers that its weights stand for, by name."""
    shutil.copytree(target, out)
    weights, numbers = load_file(target / "model.safetensors"), {}
    for name in [
        one for one in weights if one.endswith("_proj.weight") and "visual" not in one
    ]:
        parts, numbers[name] = FORMATS[kind](weights.pop(name).float())
        weights |= {
            f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()
        }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps({**config, "quantization_config": CONFIGS[kind]})
    )
    return numbers


def _int8(weight_OI: Tensor) -> Parts:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    eight_OI = (weight_OI / scale_O1).round().to(torch.int8)
    return {"weight": eight_OI, "weight_scale": scale_O1}, eight_OI * scale_O1


def _fp8(weight_OI: Tensor) -> Parts:
    """A scale for each block."""
    rows, columns = (size // BLOCK for size in weight_OI.shape)
    blocks = weight_OI.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    eight = (blocks / scale).to(torch.float8_e4m3fn)
    parts = {
        "weight": eight.reshape(weight_OI.shape),
        "weight_scale_inv": scale[:, 0, :, 0].contiguous(),
    }
    return parts, (eight.float() * scale).reshape(weight_OI.shape)


def _awq(weight_OI: Tensor) -> Parts:
    """A scale and a zero for each row and group."""
    groups_OGN = weight_OI.view(len(weight_OI), -1, BLOCK)
    low, high = groups_OGN.amin(2, keepdim=True), groups_OGN.amax(2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-5).half()  # a group may be all zeros
    zero = (-low / scale).round().clamp(0, 15)
    four_OGN = (groups_OGN / scale + zero).round().clamp(0, 15)
    parts = {
        "qweight": _packed(four_OGN.flatten(1).T),
        "qzeros": _packed(zero[:, :, 0].T),
        "scales": scale[:, :, 0].T.contiguous(),
    }
    return parts, ((four_OGN - zero) * scale.float()).flatten(1)


def _packed(four_NO: Tensor) -> Tensor:
    eights = (
        four_NO.reshape(len(four_NO), -1, 8)[:, :, PLACES].numpy().astype(np.uint32)
    )
    whole = (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(2, dtype=np.uint32)
    return torch.from_numpy(np.ascontiguousarray(whole).view(np.int32))


FORMATS: dict[str, Callable[[Tensor], Parts]] = {
    "int8": _int8,
    "fp8": _fp8,
    "awq": _awq,
}
