"""HASS -- Learning Harmonized Representations for Speculative Sampling, ICLR 2025.

Idea: EAGLE learns on the target's states and drafts on its own. HASS trains it as it drafts: three steps,
each on the states of the one before, aligned so that a query sees the target's states up to where the
guesses begin and the guess of the right step at every later position (section 3.2); and it learns most
about the target's ten likeliest tokens, which are all that a tree will hold (section 3.1).
Differs from EAGLE by: multi-step training and the top-K loss; drafter and decoding are EAGLE-2's.
Adapted to images as EAGLE-2 is: visual tokens are entries like any others, with the projected visual vector
in the place of the token embedding. The two stages of the code, both on text, are text and images here, as
for EAGLE-2: three steps without the top-K loss, then with it at a lower learning rate.
Departs from the official code in: masked scores are minus infinity, as they are in decoding (the code
multiplies them by zero, which leaves every later position, and any padding, its share of the softmax);
supervision starts at the first drafted token, and a row counts for as long as it starts and stays within one
response (the code's unshifted mask leaves out the first one); gradients are clipped by norm; samples may
have 4096 tokens, not 2048, for the sake of targets with larger images.

Shapes: E entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage, Tree
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class Hass(Drafter):
    """One decoder layer over [embedding ; state] of every position, visual ones included."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: the official code's steps, losses, epochs, learning rates, warm-up, batch and tree."""

        tree: Tree = Tree(60, 5, 10)
        batch_tokens: int = 32768
        warmup: float = 0.01
        detach: bool = True
        stages: tuple[Stage, ...] = (
            Stage(
                name="text",
                epochs=40,
                visual=(0, 0),
                hops=3,
                learning_rate=3e-5,
                losses={"regression": 1.0, "cross_entropy": 0.1},
            ),
            Stage(
                name="multimodal",
                epochs=10,
                visual=(1, 1),
                hops=3,
                learning_rate=1e-5,
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
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
        """EAGLE's step, layer(fc([e_{t+1} ; h_t])) -> g_{t+1}; at hop n, h_t is its own g_t of hop n - 1."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
