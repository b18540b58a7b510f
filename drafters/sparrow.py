"""Sparrow -- Sparrow: Text-Anchored Window Attention with Visual-Semantic Glimpsing for Speculative
Decoding in Video LLMs, 2026.

Idea: the target's text states already contain what the images show, so the drafter drops every
visual token when it drafts (HSR-VATA, section 3.1, eqs. 1-2). In training the visual positions
carry states of the target's middle layer (IVSB, section 3.2, eq. 3), and a second pass runs on
the drafter's own states (MTP, eq. 4).
Differs from EAGLE by: the input at visual positions, in training and in decoding.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

from torch import nn

from vlmdistill.drafters.core import Batch, EagleDrafter, Head, KVCache, RMSNorm, Tree
from vlmdistill.drafters.core.config import (
    EagleConfig,
    Stage,
    TwoPasses,
    features,
    vispec_stages,
)
from vlmdistill.drafters.core.serving import ServedDrafter, unserved
from vlmdistill.stores.schema import Feature, TargetInfo


class Sparrow(EagleDrafter):
    """One decoder layer over text entries; middle-layer visual states in training alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """The paper's ablations."""

        vata: bool = True
        """Drop visual positions when drafting (section 3.1)."""
        ivsb: bool = True
        """Middle-layer states at visual positions (section 3.2); off: raw visual embeddings, as
        in MSD."""
        middle_norm: bool = True
        """Norm the middle-layer states, which the paper does not; off: as they are (eq. 3)."""

        def visual_source(self, info: TargetInfo) -> str:
            """The states that visual positions carry in training."""
            if not self.ivsb:
                return "embed"
            return f"layer{info.num_layers // 2}"

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states, the last visual state of each span; in training visual states too."""
            always = features("hidden.text", "hidden.span")
            if decoding and self.vata:
                return always
            source = self.visual_source(info)
            return always | features(f"{source}.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TwoPasses):
        """Section 4, appendix C.3; stages and losses of ViSpec's code."""

        stages: tuple[Stage, ...] = vispec_stages(learning_rate=3e-5)

    tree = Tree(30, 4, 8)
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.visual_norm: nn.Module = nn.Identity()
        if config.ivsb and config.middle_norm:
            self.visual_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """In training, write the visual states, unfused; in decoding nothing."""
        if self.config.vata and not self.training:
            return
        source = self.config.visual_source(self.info)
        x_UD = self.visual_norm(batch.feature(source, "visual"))
        tokens = batch.visual_tokens
        self.block.layer.write_kv(x_UD, tokens.position_N - 1, tokens, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it, without visual tokens; TrainingError for `vata=false`."""
        if not self.config.vata:
            raise unserved("vata", False, True)
        return super().published()
