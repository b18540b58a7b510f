"""EAGLE-2 -- EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, EMNLP 2024.

Idea: one decoder layer continues the target's last-layer states instead of its tokens, each entry seeing
the token that was sampled; a tree grows where the drafter is confident. The baseline of four of the papers.
Differs from EAGLE by: nothing in the drafter; the dynamic tree of section 4 takes the place of a fixed one.
Adapted to images as they do: visual tokens are entries like any others, with the projected
visual vector in the place of the token embedding.
Departs from the official code in: supervision starts at the first drafted token (the code's unshifted mask
leaves out the first one); gradients are clipped by norm; the schedule is the one under which the ViSpec paper
trains it, the tree its own; samples may have 4096 tokens, not 2048, for the sake of larger images.

Shapes: E entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class Eagle2(Drafter):
    """One decoder layer over [embedding ; state] of every position, visual ones included."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: EAGLE's losses, and the schedule under which the ViSpec paper trains it."""

        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=20, visual=(0, 0), learning_rate=3e-5),
            Stage(name="multimodal", epochs=20, visual=(1, 1), learning_rate=3e-5),
        )

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """States everywhere, and the visual embeddings."""
        return frozenset({Feature("hidden", "text"), Feature("hidden", "visual"), Feature("embed", "visual")})

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads)

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Visual tokens enter as [visual embedding ; state before it], at their expanded positions."""
        hidden_ND, found_N = batch.before("hidden")
        text = len(batch.ids_T)
        x_UD = self.fc(torch.cat([batch.feature("embed", "visual"), hidden_ND[text:]], dim=-1))
        places = batch.visual_places
        seen_U = found_N[text:]
        self.layer.remember(x_UD[seen_U], places.order_N[seen_U] - 1, places.only(seen_U), memory)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Eq. of EAGLE section 3: layer(fc([e_{t+1} ; h_t])) -> g_{t+1}."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
