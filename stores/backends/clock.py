"""Whether the clock of this machine may decide on deletion by age: one that is far ahead would delete all.

A machine that starts before it has the time may be years ahead. Nothing on the machine proves its clock, but
files that were written under a right one show a wrong one.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vlmdistill.stores.schema import utc

SKEW = 86400.0  # seconds by which clocks of machines may differ
AHEAD = 32 * 86400.0  # seconds; a deletion once a month is not stopped


def beyond(now: float, files: Iterable[Path]) -> str:
    """How far a time is beyond the newest of some files, if that is more than AHEAD; else empty.

    Files of the future do not count: an earlier clock was wrong, or this one is behind and deletes little.
    """
    written = []
    for file in files:
        with suppress(OSError):  # removed meanwhile
            written.append(file.stat().st_mtime)
    newest = max((time for time in written if time <= now), default=now)
    if now - newest <= AHEAD:
        return ""
    return f"the clock says {utc(now)}, {(now - newest) / 86400:.0f} days after the newest file"


def mark(file: Path) -> None:
    """Note that the clock was checked: running the command again confirms that it is right."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
