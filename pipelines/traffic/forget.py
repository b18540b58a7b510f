"""Deletion: traffic that was asked too long ago leaves the workspace, and its bytes leave the disk.

Samples go first, then responses, images and videos, what reports show of the prompts, and the prompts last:
they say what is too old, so that a deletion that was stopped is done again. Of a harvest that was killed, the
responses go that no prompt has: nothing says how old they are, and it is done again. Reports show no
harvested prompt that is not there, whatever has deleted it.

All that the product writes is named by what is in use, or left over. What killed runs have left over may hold
any prompt, so all of it goes, and at a URL all that the last version does not name.
"""

import shutil
import time
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmdistill.pipelines.bench import records, unfinished
from vlmdistill.pipelines.bench.deleted import harvested
from vlmdistill.pipelines.bench.records import Evaluation, PromptResult
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.traffic.harvest import (
    MEDIA,
    UNLISTED,
    audited,
    unlisted,
    unnamed,
)
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.clock import beyond, mark
from vlmdistill.stores.backends.local import left_over
from vlmdistill.stores.backends.remote import remove_unsent
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.manifest import COMMITS
from vlmdistill.stores.schema import utc
from vlmdistill.stores.sharing.retention import expire
from vlmdistill.stores.store import Store

PARTS = (
    "prompts",
    "responses",
    "reports",
    "traffic",
)  # of a workspace, which may hold texts
PAGES = "*.html"  # in the folder of reports
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
    bytes: (
        int  # of samples and media, and of what killed writers have left in the store
    )
    dry_run: bool


def forget(
    workspace: Workspace, older_than: float, *, dry_run: bool = False
) -> Forgotten:
    """Delete the traffic that was asked more than so many seconds ago, from the whole workspace.

    DataError if another run is writing to it, or still reads prompts; if it has links, whose files would
    stay; or if the clock is far beyond the newest file: the same deletion again is done. StoreError if the
    store is damaged or being written to.
    """
    _require_no_links(workspace)
    before = _now(workspace, dry_run) - older_than
    # At a URL, what an inner block has changed is published before what an outer one has.
    with (
        only_writer(workspace.reports, wait=True) as reports,
        only_writer(workspace.prompts) as listed,
    ):
        reports.deletes = listed.deletes = not dry_run
        file = workspace.prompts
        prompts = prompt_table.read(file) if file.is_file() else []
        with (
            only_writer(workspace.traffic) as noted,
            only_writer(workspace.responses) as answered,
        ):
            noted.deletes = answered.deletes = not dry_run
            old = {
                one.key for one in prompts if one.time is not None and one.time < before
            }
            old |= unlisted(workspace, prompts)
            samples, size = _expire(workspace, before, old, dry_run)
            old |= samples
            left = [one for one in prompts if one.key not in old]
            responses = dataset.remove(workspace.responses, old, dry_run=dry_run)
            media = unnamed(workspace, left, dry_run)
            shown = _Shown(workspace.reports, old, frozenset(one.key for one in left))
            made = Forgotten(
                before=utc(before),
                samples=len(samples),
                responses=responses,
                prompts=len(prompts) - len(left),
                media=len(media),
                reports=len(shown.evaluations()),
                bytes=size + sum(media.values()),
                dry_run=dry_run,
            )
            if dry_run:
                return made
            (workspace.traffic / UNLISTED).unlink(missing_ok=True)
            if any(
                (made.samples, made.responses, made.prompts, made.media, made.reports)
            ):
                workspace.traffic.mkdir(parents=True, exist_ok=True)
                audited(
                    workspace.traffic,
                    {"when": utc(time.time()), "forgot": asdict(made)},
                )
        shown.remove()
        running = _remove_left_over(workspace)
        reports.publish()
        if made.prompts:
            prompt_table.write(file, left)
    if running:
        raise DataError(
            f"{len(running)} running commands still read prompts, such as in {running[0]}: wait until they "
            "end, or stop them, and run it again"
        )
    return made


def _now(workspace: Workspace, dry_run: bool) -> float:
    """The time by which traffic is too old: that of the URL, if the workspace is at one."""
    if workspace.parts:
        return workspace.parts.remote.now()
    now, looked = time.time(), workspace.traffic / CLOCK
    store = Path(workspace.features)
    parts = (
        workspace.root,
        workspace.traffic,
        workspace.responses,
        workspace.reports,
        store / COMMITS,
    )
    files = [file for part in parts for file in part.glob("*") if file.is_file()]
    far = beyond(now, files)
    if not dry_run and files:
        mark(looked)
    if far:
        raise DataError(
            f"{far} of {workspace.root}: if it is right, run the same command again"
        )
    return now


def _require_no_links(workspace: Workspace) -> None:
    """DataError on a link below the parts, each of which may itself be one to a folder."""
    parts = [workspace.root / name for name in (*PARTS[1:], MEDIA, "features")]
    paths = [workspace.prompts, *(path for part in parts for path in part.rglob("*"))]
    if linked := [path for path in paths if path.is_symlink()]:
        raise DataError(
            f"{linked[0]} is a symbolic link, and what it leads to would stay: put the file or folder itself "
            "there, and run it again"
        )


def _expire(
    workspace: Workspace, before: float, old: Collection[str], dry_run: bool
) -> tuple[set[str], int]:
    """Delete old samples, and what killed writers have left in the store; keys, and bytes of both."""
    store = Store.find(workspace.features)
    if store is None:
        return set(), 0
    with only_writer(workspace.features):
        expired = expire(store, before, keys=old, dry_run=dry_run)
    return set(expired.keys), sum(expired.removed.values())


@dataclass(frozen=True)
class _Shown:
    """What reports show of prompts that are old, or were harvested and are not there any more."""

    reports: Path
    old: AbstractSet[str]
    left: AbstractSet[str]

    def _gone(self, results: Iterable[PromptResult]) -> set[str]:
        """The keys of such prompts, of which these results are."""
        return {*self.old, *(harvested(results) - self.left)}

    def evaluations(self) -> dict[Path, Evaluation]:
        """The evaluations that show some, as they are to be."""
        found = {}
        for file in records.files_in(self.reports):
            evaluation = records.read(file)
            stripped = evaluation.without(
                self._gone(evaluation.temperatures[0].prompts)
            )
            if stripped != evaluation:
                found[file] = stripped
        return found

    def remove(self) -> None:
        """Take the texts out of evaluations and unfinished ones; the numbers stay, pages are made again."""
        # First, and always: a page may be of a run that another machine has ended since.
        for page in self.reports.glob(PAGES):
            page.unlink()
        for file, evaluation in self.evaluations().items():
            records.write(evaluation, file)
        unfinished.strip(self.reports, self._stays)

    def _stays(self, decoded: Decoded) -> bool:
        results = decoded.results.values()
        return self._gone(results).isdisjoint(one.key for one in results)


def _remove_left_over(workspace: Workspace) -> list[Path]:
    """Remove what killed runs have left outside of the store; what running ones still have."""
    found = left_over(workspace.root, f"{workspace.prompts.stem}.")
    for folder in (
        workspace.responses,
        workspace.traffic,
        workspace.reports,
        workspace.reports / "served",
    ):
        found += left_over(folder)
    # A log of vLLM may quote a prompt in an error.
    found += sorted((workspace.root / "served").glob("*.log"))
    if workspace.parts:
        found += [
            folder for part in PARTS for folder in workspace.parts.set_aside(part)
        ]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    remove_unsent()
    return workspace.clear_staging()
