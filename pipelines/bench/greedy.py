"""Whether a response at temperature 0 is the stock model's own greedy one.

One forward pass of the stock model over the prompt and the response gives its choice at each token. If each
token is that choice, and the response ends at the first EOS or at the limit, it is what greedy decoding
gives: by induction, each choice was made after the same tokens. Unlike a comparison with `generate`, a pass
also checks what follows a near-tie. On some prompts the response of `generate` is compared, too.

Shapes: N tokens of a response.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

from vlmdistill.pipelines.bench.records import Check, Finish
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

NEAR_TIE: Final = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 8}
"""In units of the dtype's rounding error at the largest logit.

Passes over one token and over several differed by at most 30 in float32 and 4.6 in half precision, in 24
layers of random weights.
"""


class GreedyCheck:
    """Compares responses of at most `limit` tokens to one prompt with the stock model.

    `generated` is the response of its `generate`; None: it was not asked.
    """

    def __init__(
        self,
        target: VisionLanguageTarget,
        encoded: Any,
        limit: int,
        generated: Sequence[int] | None,
    ) -> None:
        self._target = target
        self._encoded = encoded
        self._limit = limit
        self._generated = None if generated is None else tuple(generated)
        self._gaps_of: dict[tuple[int, ...], list[float] | None] = {}

    def check(self, ids: Sequence[int]) -> Check | None:
        """None if the stock model cannot read the prompt; `near_tie`: two logits round alike."""
        response = tuple(ids)
        gaps = self._gaps(response)
        if gaps is None:
            return None
        if finish_of(response, self._target.info.eos_ids, self._limit) == "broken":
            return "different"
        largest_gap = max(gaps)
        if self._generated is not None and self._generated != response:
            difference = _first_difference(self._generated, response)
            generated_gaps = self._gaps(self._generated)
            if difference is None or generated_gaps is None:
                return "different"
            largest_gap = max(largest_gap, generated_gaps[difference])
        if largest_gap == 0:
            return "identical"
        tied = largest_gap <= NEAR_TIE[self._target.dtype]
        return "near_tie" if tied else "different"

    def _gaps(self, response: tuple[int, ...]) -> list[float] | None:
        """How much less likely each token is than the stock model's choice, in units of rounding.

        0: it is the choice. The decoders of one prompt mostly agree, so one pass is enough for all.
        """
        if response not in self._gaps_of:
            self._gaps_of[response] = self._measured_gaps(response)
        return self._gaps_of[response]

    def _measured_gaps(self, response: tuple[int, ...]) -> list[float] | None:
        choices = self._target.stock_choices(self._encoded, response)
        if choices is None:
            return None
        unit_N = torch.finfo(self._target.dtype).eps * choices.size_N
        gap_N = (choices.highest_N - choices.given_N) / unit_N
        differs_N = choices.best_N != torch.tensor(response)
        # Another token may have the very same logit.
        smallest = torch.finfo(gap_N.dtype).tiny
        gaps: list[float] = torch.where(
            differs_N, gap_N.clamp(min=smallest), 0.0
        ).tolist()
        return gaps


def finish_of(ids: Sequence[int], eos_ids: Collection[int], limit: int) -> Finish:
    """How a response ends: at an EOS, at the limit, or otherwise, which no decoder may do."""
    length = len(ids)
    ends = [position for position, token in enumerate(ids, 1) if token in eos_ids]
    if ends == [length] and length <= limit:
        return "stop"
    if not ends and length == limit:
        return "length"
    return "broken"


def _first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """The first position at which both have a token and these differ; None if one begins the other."""
    for position, (token, other) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other:
            return position
    return None
