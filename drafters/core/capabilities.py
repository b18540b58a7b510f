"""Capabilities of drafters that a term of the losses, or a draft, asks for.

Shapes: N tokens or states, D hidden width.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ConfidenceHead(Protocol):
    """A drafter that estimates the chance of its guesses, for the loss `confidence`."""

    def confidence(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor | None:
        """The logit of the chance that the guess after `last_N` is accepted: [N].

        None if the drafter was configured without the head.
        """
        ...


@runtime_checkable
class MiddleState(Protocol):
    """A drafter with a state that learns from a layer of the target below the last.

    Its estimates are [N, 2D]: that of the target's last state, then that of the layer's.
    """

    @property
    def middle_source(self) -> str:
        """The target states that the loss `middle` compares with, such as `layer12`."""
        ...
