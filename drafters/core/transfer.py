"""Small tensors on their way from the CPU to a GPU, without a wait on either side.

What follows from tokens alone is worked out on the CPU, and the GPU gets the results. To read
them back from the GPU would make the CPU wait until the GPU has done all its queued work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device; from a CPU to a GPU through pinned memory, without a wait."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def place_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Integer or bool tensors on that device; from a CPU to a GPU in one transfer."""
    all_on_cpu = all(tensor.is_cpu for tensor in tensors)
    if device.type != "cuda" or not all_on_cpu:
        return [place(tensor, device) for tensor in tensors]
    flat = [tensor.flatten().long() for tensor in tensors]
    packed = place(torch.cat(flat), device)
    parts = torch.split(packed, [len(values) for values in flat])
    placed = []
    for tensor, part in zip(tensors, parts, strict=True):
        part = part.view(tensor.shape)
        placed.append(part.to(tensor.dtype))
    return placed
