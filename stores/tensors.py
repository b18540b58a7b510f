"""Between the store's numpy arrays and torch, without a copy where the memory allows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.memory import side_by_side
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


def packed(parts: Sequence[Array], dtype_name: str) -> "torch.Tensor":
    """Rows [n_i, D] of several samples as one tensor [sum of n_i, D].

    It shares their memory where they lie side by side, as the samples of an epoch's batch do.
    """
    return as_torch(side_by_side(parts), dtype_name)
