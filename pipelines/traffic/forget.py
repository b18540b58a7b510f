"""Deletion: traffic that was asked too long ago leaves the workspace, and its bytes leave the disk.

Samples go first, then responses, what reports show of the prompts, images and videos, and the prompts last:
they say what is too old, so that a deletion that was stopped is done again. Of a harvest that was killed, the
responses go that no prompt has: nothing says how old they are, and it is done again.
"""

import json
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.traffic.harvest import UNLISTED, audited, unlisted, unnamed
from vlmdistill.pipelines.workspace.parts import UNFINISHED
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.clock import beyond, mark
from vlmdistill.stores.backends.local import left_over
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.manifest import COMMITS
from vlmdistill.stores.schema import utc
from vlmdistill.stores.sharing.retention import expire
from vlmdistill.stores.store import Store

CLOCK = ".clock"  # its time is that of the last deletion


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """What was deleted, or would be on a dry run."""

    before: str  # asked before this time
    samples: int
    responses: int
    prompts: int
    media: int
    reports: int  # evaluations that showed one of the prompts
    bytes: int  # of samples and media
    dry_run: bool


def forget(workspace: Workspace, older_than: float, *, dry_run: bool = False) -> Forgotten:
    """Delete the traffic that was asked more than so many seconds ago, from the whole workspace.

    DataError if another run is writing to it, or if the clock is far beyond the newest file: the same
    deletion again is done. StoreError if the store is damaged or being written to.
    """
    before = _now(workspace, dry_run) - older_than
    folder, responses, file = workspace.traffic, workspace.responses, workspace.prompts
    with only_writer(folder), only_writer(responses), only_writer(file), only_writer(workspace.reports):
        prompts = prompt_table.read(file) if file.is_file() else []
        old = {one.key for one in prompts if one.time is not None and one.time < before}
        old |= unlisted(workspace).difference(one.key for one in prompts)
        left = [one for one in prompts if one.key not in old]
        samples, size = 0, 0
        if store := Store.find(workspace.features):
            with only_writer(workspace.features):
                expired = expire(store, before, keys=old, dry_run=dry_run)
            samples, size = len(expired.keys), sum(expired.removed.values())
            old |= expired.keys
        gone = dataset.remove(responses, old, dry_run=dry_run)
        for rest in () if dry_run else (folder / UNLISTED, *_left_over(workspace)):
            rest.unlink(missing_ok=True)
        shown = _unshow(workspace.reports, old, dry_run)
        media = unnamed(workspace, left, dry_run)
        if old and not dry_run and len(left) < len(prompts):
            prompt_table.write(file, left)
        made = Forgotten(
            before=utc(before),
            samples=samples,
            responses=gone,
            prompts=len(prompts) - len(left),
            media=len(media),
            reports=shown,
            bytes=size + sum(media.values()),
            dry_run=dry_run,
        )
        if not dry_run and any((samples, gone, made.prompts, media, shown)):
            folder.mkdir(parents=True, exist_ok=True)
            audited(folder, {"when": utc(time.time()), "forgot": asdict(made)})
    return made


def _now(workspace: Workspace, dry_run: bool) -> float:
    """The time by which traffic is too old: that of the URL, if the workspace is at one."""
    if workspace.parts:
        return workspace.parts.there.now()
    now, looked = time.time(), workspace.traffic / CLOCK
    store = Path(workspace.features)
    parts = (workspace.root, workspace.traffic, workspace.responses, workspace.reports, store / COMMITS)
    files = [file for part in parts for file in part.glob("*") if file.is_file()]
    far = beyond(now, files)
    if not dry_run and files:
        mark(looked)
    if far:
        raise DataError(f"{far} of {workspace.root}: if it is right, run the same command again")
    return now


def _left_over(workspace: Workspace) -> list[Path]:
    """What killed runs have left of the files that are locked now: it may hold any prompt or response."""
    prompts = left_over(workspace.prompts.parent, f"{workspace.prompts.stem}.")
    return [*prompts, *left_over(workspace.responses), *left_over(workspace.traffic)]


def _unshow(reports: Path, keys: Collection[str], dry_run: bool) -> int:
    """Take the texts of prompts out of evaluations and of the page; the numbers stay. How many there were."""
    showing = {
        file: one
        for file, one in ((file, records.read(file)) for file in records.files_in(reports))
        if any(shown.key in keys for at in one.temperatures for shown in at.shown)
    }
    if showing and not dry_run:
        (reports / "index.html").unlink(missing_ok=True)  # first: the records say that it must go
        for file, one in showing.items():
            temperatures = tuple(
                replace(at, shown=tuple(shown for shown in at.shown if shown.key not in keys))
                for at in one.temperatures
            )
            records.write(replace(one, temperatures=temperatures), file)
    for file in reports.glob(f".*{UNFINISHED}") if not dry_run and keys else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        if any(json.dumps(key) in text for key in keys):
            file.unlink()
    return len(showing)
