"""HiViS -- HiViS: Hiding Visual Tokens from the Drafter for Speculative Decoding in VLMs, 2025 (version 1).

Idea: the target's text states already contain what the images show, so the drafter reads text
and those states, and no visual token in training or in drafting (section 3.1, eqs. 2-3).
Nothing refreshes the states while it drafts, so it learns to use its own: four self-feedback
hops, each with a sequential embedding of the hop, on the rows that it can still predict
(section 3.2, eqs. 5-7).
Differs from EAGLE by: no visual positions; sequential embeddings; multi-step training with
dynamic filtering, and HASS's top-K loss in addition to EAGLE's two.

Shapes: N entries, R rows, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from vlmdistill.drafters.core import EagleDrafter, GuessTable, Head, Tree
from vlmdistill.drafters.core.config import (
    EAGLE_AND_TOP_K,
    Count,
    EagleConfig,
    Positions,
    Stage,
    TrainConfig,
    features,
)
from vlmdistill.stores.schema import Feature, TargetInfo


class HiViS(EagleDrafter):
    """One decoder layer over text entries alone, with an embedding of the hop."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """Section 3.2, and the reading of eq. 3."""

        threshold: Count = 3
        """Learned embeddings that tell the drafter how many tokens it has guessed since the last
        committed one; further guesses use the last of them. 0: none."""
        last_visual: bool = False
        """Pair the first token after an image with the image's last state, not with that of the
        text before it: one more state for each image."""
        positions: Positions = "compact"

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states; with `last_visual`, the last state of each image too."""
            text = features("hidden.text")
            return text | features("hidden.span") if self.last_visual else text

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Section 4; schedule and weights of EAGLE and HASS, which the paper follows."""

        detach: bool = True
        stages: tuple[Stage, ...] = (
            Stage(
                name="stage1",
                epochs=40,
                visual=(0.5, 0.5),
                learning_rate=3e-5,
                losses=EAGLE_AND_TOP_K,
            ),
            Stage(
                name="stage2",
                epochs=20,
                visual=(0.5, 0.5),
                hops=4,
                keep_top=5,
                learning_rate=1e-5,
                losses=EAGLE_AND_TOP_K,
            ),
        )

    tree = Tree(60, 6, 10)
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        # Hop 0 has the bias of `fc` for its embedding.
        self.sequence = GuessTable(config.threshold, info.hidden_size)

    def fuse(
        self,
        embed_ND: Tensor,
        state_ND: Tensor,
        guess_1: Tensor,
        joined_ND: Tensor | None = None,
    ) -> Tensor:
        """Eqs. 5-6: fc([e_{t+1} ; h_t]) + e_seq."""
        x_ND = super().fuse(embed_ND, state_ND, guess_1)
        offset_1D: Tensor = self.sequence(guess_1)
        return x_ND + offset_1D
