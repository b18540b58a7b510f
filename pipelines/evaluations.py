"""Evaluations read back: checked field by field, and put together only where they compare.

Numbers compare when they were measured alike (`CONDITIONS`). What differs in any of these is kept in a
group of its own, and every reader is told what differs.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError

FORMAT = 1  # of the evaluations that can be read

Evaluation = dict[str, Any]  # as pipelines/evaluate.py writes it, checked against SHAPE

_VERDICTS = dict.fromkeys(("identical", "near_tie", "different"), float)
_PIECE = {"text": str, "drafted": bool}
_SAMPLE = {"key": str, "prompt": str, "files": [str], "pieces": [_PIECE], "tau": float}
_FIGURES = ("temperature", "tau", "accepted", "speedup", "decode_speedup", "prefill_share", "calls", "tokens")
_MEASURED = {
    **dict.fromkeys((*_FIGURES, "tokens_per_second", "plain_tokens_per_second"), float),
    "alpha": [float],
    "lossless": _VERDICTS,
    "plain_lossless": _VERDICTS,
    "samples": [_SAMPLE],
}
SHAPE = {
    **dict.fromkeys(("name", "drafter", "hardware", "dtype", "tree", "measured"), str),
    **dict.fromkeys(("threads", "max_new_tokens", "parameters"), float),
    "target": {"name": str, "family": str, "fingerprint": str},
    "prompts": {"count": float, "hash": str},
    "temperatures": [_MEASURED],
    "config": {"stages?": [{"name": str, "epochs": float, "hops": float}]},
    "training": {
        "steps?": float,
        "samples?": float,
        "history?": [{"stage": str, "step": float, "held_out_agreement": [float]}],
    },
}
"""What an evaluation holds: a list has any number of its one shape, `?` marks what may be missing."""


def short_name(one: Evaluation) -> str:
    """The target's name without the folder that it lay in or the owner on the hub."""
    return str(one["target"]["name"]).rstrip("/").rpartition("/")[2]


CONDITIONS: dict[str, Callable[[Evaluation], str]] = {
    "target": lambda one: f"{short_name(one)} ({one['target']['fingerprint']})",
    "hardware": lambda one: str(one["hardware"]),
    "dtype": lambda one: str(one["dtype"]),
    "threads": lambda one: f"{one['threads']:g}",
    "prompts": lambda one: f"{one['prompts']['count']:g} ({one['prompts']['hash']})",
    "max new tokens": lambda one: f"{one['max_new_tokens']:g}",
}
"""What must be equal for two evaluations to compare."""


@dataclass(frozen=True)
class Verdict:
    """What temperature 0 says about losslessness, in a sentence."""

    level: Literal["lossless", "near-ties", "broken", "unchecked"]
    text: str


@dataclass(frozen=True)
class Group:
    """Evaluations that were measured alike."""

    number: int
    conditions: dict[str, str]
    evaluations: list[Evaluation]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per drafter and temperature: low temperatures first, then the fastest."""
        rows = [
            {
                "group": self.number,
                **{fact: one[fact] for fact in ("name", "drafter", "tree", "parameters", "measured")},
                **measured,
            }
            for one in self.evaluations
            for measured in one["temperatures"]
        ]
        return sorted(rows, key=lambda row: (row["temperature"], -row["speedup"], row["name"]))

    @property
    def verdict(self) -> Verdict:
        """Whether every answer at temperature 0 is the target's own."""
        greedy = [row for row in self.rows if row["temperature"] == 0]
        counts = [(row["name"], row["lossless"]) for row in greedy]
        counts += [("plain decoding", row["plain_lossless"]) for row in greedy[:1]]
        checked = {name: int(sum(count.values())) for name, count in counts}
        if not any(checked.values()):
            return Verdict("unchecked", "Losslessness was not checked: nothing was decoded at temperature 0.")

        def told(kind: str) -> str:
            found = [f"{name} on {count[kind]} of {checked[name]}" for name, count in counts if count[kind]]
            return ", ".join(found)

        missed = sorted({row["name"] for row in self.rows if not checked.get(row["name"])})
        rest = f" Not checked: {', '.join(missed)}." if missed else ""
        if broken := told("different"):
            return Verdict(
                "broken",
                "NOT LOSSLESS: at temperature 0, answers differ from those of model.generate "
                f"({broken} prompts). Do not rely on these numbers.{rest}",
            )
        if ties := told("near_tie"):
            return Verdict(
                "near-ties",
                "At temperature 0, answers differ from model.generate only from a near-tie on, where the two "
                f"tokens' logits are equal within the rounding of {self.conditions['dtype']} "
                f"({ties} prompts). All others are identical.{rest}",
            )
        most = max(checked.values())
        prompts = f"all {most} prompts" if most > 1 else "the one prompt"
        text = f"Every answer at temperature 0 is identical to model.generate on {prompts}.{rest}"
        return Verdict("lossless", text)


def differing(groups: Sequence[Group]) -> list[str]:
    """The conditions that keep groups apart; empty when everything compares."""
    return [name for name in CONDITIONS if len({group.conditions[name] for group in groups}) > 1]


def gather(workspace: Workspace) -> list[Group]:
    """Read all evaluations of a workspace and group what compares, the latest measured first.

    DataError when there are none, or when a JSON file in the folder is not one.
    """
    files = sorted(workspace.reports.glob("*.json"))
    if not files:
        raise DataError(
            f"there are no evaluations in {workspace.reports}: make some first with "
            f"`vlmdistill eval DRAFTER... --model {workspace.model}`"
        )
    latest = sorted(map(read, files), key=lambda one: (one["measured"], one["name"]), reverse=True)
    alike: dict[tuple[str, ...], list[Evaluation]] = {}
    for one in latest:
        alike.setdefault(tuple(told(one) for told in CONDITIONS.values()), []).append(one)
    return [
        Group(number, dict(zip(CONDITIONS, key, strict=True)), found)
        for number, (key, found) in enumerate(alike.items(), 1)
    ]


def read(file: Path) -> Evaluation:
    """One evaluation; DataError names the file and what is wrong with it."""
    mend = "remove it, or measure again with `vlmdistill eval`"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable JSON ({error}): {mend}") from None
    given = found.get("format", "none") if isinstance(found, dict) else "none"
    if given != FORMAT:
        raise DataError(f"{file} is not an evaluation of format {FORMAT}, its format is {given!r}: {mend}")
    if fault := next(_faults(found, SHAPE, "it"), None):
        raise DataError(f"{file} is not an evaluation: {fault}; {mend}")
    if not found["temperatures"]:
        raise DataError(f"{file} holds no measurements: {mend}")
    evaluation: Evaluation = found
    return evaluation


def _faults(value: Any, shape: Any, where: str) -> Iterator[str]:
    """What keeps a value from having a shape."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            yield f"{where} is not an object"
            return
        for field, inner in shape.items():
            name = field.removesuffix("?")
            if name in value:
                yield from _faults(value[name], inner, f"{where}.{name}".removeprefix("it."))
            elif name == field:
                yield f"{where} has no {name}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where} is not a list"
            return
        for number, item in enumerate(value):
            yield from _faults(item, shape[0], f"{where}[{number}]")
    elif shape is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            yield f"{where} is not a number from 0 on"
    elif not isinstance(value, shape):
        yield f"{where} is not {'a text' if shape is str else 'true or false'}"
