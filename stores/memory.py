"""Memory for batches, used again: fresh memory costs more than copying into it."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmdistill.stores.schema import Array


class Pool:
    """Lends arrays; their memory comes back once nobody holds them, a view or a tensor over them."""

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Pool, ())

    def take(self, rows: int, width: int, dtype: str) -> Array:
        """An array [rows, width] of whatever was there before."""
        size = rows * width * np.dtype(dtype).itemsize
        if not size:
            return np.empty((rows, width), dtype)
        with self._lock:
            fitting = [at for at, block in enumerate(self._free) if len(block) >= size]
            if fitting:
                block = self._free.pop(min(fitting, key=lambda at: len(self._free[at])))
            else:
                del self._free[:1]  # too small by now: a larger one takes its place
                block = np.empty(size + size // 4, np.uint8)
        # An object of its own, which all views of it hold: it goes when the last of them does.
        lent = np.frombuffer(block.data[:size], dtype)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent.reshape(rows, width)


def side_by_side(parts: Sequence[Array]) -> Array:
    """Rows [n_i, D] one after the other [sum of n_i, D], copied only where they do not lie so already."""
    held = [part for part in parts if len(part)] or parts[:1]
    first = held[0]
    whole, end = first.base, _address(first)
    start = end
    for part in held:
        like = part.base is whole and part.dtype == first.dtype and part.flags.c_contiguous
        if not like or _address(part) != end:
            return np.concatenate(parts)
        end += part.nbytes
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.dtype != first.dtype:
        return first if len(held) == 1 else np.concatenate(parts)
    skip = (start - _address(whole)) // first.itemsize
    return whole[skip : skip + (end - start) // first.itemsize].reshape(-1, first.shape[1])


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
