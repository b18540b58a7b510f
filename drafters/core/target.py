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
        """One forward pass over N tokens after the committed prefix: states by source, each [N, D].

        Token n is `depth_N[n]` positions after the last committed one (the first has depth 1) and attends to
        the prefix and the tokens of `visible_NN[n]` (bool, itself included; None: causal).
        Nothing is committed.
        """
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """Keep those rows of the last `extend`, in that order, as part of the prefix; drop the others."""
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
        """Start a new sequence with a prompt; returns its tokens with `features` and hidden.text.

        `on_encoded` is called when its images and videos are encoded.
        """
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The LM head on `hidden` states, float32 [N, V]."""
        ...


def room(info: TargetInfo, length: int) -> int:
    """The most tokens of a response to a prompt of that length; DataError if there is no position for any."""
    left = info.max_position - length
    if left < 1:
        raise DataError(
            f"the prompt has {length} tokens and leaves no room for a response"
        )
    return left
