"""HASS -- Learning Harmonized Representations for Speculative Sampling, ICLR 2025.

Idea: EAGLE learns on the target's states and drafts on its own. HASS trains as it drafts: three hops, each on
the states of the hop before; a query sees the target's states up to its row and its own guesses after that
(section 3.2). A second loss learns the target's ten most likely tokens, the ones that fit in a tree (section
3.1).
Differs from EAGLE by: multi-step training and the top-K loss; drafter and decoding are EAGLE-2's.
On images: as EAGLE-2.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from vlmdistill.drafters.checkpoints.serving import ServedDrafter, served_block
from vlmdistill.drafters.core.batch import Batch, Entries, Head
from vlmdistill.drafters.core.config import ModelConfig, Stage, TrainConfig, features
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.layers import EagleBlock
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.schema import Feature, TargetInfo


class Hass(Drafter):
    """One decoder layer over [embedding ; state] of every position, visual ones included."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """EAGLE's layer has no switches."""

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """States everywhere, and the visual embeddings."""
            return features("hidden.text", "hidden.visual", "embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """The official code's hops, losses, epochs, learning rates, warm-up and batch."""

        batch_tokens: int = 32768
        warmup: float = 0.01
        detach: bool = True
        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=40, visual=(0, 0), hops=3, learning_rate=3e-5),
            Stage(
                name="multimodal",
                epochs=10,
                visual=(1, 1),
                hops=3,
                learning_rate=1e-5,
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
        )

    tree = Tree(60, 5, 10)
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block = EagleBlock(info, kv_heads=config.kv_heads)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Visual tokens enter as [visual embedding ; state before it], at their expanded positions."""
        self.block.write_visual(batch.feature("embed", "visual"), batch, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """EAGLE's step, layer(fc([e_{t+1} ; h_t])) -> g_{t+1}; at hop n, h_t is its own g_t of hop n - 1."""
        return self.block(self.embed(entries.ids_N), entries.hidden_ND, entries, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it: visual tokens are entries like any others."""
        return served_block(self, self.block, visual="fused")
