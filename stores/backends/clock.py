"""Whether the clock of this machine may decide on deletion by age: one that is far ahead would delete all.

A machine that starts before it has the time may be years ahead. Nothing on the machine proves its clock, but
files that were written under a right one show a wrong one.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vlmdistill.stores.schema import utc

SKEW = 86400.0  # seconds by which clocks of machines may differ
AHEAD = 32 * 86400.0  # seconds; a deletion once a month is not stopped


def beyond(now: float, files: Iterable[Path], *, confirmed: Path | None = None) -> str:
    """How far a time is beyond the newest of some files, if that is more than AHEAD; else empty.

    Files of the future do not count: an earlier clock was wrong, or this one is behind and deletes little.
    With a file that is touched when the clock was `confirmed`, the start of the machine must not be so far
    beyond the files from before it either: later ones may be of a wrong clock.
    """
    written = [when for when in _times(files) if when <= now]
    newest = max(written, default=now)
    if now - newest > AHEAD:
        return f"the clock says {utc(now)}, {_days(now - newest)} after the newest file"
    if confirmed is None:
        return ""
    started = now - time.monotonic()  # which begins with the machine
    is_confirmed = any(when >= started for when in _times([confirmed]))
    newest = max((when for when in written if when < started), default=started)
    if is_confirmed or started - newest <= AHEAD:
        return ""
    return (
        f"by the clock, the machine started on {utc(started)}, {_days(started - newest)} after the newest "
        "earlier file"
    )


def _times(files: Iterable[Path]) -> Iterator[float]:
    """When files were written, in seconds since 1970."""
    for file in files:
        with suppress(OSError):  # removed meanwhile
            yield file.stat().st_mtime


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days"


def mark(file: Path) -> None:
    """Note that the clock was checked: running the command again confirms that it is right."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
