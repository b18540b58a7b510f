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
        self._target, self._encoded = target, encoded
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
        worst = max(gaps)
        if self._generated is not None and self._generated != response:
            apart = _first_difference(self._generated, response)
            other_gaps = self._gaps(self._generated)
            if apart is None or other_gaps is None:
                return "different"
            worst = max(worst, other_gaps[apart])
        if worst == 0:
            return "identical"
        return "near_tie" if worst <= NEAR_TIE[self._target.dtype] else "different"

    def _gaps(self, response: tuple[int, ...]) -> list[float] | None:
        """How much less likely each token is than the stock model's choice, in units of rounding.

        0: it is the choice. The decoders of one prompt mostly agree, so one pass is enough for all.
        """
        if response not in self._gaps_of:
            choices = self._target.stock_choices(self._encoded, response)
            self._gaps_of[response] = None
            if choices is not None:
                unit_N = torch.finfo(self._target.dtype).eps * choices.size_N
                gap_N = (choices.highest_N - choices.given_N) / unit_N
                tied_N = choices.best_N != torch.tensor(response)
                smallest = torch.finfo(
                    gap_N.dtype
                ).tiny  # another token with the very same logit
                self._gaps_of[response] = torch.where(
                    tied_N, gap_N.clamp(min=smallest), 0.0
                ).tolist()
        return self._gaps_of[response]


def finish_of(ids: Sequence[int], eos_ids: Collection[int], limit: int) -> Finish:
    """How a response ends: at an EOS, at the limit, or otherwise, which no decoder may do."""
    ends = [position for position, token in enumerate(ids, 1) if token in eos_ids]
    if ends == [len(ids)] and len(ids) <= limit:
        return "stop"
    if not ends and len(ids) == limit:
        return "length"
    return "broken"


def _first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which both have a token and these differ; None if one begins the other."""
    pairs = zip(some, others, strict=False)
    return next((at for at, (token, other) in enumerate(pairs) if token != other), None)
