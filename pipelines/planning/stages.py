"""The plan of a stage: its work, and the time, memory and disk that it takes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.planning.resources import Memory, check, facts
from vlmdistill.pipelines.workspace import rates
from vlmdistill.stores.errors import DataError

STAGES = ("responses", "features", "train")

Source = Literal["stated", "measured", "assumed"]
Certainty = Literal["counted", "estimated", "assumed"]
"""Of tokens and bytes. Estimated: by the mean of the responses that exist. Assumed: none exists."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a stage on all of its devices together."""

    tokens_per_second: float
    source: Source


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The work of a stage that is left, and its time, memory and disk."""

    name: str
    """responses, features, train NAME or eval."""
    unit: str
    """Of its work, such as samples."""
    to_do: int | None
    """None: not known."""
    done: int = 0
    tokens: int | None
    """Of the work to do; None: not known."""
    certainty: Certainty = "counted"
    speed: Speed | None
    """None: not known."""
    memory: Memory
    disk_bytes: int | None
    """That it writes; None: not known."""
    folder: str | Path = ""
    """Where it writes; empty: elsewhere than on this machine."""
    details: str = ""
    """More of its work, for the user."""
    advice: str = ""
    """What to do if memory or disk do not suffice."""

    @property
    def seconds(self) -> float | None:
        """The time of the work to do; None if tokens or speed are not known."""
        if self.tokens == 0:
            return 0.0
        if self.tokens is None or self.speed is None:
            return None
        return self.tokens / self.speed.tokens_per_second

    def check(self) -> None:
        """DataError if there is work to do and disk or memory will not suffice.

        An assumed size is no reason to refuse.
        """
        if self.to_do == 0:
            return
        disk_bytes = None if self.certainty == "assumed" else self.disk_bytes
        check(self.name, self.memory, disk_bytes, self.folder, self.advice)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        speed = self.speed
        return {
            "done": self.done,
            "to_do": self.to_do,
            "unit": self.unit,
            "tokens": self.tokens,
            "certainty": self.certainty,
            "seconds": self.seconds,
            "tokens_per_second": speed.tokens_per_second if speed else None,
            "rate": speed.source if speed else "unknown",
            "memory": {**facts(self.memory), "fits": not self.memory.lacking},
            "disk_bytes": self.disk_bytes,
            "details": self.details,
        }


def total(amounts: Iterable[float | None]) -> float | None:
    """The sum; None if one of them is not known."""
    known_amounts = []
    for amount in amounts:
        if amount is None:
            return None
        known_amounts.append(amount)
    return sum(known_amounts)


def to_dict(stages: Sequence[StagePlan]) -> dict[str, Any]:
    """Stages by name, with the time and disk of all, as JSON."""
    return {
        "stages": {stage.name: stage.to_dict() for stage in stages},
        "seconds": total(stage.seconds for stage in stages),
        "disk_bytes": total(stage.disk_bytes for stage in stages),
    }


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds of stages: as stated, else as measured."""

    stated: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    root: Path | None = None
    """The workspace whose runs on this machine were measured, too."""

    @classmethod
    def of(cls, root: Path, stated: Sequence[str]) -> "Speeds":
        """Of texts such as `features=3000`; DataError on other texts."""
        rate_of_stage = dict[str, float]()
        for text in stated:
            stage, _, number = text.partition("=")
            is_number = re.fullmatch(r"\d+(\.\d+)?", number) is not None
            if stage not in STAGES or not is_number or not float(number):
                raise DataError(
                    f"--rate {text}: write one of {', '.join(STAGES)} and its tokens per second, such as "
                    "features=3000"
                )
            rate_of_stage[stage] = float(number)
        return cls(stated=rate_of_stage, root=root)

    def speed(
        self, stage: str, assumed: float | None = None, engine: str = "transformers"
    ) -> Speed | None:
        """The speed of a stage, by default the assumed one; None if none is known."""
        # `train wren` and other trainings share the rate that is stated for `train`.
        stated_stage, _, _ = stage.partition(" ")
        if stated_stage in self.stated:
            return Speed(self.stated[stated_stage], "stated")
        if stage in self.measured:
            return Speed(self.measured[stage], "measured")
        rate = rates.known(self.root, stage, engine) if self.root else None
        if rate:
            return Speed(rate.tokens_per_second, "measured")
        return None if assumed is None else Speed(assumed, "assumed")
