"""Text-only -- On Speculative Decoding for Multimodal Large Language Models, CVPR 2024 workshops.

Idea: a drafter that knows language alone speeds up a VLM, because most of a response is language.
Differs from EAGLE by: no visual token is stored, read or drafted from, and training is on text alone.
The drafter is EAGLE-2's layer on the target's text states, as in the MSD paper's baseline of this name.

Shapes: N entries, R rows, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from vlmdistill.drafters.core import Drafter, EagleBlock, Entries, Head, KVCache
from vlmdistill.drafters.core.config import ModelConfig, Stage, TrainConfig, features
from vlmdistill.drafters.core.serving import ServedDrafter, served_block
from vlmdistill.stores.schema import Feature, TargetInfo


class TextOnly(Drafter):
    """One decoder layer over [embedding ; state] of text tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """EAGLE's layer has no switches."""

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """Text states."""
            return features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """EAGLE's losses, and twice its epochs, since the other drafters have two stages."""

        stages: tuple[Stage, ...] = (Stage(name="text", epochs=40, visual=(0, 0), learning_rate=3e-5),)

    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block = EagleBlock(info, kv_heads=config.kv_heads)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """EAGLE's step, layer(fc([e_{t+1} ; h_t])) -> g_{t+1}, over text entries."""
        return self.block(self.embed(entries.ids_N), entries.hidden_ND, entries, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it: without visual tokens and their states."""
        return served_block(self, self.block, visual="dropped", after_image="text")
