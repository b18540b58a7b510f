"""Large weights in the layout in which oneDNN multiplies them by a few rows on a CPU.

PyTorch brings a plain matrix into blocks at each product: one of bfloat16 always, one of float32 for several
rows. So four rows in float32 take nearly twice as long as one, although both read the same weights. Here the
blocks are made once. `torch.compile` with freezing calls the same two functions. `python -m benchmarks.rows`
measures both.

Shapes: N rows, I inputs, O outputs.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.decoding import hardware

FEWEST = {torch.float32: 3, torch.bfloat16: 1}
"""Rows from which blocks are faster."""
ROWS = 4
"""The number of rows that the layout is chosen for; others can be multiplied as well."""
LARGE = {torch.float32: 1 << 19, torch.bfloat16: 1 << 16}
"""Numbers of a matrix, in the mean over a layer's, from which blocks pay.

A call of oneDNN's product costs some 10 us more: `python -m benchmarks.rows --width 256`.
"""
SHARE = 0.25
"""Of the machine's memory that the blocks may take: they are a second copy of the weights."""


def fewest_rows(weights: Sequence[Tensor]) -> float:
    """The rows from which blocks of these weights are faster; infinite where they do not help or fit."""
    first = weights[0]
    numbers = sum(weight.numel() for weight in weights)
    if first.device.type != "cpu" or not _multiplies(first.dtype):
        return math.inf
    if numbers < LARGE[first.dtype] * len(weights):
        return math.inf
    machine = hardware.of(first.device)
    memory = min(machine.memory or 0, machine.limits.memory or hardware.UNLIMITED)
    if first.itemsize * numbers > SHARE * memory:
        return math.inf
    return FEWEST[first.dtype]


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is here, and this CPU has instructions for the dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedWeight:
    """The blocks of a weight [O, I]."""

    def __init__(self, weight: Tensor) -> None:
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def times(self, rows_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear` of these rows: [N, O]."""
        product_NO: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows_NI, self.blocks, bias_O, "none", [], ""
        )
        return product_NO


class LMHead:
    """An LM head [O, I] for one row or a few; its blocks are made when they are first of use."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight_OI = weight_OI
        self._packed_from = fewest_rows([weight_OI])
        self._packed: PackedWeight | None = None

    def times(self, rows_NI: Tensor) -> Tensor:
        """`F.linear` of these rows: [N, O]."""
        if len(rows_NI) < self._packed_from:
            return F.linear(rows_NI, self.weight_OI)
        if self._packed is None:
            self._packed = PackedWeight(self.weight_OI)
        return self._packed.times(rows_NI)
