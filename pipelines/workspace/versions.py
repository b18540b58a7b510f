"""The versions of a drafter: which of its folders is in use, and the outcome of each round of training.

    drafters/<name>                      the drafter itself, version 0
             <name>.r3                   a version, an ordinary drafter
             <name>.rounds/000000000003.json   the outcome of round 3; never changed

A version is in use as soon as a record says that it is published. So publishing writes one small file, and no
drafter's folder is ever replaced.
"""

import time
from typing import Any

import msgspec

from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.schema import utc

DIGITS = 12


class DrafterRound(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a round."""

    number: int
    drafter: str  # the version that it made
    base: str  # the one in use before
    published: bool  # the drafter is in use from then on
    why: str
    when: str
    facts: dict[str, Any] = {}  # what was harvested, trained and measured


def rounds(workspace: Workspace, name: str, again: bool = False) -> list[DrafterRound]:
    """The rounds of a drafter in order; `again` also fetches new ones of other machines.

    DataError if a record is damaged.
    """
    records = list[DrafterRound]()
    for file in sorted(workspace.rounds(name, again=again).glob("*.json")):
        if not file.stem.isdecimal() or len(file.stem) != DIGITS:
            continue
        try:
            records.append(msgspec.json.decode(read_bytes(file), type=DrafterRound))
        except (OSError, msgspec.DecodeError) as error:
            raise DataError(
                f"{file} cannot be read ({error}): copy it back, or remove it"
            ) from None
    return records


def current(workspace: Workspace, name: str, again: bool = False) -> str:
    """The version of a drafter that is in use: its own name before the first one is published."""
    in_use = name
    for finished in rounds(workspace, name, again):
        if finished.published:
            in_use = finished.drafter
    return in_use


def record(
    workspace: Workspace,
    name: str,
    drafter: str,
    *,
    base: str,
    published: bool,
    why: str,
    facts: dict[str, Any] | None = None,
) -> DrafterRound:
    """Record the outcome of a round, under the next number.

    Nothing is published if another version than `base` is in use by now.
    """
    folder = workspace.rounds(name)
    with only_writer(folder):
        numbers = [earlier.number for earlier in rounds(workspace, name)]
        in_use = current(workspace, name)
        if published and in_use != base:
            published = False
            why = f"{in_use} has come into use meanwhile; {why}"
        outcome = DrafterRound(
            number=1 + max(numbers, default=0),
            drafter=drafter,
            base=base,
            published=published,
            why=why,
            when=utc(time.time()),
            facts=facts or {},
        )
        text = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
        with atomic_write(folder / f"{outcome.number:0{DIGITS}}.json") as file:
            file.write_bytes(text + b"\n")
    return outcome
