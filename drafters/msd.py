"""MSD -- Speculative Decoding Reimagined for Multimodal Large Language Models, 2025.

Idea: text tokens follow from one another; visual tokens are all related to all. So text enters
as in EAGLE, and visual tokens as raw embeddings (section 4.1, eqs. 8-10). A stage of text alone
comes first; then the share of samples with images rises epoch by epoch (section 4.2).
Differs from EAGLE by: the input at visual positions, and the two stages.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from vlmdistill.drafters.core import EagleDrafter, Head, RMSNorm, Tree, Visual
from vlmdistill.drafters.core.config import EagleConfig, Stage, TrainConfig, features
from vlmdistill.drafters.core.layers import EAGLE_NAMES
from vlmdistill.stores.schema import Feature, TargetInfo


class MSD(EagleDrafter):
    """One decoder layer over text entries [embedding ; state] and raw visual embeddings."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """What the papers and the official code vary."""

        vata: bool = False
        """Drop visual positions when drafting: MSD+VATA of the Sparrow paper (its table 4)."""
        input_norm: bool = False
        """Norm the layer's input, as the official code does for Qwen2-VL only."""

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
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
    published_settings: ClassVar[Mapping[str, str]] = {
        "layers.0.input_layernorm.weight": "input_norm"
    }
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        if config.input_norm:
            norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
            self.block.layer.input_norm = norm

    @property
    def visual(self) -> Visual:
        """Visual tokens enter as their embeddings, unfused (eq. 9); with `vata` only in training."""
        return "dropped" if self.config.vata and not self.training else "raw"
