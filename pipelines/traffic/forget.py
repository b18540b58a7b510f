"""Deletion: traffic that was asked too long ago leaves the workspace, and its bytes leave the disk.

Samples go first, then responses, images and videos, then the prompts in reports, and the prompts last: they
tell what is too old, so that a deletion that was stopped is done again. Samples and responses have the time
of their prompt, which may be in another file. Reports show no harvested prompt that is not in the workspace,
whatever has deleted it.

All files that the product writes are named by what is in use, or left over. What killed runs have left over
may hold any prompt, so all of it goes, and at a URL all that the last version does not name.
"""

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar

from vlmdistill.pipelines.bench import records, unfinished
from vlmdistill.pipelines.bench.deleted import harvested
from vlmdistill.pipelines.bench.records import Evaluation, PromptResult
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.report.page import is_report
from vlmdistill.pipelines.traffic.harvest import (
    MEDIA,
    audited,
    unnamed,
)
from vlmdistill.pipelines.workspace.parts import RECORDS
from vlmdistill.pipelines.workspace.workspace import (
    Workspace,
    being_written,
    lock_file,
    only_writer,
)
from vlmdistill.stores.backends.backend import STAGING
from vlmdistill.stores.backends.clock import SKEW, beyond, mark
from vlmdistill.stores.backends.local import left_over
from vlmdistill.stores.backends.locks import lock
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.backends.remote import Remote, remove_unsent, unsent
from vlmdistill.stores.commits import LEDGER
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.manifest import (
    ANNEXES,
    CACHE,
    COMMITS,
    HEADS,
    SHARDS,
    STATS,
    STORE,
    VIEWS,
)
from vlmdistill.stores.schema import utc
from vlmdistill.stores.sharing.retention import Expired, expire, require_past
from vlmdistill.stores.store import Store

PARTS = ("prompts", "responses", "reports", "traffic")
"""Of a workspace, which may hold texts."""
NO_TRAFFIC = ("drafters", "images")
"""Folders of a workspace whose files `forget` leaves, and which may have links."""
OF_STORES = frozenset(
    (STORE, COMMITS, LEDGER, SHARDS, HEADS, VIEWS, CACHE, STATS, ANNEXES, STAGING)
)
"""What a store has in its folder."""
P = TypeVar("P", bound=PurePath)
OF_COPIES = (".parquet", ".json", ".html", ".unfinished")
"""Endings of files that are looked for in all folders."""
PAGES = "*.html"  # in the folder of reports
LOCKS = ".*.lock"  # see `lock_file`
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
    bytes: int
    """Of samples and media, and of what killed writers have left in the store."""
    dry_run: bool

    @property
    def has_deleted(self) -> bool:
        """Whether anything was too old."""
        counts = (self.samples, self.responses, self.prompts, self.media, self.reports)
        return any(counts)


