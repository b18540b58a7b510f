"""Between the store's numpy arrays and torch, without a copy where the memory allows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.layout import STORAGE
from vlmdistill.stores.schema import Array

if TYPE_CHECKING:
    import torch


def as_torch(array: Array, dtype_name: str) -> "torch.Tensor":
    """A tensor over the same memory; bfloat16 is read from uint16 bits.

    Copies only what torch cannot hold: read-only or negatively strided arrays.
    """
    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"'{dtype_name}' is not a torch dtype")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if dtype_name == "bfloat16" and array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array).to(dtype)


def as_numpy(tensor: "torch.Tensor") -> Array:
    """An array over the same memory where it is on the CPU; bfloat16 becomes uint16 bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    return tensor.numpy()


class Packer:
    """Joins the ragged rows of a batch into one tensor, in memory that is used again.

    Fresh memory costs more than the copy itself, so a result is valid until the call `ring` later.
    """

    def __init__(self, dtype_name: str, ring: int = 2, pin: bool = False) -> None:
        if dtype_name not in STORAGE:
            raise StoreError(f"'{dtype_name}' is not a stored dtype: use one of {', '.join(STORAGE)}")
        self._dtype = dtype_name
        self._pin = pin
        self._ring: list[Any] = [None] * ring
        self._turn = 0

    def pack(self, parts: Sequence[Array]) -> "torch.Tensor":
        """Rows [n_i, D] of several samples -> one tensor [sum of n_i, D]."""
        import torch

        rows, width = sum(len(part) for part in parts), parts[0].shape[1]
        self._turn = (self._turn + 1) % len(self._ring)
        held = self._ring[self._turn]
        if held is None or held.numel() < rows * width:
            held = torch.empty(rows * width * 5 // 4, dtype=getattr(torch, self._dtype), pin_memory=self._pin)
            self._ring[self._turn] = held
        packed: torch.Tensor = held[: rows * width].view(rows, width)
        np.concatenate(parts, out=as_numpy(packed))
        return packed
