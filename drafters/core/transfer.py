"""Small tensors on their way from the CPU to a GPU, for which neither waits.

What is known of the tokens of a batch on the CPU is computed there, and what a GPU needs of it is sent:
reading it back would make the CPU wait until the GPU has done all that was asked of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device: from a CPU to a GPU through pinned memory and without waiting for it."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def place_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of whole numbers or truth values on that device, from a CPU to a GPU in one transfer."""
    if device.type != "cuda" or not all(tensor.is_cpu for tensor in tensors):
        return [place(tensor, device) for tensor in tensors]
    packed = place(torch.cat([tensor.flatten().long() for tensor in tensors]), device)
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
