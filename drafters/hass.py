"""HASS -- Learning Harmonized Representations for Speculative Sampling, ICLR 2025.

Idea: EAGLE learns on the target's states and drafts on its own. HASS trains as it drafts: three hops, each on
the states of the hop before; a query sees the target's states up to its row and its own guesses after that
(section 3.2). A second loss learns the target's ten most likely tokens, the ones that fit in a tree (section
3.1).
Differs from EAGLE by: multi-step training and the top-K loss; drafter and decoding are EAGLE-2's.
On images: as EAGLE-2.
"""

from dataclasses import dataclass

from vlmdistill.drafters.core import Tree
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.eagle2 import Eagle2


class Hass(Eagle2):
    """EAGLE-2's drafter, trained as it drafts; `condition` and `step` are inherited."""

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
