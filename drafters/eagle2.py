"""EAGLE-2 -- EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, EMNLP 2024.

Idea: one decoder layer predicts the target's next last-layer state from the states so far
and the token that was sampled; the draft tree grows where the drafter is confident. The
baseline of four of the papers.
Differs from EAGLE by: the dynamic tree (section 4); the drafter is the same.
On images: visual tokens are entries like text tokens, with the projected visual vector as
embedding.

HASS (Learning Harmonized Representations for Speculative Sampling, ICLR 2025) trains the same
drafter as it drafts: three hops, each on the states of the hop before (section 3.2), with a
loss on the target's ten most likely tokens (section 3.1). It is a recipe, `HASS` in the
catalogue.

Shapes: N entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

from vlmdistill.drafters.core import EagleDrafter, Visual
from vlmdistill.drafters.core.config import (
    EagleConfig,
    Stage,
    TrainConfig,
    features,
    text_then_images,
)
from vlmdistill.stores.schema import Feature, TargetInfo


class Eagle2(EagleDrafter):
    """One decoder layer over [embedding ; state] of every position, visual ones included."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """EAGLE's layer has no switches."""

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """States everywhere, and the visual embeddings."""
            return features("hidden.text", "hidden.visual", "embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """EAGLE's losses, and the schedule with which the ViSpec paper trains it."""

        stages: tuple[Stage, ...] = text_then_images(3e-5)

    config: Config

    @property
    def visual(self) -> Visual:
        """Visual tokens enter as [visual embedding ; state before it]."""
        return "fused"
