"""EAGLE-2 -- EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, EMNLP 2024.

Idea: one decoder layer predicts the target's next last-layer state from the states so far and the token that
was sampled; the draft tree grows where the drafter is confident. The baseline of four of the papers.
Differs from EAGLE by: the dynamic tree (section 4); the drafter is the same.
On images: visual tokens are entries like text tokens, with the projected visual vector as embedding.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from vlmdistill.drafters.core import Batch, Drafter, EagleBlock, Entries, Head, KVCache
from vlmdistill.drafters.core.config import ModelConfig, Stage, TrainConfig, features
from vlmdistill.drafters.core.serving import ServedDrafter, served_block
from vlmdistill.stores.schema import Feature, TargetInfo


class Eagle2(Drafter):
    """One decoder layer over [embedding ; state] of every position, visual ones included."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """EAGLE's layer has no switches."""

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """States everywhere, and the visual embeddings."""
            return features("hidden.text", "hidden.visual", "embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """EAGLE's losses, and the schedule with which the ViSpec paper trains it."""

        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=20, visual=(0, 0), learning_rate=3e-5),
            Stage(name="multimodal", epochs=20, visual=(1, 1), learning_rate=3e-5),
        )

    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block = EagleBlock(info, kv_heads=config.kv_heads)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Visual tokens enter as [visual embedding ; state before it], at their expanded positions."""
        self.block.write_visual(batch.feature("embed", "visual"), batch, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """Eq. of EAGLE section 3: layer(fc([e_{t+1} ; h_t])) -> g_{t+1}."""
        return self.block(self.embed(entries.ids_N), entries.hidden_ND, entries, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it: visual tokens are entries like any others."""
        return served_block(self, self.block, visual="fused")