def forget(
    workspace: Workspace, older_than: float, *, dry_run: bool = False
) -> Forgotten:
    """Delete the traffic that was asked more than so many seconds ago from the workspace; 0: all traffic.

    DataError if another run is writing to it, or still reads prompts; if it has links, whose files would
    stay; after everything else, if a wrong clock says that the rest was asked in the future, so that its age
    is unknown; or if the clock is far beyond the newest file: the same deletion again is done. StoreError if
    the store is damaged or being written to.
    """
    _require_no_links(workspace)
    now = _now(workspace, dry_run)
    before = now - older_than if older_than else math.inf
    # At a URL, what an inner block has changed is published before what an outer one has.
    with (
        only_writer(workspace.reports, wait=True) as reports,
        only_writer(workspace.prompts) as listed,
    ):
        reports.deletes = listed.deletes = not dry_run
        _require_no_writers(workspace)
        _times_of_copies(
            workspace
        )  # before anything is deleted: they may be unreadable
        file = workspace.prompts
        prompts = prompt_table.read(file) if file.is_file() else []
        with (
            only_writer(workspace.traffic) as noted,
            only_writer(workspace.responses) as answered,
        ):
            noted.deletes = answered.deletes = not dry_run
            old_keys = _old_keys(prompts, before)
            # A sample from elsewhere may be of a prompt that is imported here, and no traffic.
            imported = {each.key for each in prompts if each.time is None}
            # Before the store is looked at: what is sent after that would not be seen.
            running = [] if dry_run else _sending(workspace)
            samples, size = _expire(workspace, before, old_keys, imported, dry_run)
            old_keys |= samples - imported
            kept = [prompt for prompt in prompts if prompt.key not in old_keys]
            responses = _remove_responses(workspace, before, old_keys, dry_run)
            media = unnamed(workspace, kept, dry_run)
            kept_keys = frozenset(prompt.key for prompt in kept)
            shown = _ShownPrompts(workspace, old_keys, kept_keys)
            copies = _remove_copies(workspace, before, old_keys, dry_run)
            forgotten = Forgotten(
                before=utc(now - older_than),
                samples=len(samples),
                responses=responses + copies["responses"],
                prompts=len(prompts) - len(kept) + copies["prompts"],
                media=len(media),
                reports=len(shown.evaluations()),
                bytes=size + sum(media.values()),
                dry_run=dry_run,
            )
            if dry_run:
                return forgotten
            if forgotten.has_deleted:
                workspace.traffic.mkdir(parents=True, exist_ok=True)
                line = {"when": utc(time.time()), "forgot": asdict(forgotten)}
                audited(workspace.traffic, line)
        shown.remove()
        running += _remove_left_over(workspace)
        reports.publish()
        if len(kept) < len(prompts):
            prompt_table.write(file, kept)
    if running:
        raise DataError(
            f"{len(running)} running commands still use prompts, such as in {running[0]}: wait until they "
            "end, or stop them, and run it again"
        )
    _require_past(workspace, kept, now)
    return forgotten


def _require_past(workspace: Workspace, prompts: Iterable[Prompt], now: float) -> None:
    """Error if traffic was asked in the future: no deletion by age would ever reach it."""
    times = [prompt.time or 0 for prompt in prompts]
    for folder in (workspace.responses, *_other_responses(workspace)):
        times += chain.from_iterable(map(dataset.times_in, dataset.files_in(folder)))
    times += _times_of_copies(workspace)
    from_future = [time for time in times if time > now + SKEW]
    if from_future:
        raise DataError(
            f"{len(from_future)} prompts and responses stay that were asked in the future, such as on "
            f"{utc(from_future[0])}: a clock was wrong at their harvest, or is now. To delete all "
            "traffic: --older-than 0s"
        )
    for path in _stores(workspace):
        if store := Store.find(path):
            require_past(store, now)


def _times_of_copies(workspace: Workspace) -> list[int]:
    return [time for file, _ in _copies(workspace) for time in dataset.times_in(file)]


def _old_keys(prompts: Iterable[Prompt], before: float) -> set[str]:
    """The keys of traffic that was asked before a time."""
    return {
        prompt.key
        for prompt in prompts
        if prompt.time is not None and prompt.time < before
    }


def _now(workspace: Workspace, dry_run: bool) -> float:
    """The time by which traffic is too old: that of the URL, if the workspace is at one."""
    if workspace.parts:
        return workspace.parts.remote.now()
    now = time.time()
    folders = (
        workspace.root,
        workspace.traffic,
        workspace.responses,
        workspace.reports,
        Path(workspace.features) / COMMITS,
    )
    paths = (path for folder in folders for path in folder.glob("*"))
    files = [path for path in paths if path.is_file()]
    far_ahead = beyond(now, files, confirmed=workspace.traffic / CLOCK)
    if files and not dry_run:
        mark(workspace.traffic / CLOCK)
    if far_ahead:
        raise DataError(
            f"{far_ahead} of {workspace.root}: if it is right, run the same command again"
        )
    return now


