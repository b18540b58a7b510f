"""The target VLM as the decoder sees it.

Shapes: N tokens of a pass, U visual tokens, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from vlmdistill.drafters.core.batch import Batch, Head
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo


class Reader(Protocol):
    """One sequence of a target: a committed prefix, and forward passes after it."""

    def extend(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None,
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        """One forward pass over tokens after the committed prefix. Nothing is committed.

        Args:
            ids_N: The tokens.
            depth_N: How many positions each is after the last committed token; at least 1.
            visible_NN: bool, the tokens that each attends to besides the prefix, itself
                included; None: causal.
            sources: The states to return: `hidden`, or `layer<k>` for the input of a layer.

        Returns:
            States by source, each [N, D].
        """
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """Add those rows of the last `extend` to the prefix, in that order; drop the others."""
        ...


class Target(Reader, Protocol):
    """The target VLM as the decoder sees it. One sequence at a time."""

    @property
    def info(self) -> TargetInfo:
        """Sizes and names that a drafter is built from."""
        ...

    @property
    def head(self) -> Head:
        """The frozen tables, on the target's device."""
        ...

    @property
    def sequence(self) -> int:
        """The number of the current sequence: each `prefill` counts one more."""
        ...

    def prefill(
        self,
        prompt: Any,
        features: Collection[Feature],
        on_encoded: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Start a new sequence with a prompt.

        Args:
            prompt: As the target's own `encode` returns it.
            features: The states to return, besides `hidden.text`.
            on_encoded: Called when the images and videos are encoded.

        Returns:
            The prompt's tokens with those features.
        """
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The LM head on `hidden` states, float32 [N, V]."""
        ...


def room(info: TargetInfo, length: int) -> int:
    """The most tokens of a response to a prompt of that length, by the target's positions.

    DataError if there is no position for any.
    """
    tokens = info.max_position - length
    if tokens < 1:
        raise DataError(
            f"the prompt has {length} tokens and leaves no room for a response"
        )
    return tokens
