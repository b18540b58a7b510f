"""Training on a CPU: faster float32 products, no page faults for blocks of logits, bounded memory."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
TRIM_EVERY = 32
"""Steps. Batches differ in length, so that freed blocks of logits rarely fit the next ones."""
KERNELS = 64
"""Kernels that oneDNN keeps, one for each shape of a bfloat16 product. By default it keeps 1,024."""
MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@contextmanager
def tuned() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices where it is as exact as MKL, and glibc keep freed memory.

    MKL has no AVX-512 kernels for the CPUs of other makers. The setting would allow oneDNN to round to
    bfloat16, as it does on a CPU with AMX: there, nothing changes. Freed memory is kept until `trim`: page
    faults of new blocks take a third of a step with a vocabulary of 152,064.
    """
    # oneDNN reads it at its first product.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))
    before = MATMUL.fp32_precision
    libc = _libc()
    if libc:
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    MATMUL.fp32_precision = "bf16" if _exact() else before
    try:
        yield
    finally:
        MATMUL.fp32_precision = before


def trim() -> None:
    """Return freed memory to the system; without a GPU, on Linux."""
    libc = _libc()
    if libc:
        libc.malloc_trim(0)


@cache
def _libc() -> Any:
    """glibc, if this process computes on the CPU; None elsewhere."""
    if sys.platform != "linux" or torch.cuda.is_available():
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None  # musl has none


@cache
def _exact() -> bool:
    """Whether products under the setting have the error of float32; rounding to bfloat16 errs by 2^-9."""
    generator = torch.Generator().manual_seed(0)
    a_MK = torch.rand(256, 256, generator=generator, device="cpu")
    b_KN = torch.rand(256, 256, generator=generator, device="cpu")
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "bf16"
    try:
        product_MN = a_MK @ b_KN
        exact_MN = a_MK.double() @ b_KN.double()
        error = (product_MN - exact_MN).abs().max()
    finally:
        MATMUL.fp32_precision = before
    return bool(error < 256 * 2.0**-20)
