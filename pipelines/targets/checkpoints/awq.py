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
PLACE = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # of each of eight columns in an int32, four bits a place


def weights(
    folder: Path, quantised: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of an AWQ checkpoint, those of 4 bits unpacked in `dtype` on the CPU.

    `quantised` is its `quantization_config`; TargetError for another packing than AutoAWQ's.
    """
    for setting, ours in (("bits", 4), ("version", "gemm"), ("zero_point", True)):
        if (found := quantised.get(setting, ours)) != ours:
            raise TargetError(
                f"{folder}: AWQ with {setting} {found} cannot be read, only with {ours}"
            )
    stored = {
        name: one
        for file in weight_files(folder)
        for name, one in load_file(file).items()
    }
    numbers = {}
    for name, one in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind == "qweight":
            try:
                parts = one, stored[f"{layer}.qzeros"], stored[f"{layer}.scales"]
                numbers[f"{layer}.weight"] = _numbers(*parts).to(dtype)
            except (KeyError, RuntimeError):
                raise TargetError(
                    f"{folder}: {layer} has no qzeros and scales that fit its qweight: download it again"
                ) from None
        elif kind not in ("qzeros", "scales"):
            numbers[name] = one
    return numbers


def _numbers(packed_IO: Tensor, zeros_GO: Tensor, scales_GO: Tensor) -> Tensor:
    """The weight float32 [out, in] of rows I in groups G."""
    groups, out = scales_GO.shape
    four_GIO, zeros_G1O = (
        _unpacked(packed_IO).view(groups, -1, out),
        _unpacked(zeros_GO).view(groups, 1, out),
    )
    return (
        ((four_GIO - zeros_G1O) * scales_GO[:, None].float())
        .flatten(0, 1)
        .T.contiguous()
    )


def _unpacked(packed_NO: Tensor) -> Tensor:
    """The numbers 0 to 15 of int32, as int32 [N, 8 * O]."""
    shifts_8 = 4 * torch.tensor(PLACE, dtype=torch.int32)
    return (packed_NO[:, :, None] >> shifts_8 & 15).flatten(1)
