"""MSD -- Speculative Decoding Reimagined for Multimodal Large Language Models, 2025.

Idea: text tokens follow from one another; visual tokens are all related to all. So text enters as in EAGLE,
and visual tokens as raw embeddings (section 4.1, eqs. 8-10). A stage of text alone comes first; then the
share of samples with images rises epoch by epoch (section 4.2).
Differs from EAGLE by: the input at visual positions, and the two stages.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmdistill.drafters.core import Batch, Drafter, Entries, Head, KVCache, Tree
from vlmdistill.drafters.core.config import ModelConfig, Stage, TrainConfig, features
from vlmdistill.drafters.core.layers import EAGLE_NAMES, EagleBlock
from vlmdistill.drafters.core.serving import ServedDrafter, served_block
from vlmdistill.stores.schema import Feature, TargetInfo


class MSD(Drafter):
    """One decoder layer over text entries [embedding ; state] and raw visual embeddings."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """What the papers and the official code vary."""

        vata: bool = False
        """Drop visual positions when drafting: MSD+VATA of the Sparrow paper (its table 4)."""
        input_norm: bool = False
        """Norm the layer's input, as the official code does for Qwen2-VL alone."""

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """Text states, the last visual state of each span, and the visual embeddings."""
            always = features("hidden.text", "hidden.span")
            if decoding and self.vata:
                return always
            return always | features("embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Section 5.1, and the epochs, mix and losses of the official code."""

        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=20, visual=(0, 0), learning_rate=5e-5),
            Stage(name="multimodal", epochs=20, visual=(0.05, 1), learning_rate=5e-5),
        )

    tree = Tree(60, 5, 10)
    published_names: ClassVar[Mapping[str, str]] = {
        **EAGLE_NAMES,
        "layers.0.input_layernorm": "block.layer.input_norm",
    }
    published_settings: ClassVar[Mapping[str, str]] = {"layers.0.input_layernorm.weight": "input_norm"}
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block = EagleBlock(info, kv_heads=config.kv_heads, input_norm=config.input_norm)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Visual tokens enter as their embeddings, unfused (eq. 9); under `vata`, in training alone."""
        if self.config.vata and not self.training:
            return
        tokens = batch.visual_tokens
        self.block.layer.write_kv(batch.feature("embed", "visual"), tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """Eqs. 8-9 for text: layer(fc([e_{t+1} ; h_t])) -> g_{t+1}, as EAGLE."""
        return self.block(self.embed(entries.ids_N), entries.hidden_ND, entries, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it: visual tokens are bare embeddings, or dropped."""
        return served_block(self, self.block, visual="dropped" if self.config.vata else "raw")
