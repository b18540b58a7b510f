"""Text-only -- On Speculative Decoding for Multimodal Large Language Models, CVPR 2024 workshops.

Idea: a drafter that knows language alone speeds up a VLM, for most of an answer is language.
Differs from EAGLE by: no visual token is stored, read or drafted from, and training is on text alone.
Departs from the paper, as the MSD paper's baseline of that name does: the drafter is EAGLE-2's layer on the
target's text states, which have taken the images in, where the paper has a language model of 115M of its own.
Positions are those of the text in the expanded sequence; no state of a visual token is held, so the first
token after an image is paired with the state of the last text token before it.

Shapes: E entries, R rows, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Drafter, DrafterConfig, Entries, Head, Stage
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class TextOnly(Drafter):
    """One decoder layer over [embedding ; state] of text tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: EAGLE's losses, and twice its epochs, since the other drafters have two stages."""

        stages: tuple[Stage, ...] = (Stage(name="text", epochs=40, visual=(0, 0), learning_rate=3e-5),)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states."""
        return frozenset({Feature("hidden", "text")})

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """EAGLE's step, layer(fc([e_{t+1} ; h_t])) -> g_{t+1}, over text entries."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