def _require_no_links(workspace: Workspace) -> None:
    """DataError on a link below a folder of the workspace whose target may hold traffic and would stay.

    In folders that commands write to this is any link; elsewhere one to a folder that is not searched: files
    are replaced, never written through a link.
    """
    searched = _folders(workspace)
    roots = [folder.resolve() for folder in (workspace.root, *searched)]
    written = {
        workspace.traffic,
        workspace.reports,
        workspace.responses,
        workspace.root / "features",
        workspace.root / "served",
        workspace.root / MEDIA,
        *_other_responses(workspace),
        *_other_stores(workspace),
    } - {workspace.root}

    def stays(link: Path) -> bool:
        if not written.isdisjoint(link.parents):
            return True
        # Not `resolve`, which fails on a link to itself.
        target = Path(os.path.realpath(link))
        return not link.is_file() and not _is_below(target, roots)

    paths = _paths_of(workspace, NO_TRAFFIC)
    links = [path for path in paths if path.is_symlink() and stays(path)]
    if workspace.prompts.is_symlink():
        links.insert(0, workspace.prompts)
    if links:
        raise DataError(
            f"{links[0]} is a symbolic link, and what it leads to would stay: put the file or folder itself "
            "there, and run it again"
        )


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a path without links lies below one of the folders, and is searched."""
    for root in roots:
        if path.is_relative_to(root):
            return path == root or path.relative_to(root).parts[0] != RECORDS
    return False


def _paths_below(folder: Path) -> Iterator[Path]:
    """All files and folders below a folder, no link followed; DataError if one cannot be listed."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            reason = f"{error.filename} cannot be searched: {error.strerror}"
            raise DataError(reason) from None

    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name in (*folders, *files):
            yield Path(parent, name)


def _require_no_writers(workspace: Workspace) -> None:
    """DataError if another run writes to a folder of the workspace, which may be one that is not there yet.

    What it writes is of prompts that it has read. A run that takes its lock later waits for that of the
    prompts, and finds that some are deleted; see `require_listed`.
    """
    own = {lock_file(workspace.reports), lock_file(workspace.prompts)}
    paths = _paths_of(workspace, NO_TRAFFIC)
    for file in {path for path in paths if path.match(LOCKS)} - own:
        try:
            handle = lock(file)
        except FileNotFoundError:  # removed meanwhile
            continue
        except BlockingIOError:
            folder = file.parent / file.name[1:].removesuffix(".lock")
            raise being_written(folder) from None
        if handle is not None:
            os.close(handle)


def _expire(
    workspace: Workspace,
    before: float,
    old: Collection[str],
    imported: Collection[str],
    dry_run: bool,
) -> tuple[set[str], int]:
    """Delete old samples, and what killed writers have left in the stores; keys, and bytes of both.

    Samples without a time go by their keys, unless their prompts are imported.
    """
    keys = set[str]()
    size = 0
    deletes = True
    while deletes:  # a copy between the stores may have brought samples back
        expired = [
            expired
            for path in _stores(workspace)
            if (
                expired := _expire_one(
                    path, before, {*old, *keys.difference(imported)}, dry_run
                )
            )
        ]
        deletes = not dry_run and any(each.keys for each in expired)
        keys = keys.union(*(each.keys for each in expired))
        size += sum(sum(each.removed.values()) for each in expired)
    return keys, size


def _expire_one(
    path: str, before: float, old: Collection[str], dry_run: bool
) -> Expired | None:
    """Delete old samples of a store, and what killed writers have left there; None if there is no store."""
    store = Store.find(path)
    if store is None:
        if open_backend(path).list_names(COMMITS):
            raise DataError(
                f"{path}/{STORE} is lost, so that the samples stay: copy it from another copy of the store, "
                "or remove the folder"
            )
        return None
    with only_writer(path):
        return expire(store, before, keys=old, dry_run=dry_run)


def _stores(workspace: Workspace) -> list[str]:
    """The stores of the workspace, its own first."""
    others = map(str, _other_stores(workspace))
    return [workspace.features, *others, *_stores_at_url(workspace)]


