"""Whose target made the responses of an evaluation, by the greedy ones of plain decoding.

Conditions do not hold all that decides a response, such as EOS ids. If plain decoding has other responses in
a later evaluation, the target is another one: neither speeds nor counts of the two compare.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.bench.statistics import differ_beyond_rounding


def _conditions(evaluation: Evaluation) -> tuple[object, ...]:
    """What must be equal for greedy responses to a prompt to be equal, but for rounding.

    In half precision, in which rounding changes most long responses, also all that rounding depends on.
    """
    target, software = evaluation.target, evaluation.software
    decisive = (
        *(target.short_name, target.fingerprint, evaluation.dtype),
        *(evaluation.attention, evaluation.thinking, evaluation.max_new_tokens),
        *(software.torch, software.transformers),
    )
    if evaluation.dtype == "float32":
        return decisive
    return *decisive, evaluation.hardware, evaluation.threads, evaluation.compiled


def other_targets(latest_first: Iterable[Evaluation]) -> dict[int, tuple[str]]:
    """Doubts about evaluations whose target was another one than in later evaluations, by their `id`.

    Later ones that fail their own audits say nothing about those before them.
    """
    # By conditions and prompt, the latest first.
    later: dict[object, list[_Response]] = {}
    doubts: dict[int, tuple[str]] = {}
    for evaluation in latest_first:
        record = _Record(evaluation)
        is_exact = evaluation.dtype == "float32"
        shared = different = 0
        for key, text in record.responses.items():
            response = _Response(record, text)
            later_responses = later.setdefault(key, [])
            expected = _latest_sound(later_responses, response)
            if expected is not None:
                shared += 1
                different += text != expected.text
                # A GPU may round convolutions in float32 as well.
                is_exact &= expected.hardware == evaluation.hardware
            later_responses.append(response)
        if differ_beyond_rounding(different, shared, is_exact=is_exact):
            doubts[id(evaluation)] = (
                f"plain decoding has other responses to {different} of {shared} prompts in a later run: the "
                "target has changed",
            )
    return doubts


@dataclass(frozen=True)
class _Record:
    """An evaluation."""

    evaluation: Evaluation

    @property
    def responses(self) -> dict[object, str]:
        """Hashes of plain decoding's greedy responses, by conditions and prompt."""
        conditions = _conditions(self.evaluation)
        responses: dict[object, str] = {}
        for measurement in self.evaluation.temperatures:
            for prompt in measurement.prompts if measurement.temperature == 0 else ():
                if prompt.plain.response:  # it has none in an earlier version
                    responses[conditions, prompt.key] = prompt.plain.response
        return responses

    @cached_property
    def sound(self) -> bool:
        """Whether it passes its own audits."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        return self.evaluation.lossless and not audit.failures(self.evaluation)


@dataclass(frozen=True)
class _Response:
    """A response of plain decoding."""

    record: _Record
    text: str  # a hash of it

    @property
    def hardware(self) -> str:
        """On which it was decoded."""
        return self.record.evaluation.hardware


def _latest_sound(later: Sequence[_Response], own: _Response) -> _Response | None:
    """The latest response of a sound record; None if there is none. Audits are read only if any differs."""
    if all(response.text == own.text for response in later):
        return later[0] if later else None
    of_sound = (response for response in later if response.record.sound)
    return next(of_sound, None)
