"""The input of a served drafter's layer, computed from buffers.

A CUDA graph repeats operations on the same memory. So what changes between the passes of a drafter is in
buffers as long as the longest pass, and `entries` reads no attribute that changes.

Shapes: N rows of a pass, K rows of the next one, X rows that carry compressed images, D hidden.
"""

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.eagle_drafter import EagleDrafter


class LayerInput(nn.Module):
    """Entries and their rotary positions, by the drafter's own code."""

    guess_1: Tensor
    """Number of guesses before the rows of a pass."""
    ahead_N: Tensor
    """Added to the positions of a pass, on the V2 runner."""
    raw_N: Tensor
    """Rows of a first pass that enter as bare visual embeddings."""
    carries_N: Tensor
    """Rows of a first pass that carry compressed images."""
    carried_ND: Tensor
    """The compressed images, in these rows."""
    joined_ND: Tensor
    """The vectors that are joined to the states of a pass."""

    def __init__(self, drafter: EagleDrafter, rows: int, longest: int) -> None:
        """Buffers for passes of at most so many rows, at positions below `longest`."""
        super().__init__()
        self.drafter = drafter
        self.longest = longest
        self._shifted = 0  # rows of `ahead_N` that are not zero
        width = drafter.info.hidden_size
        buffers = {
            "guess_1": torch.zeros(1, dtype=torch.long),
            "ahead_N": torch.zeros(rows, dtype=torch.long),
        }
        if drafter.visual == "raw":
            buffers["raw_N"] = torch.zeros(rows, dtype=torch.bool)
        if drafter.compresses is not None:
            buffers["carries_N"] = torch.zeros(rows, dtype=torch.bool)
            buffers["carried_ND"] = torch.zeros(rows, width)
        if drafter.joins:
            buffers["joined_ND"] = torch.zeros(rows, width)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def shift(self, ahead_K: Tensor | None) -> None:
        """Add to the positions of the next passes; None: nothing."""
        count = 0 if ahead_K is None else len(ahead_K)
        if ahead_K is not None:
            self.ahead_N[:count] = ahead_K
        if count < self._shifted:
            self.ahead_N[count : self._shifted] = 0
        self._shifted = count

    def mark_raw(self, raw_K: Tensor) -> None:
        """Rows of the next first pass that enter as bare visual embeddings."""
        self.raw_N[: len(raw_K)].copy_(raw_K, non_blocking=True)

    def carry(self, row_X: Tensor, carried_XD: Tensor) -> None:
        """Put compressed images into rows of the next first pass."""
        self.carries_N[row_X] = True
        self.carried_ND[row_X] = carried_XD.to(self.carried_ND.dtype)

    def entries(
        self, position_N: Tensor, hidden_ND: Tensor, embed_ND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotary positions and inputs of the layer, [N] and [N, D]."""
        count = len(hidden_ND)
        drafter = self.drafter
        # A graph may have padded the rows: their sums may be out of range.
        rotary_N = (position_N + self.ahead_N[:count]).clamp(0, self.longest - 1)
        state_ND = drafter.combine(hidden_ND)
        if drafter.taps:  # the states of committed tokens are combined already
            state_ND = torch.where(self.guess_1 > 0, state_ND, hidden_ND)
        joined_ND = self.joined_ND[:count] if drafter.joins else None
        x_ND = drafter.fuse(embed_ND, state_ND, self.guess_1, joined_ND)
        if drafter.compresses is not None:
            carries_N = self.carries_N[:count] & (self.guess_1 == 0)
            x_ND = torch.where(carries_N[:, None], self.carried_ND[:count], x_ND)
        if drafter.visual == "raw":
            raw_N = self.raw_N[:count] & (self.guess_1 == 0)
            x_ND = torch.where(raw_N[:, None], embed_ND, x_ND)
        return rotary_N, x_ND