def _remove_responses(
    workspace: Workspace, before: float, keys: Collection[str], dry_run: bool
) -> int:
    """Remove the old responses, and those to prompts with these keys; their number."""
    count = dataset.remove(workspace.responses, keys, before, dry_run=dry_run)
    others = _other_responses(workspace)
    for folder in others:
        with only_writer(folder):
            count += dataset.remove(folder, keys, before, dry_run=dry_run)
    return count


def _other_responses(workspace: Workspace) -> list[Path]:
    """Folders of responses in the workspace, of `--out`, beside its own."""
    files = [path for path in _paths_of(workspace) if path.name == dataset.SETTINGS]
    return sorted({file.parent for file in files} - {workspace.responses})


def _remove_copies(
    workspace: Workspace, before: float, keys: Collection[str], dry_run: bool
) -> Counter[str]:
    """Remove old rows of copied files in the workspace; the number of `prompts` and `responses`."""
    counts = Counter[str]()
    for file, kind in _copies(workspace):
        # A prompt without a time is an imported one, also if it is asked in traffic, too.
        old_keys = keys if kind == "responses" else ()
        counts[kind] += dataset.remove_rows(file, old_keys, before, dry_run=dry_run)
    return counts


def _copies(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """The files of prompts and responses that no command has written there, and what they have."""
    folders = (workspace.responses, *_other_responses(workspace))
    for file in _files_outside_stores(workspace, ".parquet"):
        if file != workspace.prompts and prompt_table.is_prompts(file):
            yield file, "prompts"
        if file.parent not in folders and dataset.is_responses(file):
            yield file, "responses"


def _files_outside_stores(workspace: Workspace, suffix: str) -> Iterator[Path]:
    """The files of the workspace with such an ending, but links and those of stores."""
    stores = {workspace.root / "features", *_other_stores(workspace)}
    for path in _paths_of(workspace, NO_TRAFFIC):
        is_file = path.is_file() and not path.is_symlink()
        if path.suffix == suffix and is_file and stores.isdisjoint(path.parents):
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} cannot be read, and may have traffic")
            yield path


def _other_stores(workspace: Workspace) -> list[Path]:
    """Stores in the workspace's folder, of `--store` and copies, beside its own."""
    own = workspace.root / "features"
    stores = _stores_among(_paths_of(workspace))
    return sorted(store for store in stores - {own} if not _is_annex(store, stores))


def _stores_among(paths: Iterable[P]) -> set[P]:
    """The folders that are stores by what they hold, and annexes of stores."""
    holders: dict[str, set[P]] = {STORE: set(), COMMITS: set(), SHARDS: set()}
    for path in paths:
        if path.name in holders:
            holders[path.name].add(path.parent)
    # Without its record, a store has the others.
    return holders[STORE] | holders[COMMITS] & holders[SHARDS]


def _is_annex(folder: PurePath, stores: Collection[PurePath]) -> bool:
    """Whether a store is part of another one."""
    return folder.parent.name == ANNEXES and folder.parent.parent in stores


def _paths_of(workspace: Workspace, without: Collection[str] = ()) -> Iterator[Path]:
    """All files and folders of the workspace, but what is below its folders of these names."""
    yield from workspace.root.glob("*")
    for folder in _folders(workspace):
        if folder.name not in without:
            yield from _paths_below(folder)


def _folders(workspace: Workspace) -> list[Path]:
    """The folders of the workspace, each of which may be a link; see `parts` for the one that is left out."""
    folders = [path for path in workspace.root.glob("*") if path.is_dir()]
    if not workspace.parts:  # then they are of a copy
        return folders
    return [folder for folder in folders if folder.name != RECORDS]


def _stores_at_url(workspace: Workspace) -> list[str]:
    """The same at the URL, if the workspace is at one."""
    if not workspace.parts:
        return []
    own = PurePosixPath("features")
    stores = _stores_among(_paths_at_url(workspace.parts.remote, own))
    return sorted(
        "/".join([workspace.parts.url, *store.parts])
        for store in stores
        if store != own and not _is_annex(store, stores)
    )


