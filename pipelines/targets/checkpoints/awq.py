"""AWQ: a checkpoint of 4-bit weights, read as the numbers that they stand for.

A linear layer has `qweight` int32 [in, out / 8], `qzeros` int32 [in / group, out / 8] and `scales` float16
[in / group, out]. transformers reads these by kernels for GPUs alone, which multiply without unpacking.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vlmdistill.pipelines.targets.checkpoints.folder import weight_files
from vlmdistill.stores.errors import TargetError

METHOD = "awq"
SETTINGS = {"bits": 4, "version": "gemm", "zero_point": True}  # of AutoAWQ
# The place of each of eight columns of four bits in an int32.
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def weights(
    folder: Path, quantised: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of an AWQ checkpoint on the CPU, its 4-bit weights unpacked to `dtype`.

    `quantised` is its `quantization_config`; TargetError for another packing than AutoAWQ's.
    """
    for setting, readable in SETTINGS.items():
        value = quantised.get(setting, readable)
        if value != readable:
            raise TargetError(
                f"{folder}: AWQ with {setting} {value} cannot be read, "
                f"only with {readable}"
            )
    stored: dict[str, Tensor] = {}
    for file in weight_files(folder):
        stored.update(load_file(file))
    tensors = {}
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind == "qweight":
            try:
                zeros_GO = stored[f"{layer}.qzeros"]
                scales_GO = stored[f"{layer}.scales"]
                weight_OI = _weight(tensor, zeros_GO, scales_GO)
            except (KeyError, RuntimeError):
                raise TargetError(
                    f"{folder}: {layer} has no qzeros and scales that fit its qweight: "
                    "download it again"
                ) from None
            tensors[f"{layer}.weight"] = weight_OI.to(dtype)
        elif kind not in ("qzeros", "scales"):
            tensors[name] = tensor
    return tensors


def _weight(packed_IO: Tensor, zeros_GO: Tensor, scales_GO: Tensor) -> Tensor:
    """The weight float32 [out, in] of rows I in groups G."""
    groups, out = scales_GO.shape
    numbers_GIO = _unpacked(packed_IO).view(groups, -1, out)
    zeros_G1O = _unpacked(zeros_GO).view(groups, 1, out)
    scales_G1O = scales_GO[:, None].float()
    weight_GIO = (numbers_GIO - zeros_G1O) * scales_G1O
    return weight_GIO.flatten(0, 1).T.contiguous()


def _unpacked(packed_NO: Tensor) -> Tensor:
    """The numbers 0 to 15 of int32, as int32 [N, 8 * O]."""
    shifts_8 = 4 * torch.tensor(PLACE, dtype=torch.int32)
    return (packed_NO[:, :, None] >> shifts_8 & 15).flatten(1)
