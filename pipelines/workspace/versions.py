"""The versions of a drafter: which of its folders is in use, and what each round of training came to.

    drafters/<name>                      the drafter itself, version 0
             <name>.r3                   a version, an ordinary drafter
             <name>.rounds/000000000003.json   what became of round 3; never changed

A version is used from the record on that publishes it. So publishing writes one small file, and no drafter's
folder is ever replaced.
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
    """What became of a round."""

    number: int
    drafter: str  # the version that it made
    base: str  # the one in use before
    published: bool  # the drafter is in use from then on
    why: str
    when: str
    facts: dict[str, Any] = {}  # what was harvested, trained and measured


def rounds(workspace: Workspace, name: str, again: bool = False) -> list[DrafterRound]:
    """The rounds of a drafter, the first one first; `again` looks for those of other machines, too.

    DataError if a record is damaged.
    """
    found = []
    for file in sorted(workspace.rounds(name, again=again).glob("*.json")):
        if file.stem.isdecimal() and len(file.stem) == DIGITS:
            try:
                found.append(msgspec.json.decode(read_bytes(file), type=DrafterRound))
            except (OSError, msgspec.DecodeError) as error:
                raise DataError(
                    f"{file} cannot be read ({error}): copy it back, or remove it"
                ) from None
    return found


def current(workspace: Workspace, name: str, again: bool = False) -> str:
    """The version of a drafter that is in use: its own name before the first one is published."""
    published = [one.drafter for one in rounds(workspace, name, again) if one.published]
    return published[-1] if published else name


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
    """Record what became of a round, under the next number.

    Nothing is published if another version than `base` is in use by now.
    """
    folder = workspace.rounds(name)
    with only_writer(folder):
        there = rounds(workspace, name)
        if published and (now := current(workspace, name)) != base:
            published, why = False, f"{now} has come into use meanwhile; {why}"
        made = DrafterRound(
            number=1 + max((one.number for one in there), default=0),
            drafter=drafter,
            base=base,
            published=published,
            why=why,
            when=utc(time.time()),
            facts=facts or {},
        )
        with atomic_write(folder / f"{made.number:0{DIGITS}}.json") as file:
            file.write_bytes(
                msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
            )
    return made