def _paths_at_url(remote: Remote, own_store: PurePosixPath) -> Iterator[PurePosixPath]:
    """All files and folders at the URL of the workspace, without those of its own store, the most."""
    names = {*remote.list_names("")} - {str(own_store)}
    folders = {PurePosixPath(name) for name in names}
    inside = {*remote.list_names(str(own_store))} - OF_STORES
    for folder in folders | {own_store / name for name in inside}:
        for file in remote.list_files(str(folder)):
            path = folder / file
            yield from (path, *path.parents)


@dataclass(frozen=True)
class _ShownPrompts:
    """The prompts in reports that are old, or were harvested and are not in the workspace any more."""

    workspace: Workspace
    old_keys: AbstractSet[str]
    kept_keys: AbstractSet[str]

    def _deleted(self, results: Iterable[PromptResult]) -> set[str]:
        """The keys of such prompts: all old ones, and harvested ones among these results."""
        return {*self.old_keys, *(harvested(results) - self.kept_keys)}

    def evaluations(self) -> dict[Path, Evaluation]:
        """The evaluations that show such prompts, by file, without their texts."""
        changed = {}
        copies = filter(records.is_evaluation, self._copies(".json"))
        for file in (*records.files_in(self.workspace.reports), *copies):
            evaluation = records.read(file)
            deleted = self._deleted(evaluation.temperatures[0].prompts)
            stripped = evaluation.without(deleted)
            if stripped != evaluation:
                changed[file] = stripped
        return changed

    def remove(self) -> None:
        """Take the texts out of evaluations and unfinished ones; the numbers stay, pages are made again."""
        # First, and always: a page may be of a run that another machine has ended since.
        copied_pages = filter(is_report, self._copies(".html"))
        for file in (*self.workspace.reports.glob(PAGES), *copied_pages):
            file.unlink()
        for file, evaluation in self.evaluations().items():
            records.write(evaluation, file)
        files = [*self.workspace.reports.glob(unfinished.FILES)]
        copies = self._copies(".unfinished")
        files += [file for file in copies if unfinished.NAME.fullmatch(file.name)]
        unfinished.strip(files, self._stays)

    def _copies(self, suffix: str) -> list[Path]:
        """The files of the workspace with such an ending that are not in the folder of reports."""
        files = _files_outside_stores(self.workspace, suffix)
        return [file for file in files if file.parent != self.workspace.reports]

    def _stays(self, decoded: Decoded) -> bool:
        results = decoded.results.values()
        keys = {result.key for result in results}
        return self._deleted(results).isdisjoint(keys)


def _remove_left_over(workspace: Workspace) -> list[Path]:
    """Remove the files that killed runs have left outside of the store; the folders of running ones."""
    paths = left_over(workspace.root, f"{workspace.prompts.stem}.")
    folders = [workspace.responses, *_other_responses(workspace)]
    folders += [workspace.traffic, workspace.reports, workspace.reports / "served"]
    for folder in folders:
        paths += left_over(folder)
    for file in _files_outside_stores(workspace, ".tmp"):
        if any(file.match(f".*{ending}.*") for ending in OF_COPIES):
            paths.append(file)
    # A log of vLLM may quote a prompt in an error, and what its kernel dumps has all of them.
    for pattern in ("*.log", "core", "core.[0-9]*"):
        paths += sorted((workspace.root / "served").glob(pattern))
    if workspace.parts:
        for part in PARTS:
            paths += workspace.parts.set_aside(part)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return workspace.clear_staging()


def _sending(workspace: Workspace) -> list[Path]:
    """Remove shards that killed runs were sending to a URL; the folders of running ones, if it is at one.

    A run whose driver was killed has workers that live a little longer. DataError if a folder of this user
    cannot be removed.
    """
    folders = unsent()
    in_use = remove_unsent()
    for folder in {*folders} - {*in_use}:
        if os.path.lexists(folder) and folder.lstat().st_uid == os.getuid():
            raise DataError(
                f"{folder} cannot be removed, and may have samples on their way to a URL: remove it"
            )
    return in_use if workspace.parts else []
