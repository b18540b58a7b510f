"""Text-only -- On Speculative Decoding for Multimodal Large Language Models, CVPR 2024 workshops.

Idea: a drafter that knows only language speeds up a VLM, because most of a response is
language.
Differs from EAGLE by: no visual token is stored or read, and training is on text alone.
The drafter is EAGLE-2's layer on the target's text states, as in the MSD paper's baseline of
this name.

Shapes: N entries, R rows, D hidden.
"""

from dataclasses import dataclass

from vlmdistill.drafters.core import EagleDrafter
from vlmdistill.drafters.core.config import EagleConfig, Stage, TrainConfig, features
from vlmdistill.stores.schema import Feature, TargetInfo


class TextOnly(EagleDrafter):
    """One decoder layer over [embedding ; state] of text tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """EAGLE's layer has no switches."""

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states."""
            return features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """EAGLE's losses, and twice its epochs: other drafters have two stages."""

        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=40, visual=(0, 0), learning_rate=3e-5),
        )

    config: Config
