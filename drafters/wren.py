"""Wren -- a combination of what held in the papers' methods; no paper (docs/measurements/wren.md).

Idea: with visual tokens hidden (HiViS), what an image shows must be in the target's text
states, and those of the last layer only serve the next token. So three depths of the target
(EAGLE-3) join the last state of every committed token. The drafter's own states have no depths;
each guess has a sequential embedding (HiViS) instead. Both halves of an entry are normed
(EAGLE-3): own states then differ from the target's in direction only.
Differs from EAGLE by: no visual positions; the depths; normed entries; sequential embeddings;
two stages of mixed data, the second through four of its own hops without cutting the gradient,
and no noise.
On images: as HiViS; drafting costs the same for any number of visual tokens.

With `cell`, the layer makes the first guess only, and a cell without attention makes the later
ones from its state, as the recurrent head of ReDrafter (arXiv 2403.09919) does from the
target's.

Shapes: N entries, R rows, D hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core import (
    EagleDrafter,
    Entries,
    GuessTable,
    Head,
    KVCache,
    RMSNorm,
    Tree,
)
from vlmdistill.drafters.core.config import (
    EAGLE_AND_TOP_K,
    Count,
    EagleConfig,
    Positions,
    Stage,
    TrainConfig,
    depths,
    states_of,
)
from vlmdistill.stores.schema import Feature, TargetInfo


class Wren(EagleDrafter):
    """One decoder layer over text entries, with three depths of the target in committed ones."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """The ingredients."""

        depths: bool = True
        """The drafter also reads the target's states of a low, a middle and a high layer at each
        committed token; off: the last state alone."""
        normed: bool = True
        """Norm the embedding and the state of an entry."""
        threshold: Count = 3
        """Learned embeddings that tell the drafter how many tokens it has guessed since the last
        committed one; further guesses use the last of them. 0: none."""
        cell: Count = 0
        """Width, in hidden sizes, of a cell that makes all guesses but the first; 0: the layer
        makes all."""
        positions: Positions = "compact"

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states of one depth or of four."""
            return states_of(self.sources(info), "text")

        def sources(self, info: TargetInfo) -> tuple[str, ...]:
            """The last state first, then the depths."""
            if not self.depths:
                return ("hidden",)
            return ("hidden", *depths(info.num_layers))

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Found by the search; losses, mix of samples and hops of HiViS."""

        noise: float = 0.0
        stages: tuple[Stage, ...] = (
            Stage(name="stage1", epochs=20, visual=(0.5, 0.5), losses=EAGLE_AND_TOP_K),
            Stage(
                name="stage2",
                epochs=20,
                visual=(0.5, 0.5),
                hops=4,
                losses=EAGLE_AND_TOP_K,
            ),
        )

    tree = Tree(60, 6, 10)
    config: Config

    @property
    def sources(self) -> tuple[str, ...]:
        """The last state first, then the depths."""
        return self.config.sources(self.info)

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width = info.hidden_size
        eps = info.rms_norm_eps
        self.embed_norm: nn.Module = nn.Identity()
        self.hidden_norm: nn.Module = nn.Identity()
        if config.normed:
            self.embed_norm = RMSNorm(width, eps)
            self.hidden_norm = RMSNorm(width, eps)
        self.sequence = GuessTable(0 if config.cell else config.threshold, width)
        if config.depths:
            self.depth_norm = RMSNorm(width, eps)
            self.depth_fc = nn.Linear(3 * width, width, bias=False)
        if config.cell:
            self.cell_norm = RMSNorm(width, eps)
            self.cell_in = nn.Linear(2 * width, config.cell * width)
            self.cell_out = nn.Linear(config.cell * width, width)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """The layer's pass, or the cell's for later guesses."""
        if self.has_cell and entries.hop:
            return self.cell(self.embed(entries.ids_N), entries.hidden_ND)
        return super().step(entries, cache)

    @property
    def has_cell(self) -> bool:
        """Whether a cell makes all guesses but the first."""
        return self.config.cell > 0

    def cell(self, embed_ND: Tensor, state_ND: Tensor) -> Tensor:
        """g_t + cell([norm(e_{t+1}) ; norm(g_t)]), [N, D].

        The cell attends to nothing and writes nothing to the cache: g_t contains the past.
        """
        read_N2D = torch.stack([embed_ND, state_ND], dim=1)
        normed_N2D = self.cell_norm(read_N2D)
        gate_NX = F.silu(self.cell_in(normed_N2D.flatten(1)))
        added_ND: Tensor = self.cell_out(gate_NX)
        return state_ND + added_ND

    def combine(self, states_NS: Tensor) -> Tensor:
        """The part of `fc` that reads norm(h_t), and for committed tokens the depths; [N, D]."""
        width = self.info.hidden_size
        of_state_DD = self.block.fc.weight[:, width:]
        x_ND = F.linear(self.hidden_norm(states_NS[:, :width]), of_state_DD)
        if states_NS.shape[1] > width:
            depths_N3D = states_NS[:, width:].reshape(-1, 3, width)
            x_ND = x_ND + self.depth_fc(self.depth_norm(depths_N3D).flatten(1))
        return x_ND

    def fuse(
        self,
        embed_ND: Tensor,
        state_ND: Tensor,
        guess_1: Tensor,
        joined_ND: Tensor | None = None,
    ) -> Tensor:
        """fc([norm(e_{t+1}) ; norm(h_t)]) + e_seq; `combine` has computed the half of h_t."""
        of_embed_DD = self.block.fc.weight[:, : self.info.hidden_size]
        x_ND = F.linear(self.embed_norm(embed_ND), of_embed_DD, self.block.fc.bias)
        offset_1D: Tensor = self.sequence(guess_1)
        return x_ND + state_ND + offset_1D
