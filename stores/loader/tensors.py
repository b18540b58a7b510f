"""Conversion between numpy arrays of a store and torch tensors, without a copy where possible."""

from typing import TYPE_CHECKING

import numpy as np

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import Array

if TYPE_CHECKING:
    import torch


def as_torch(array: Array, dtype_name: str) -> "torch.Tensor":
    """A tensor over the memory of a stored array.

    Args:
        array: Rows of a feature as the store returns them, of any shape. A read-only array, or one with
            negative strides, is copied: torch cannot hold it.
        dtype_name: Number format of the store, such as `bfloat16`, whose bits are stored as uint16.

    Returns:
        A tensor of the same shape.

    Raises:
        StoreError: torch has no such dtype.

    Example:
        >>> hidden_TD = vlmdistill.as_torch(sample.features[feature], store.provenance.dtype)
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
    """A tensor as an array to store, over the same memory if it is on the CPU.

    Args:
        tensor: Any tensor.

    Returns:
        An array of the same shape; bfloat16 becomes uint16, with the same bits.

    Example:
        >>> features = {feature: vlmdistill.as_numpy(hidden_TD)}
    """
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    return tensor.numpy()
