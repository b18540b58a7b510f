"""Verification: read and compare everything that records name, and list every other file.

What passes can be read, see `checks`. A lost record, which the ledger still has, is damage, as is a missing
file.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import polars as pl
import pyarrow as pa

from vlmdistill.stores.annexes import no_annex
from vlmdistill.stores.backends.backend import STAGING, STREAMS, Backend, in_flight
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.commits import KEPT, LEDGER, find_copy
from vlmdistill.stores.errors import StoreError, VersionError
from vlmdistill.stores.index.arrow import frame_of
from vlmdistill.stores.index.tables import XXH3, table_of
from vlmdistill.stores.integrity.checks import Finding, StoreChecks, failed
from vlmdistill.stores.layout import Layout
from vlmdistill.stores.manifest import (
    ANNEXES,
    CACHE,
    COMMITS,
    STORE,
    Commit,
    Entry,
    Record,
    StoreRecord,
    TableRecord,
    ViewRecord,
    find_record,
    kind_of,
    record_names,
)
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash

NOTHING = pl.DataFrame(
    schema={"key": pl.String, "shard": pl.String, "content": pl.UInt64}
)
FAULTS = ("damaged", "missing", "unreadable")
T = TypeVar("T")


@dataclass(frozen=True)
class Verification:
    """What a verification found."""

    files: int
    bytes: int
    findings: tuple[Finding, ...]
    copies: frozenset[str]  # the records that have a good copy in the ledger

    @property
    def damage(self) -> tuple[Finding, ...]:
        """What was promised and is not there as promised, or could not be looked at."""
        return tuple(finding for finding in self.findings if finding.kind in FAULTS)


def verify(
    path: str | Path, *, threads: int | None = None, progress: Progress = silent
) -> Verification:
    """Read everything once and compare it with its record, one annex after the other as well.

    `progress` is called with (bytes done, bytes in all), of each. StoreError only when there is no
    store, or a record of it is newer than this code.
    """
    backend = open_backend(path)
    parts: dict[str, dict[str, int]] = {
        "": {}
    }  # the files of the store, and of each annex
    for name, size in backend.list_files("").items():
        inside = name.split("/")
        below = (
            f"{'/'.join(inside[:2])}/"
            if inside[0] == ANNEXES and len(inside) > 2
            else ""
        )
        parts.setdefault(below, {})[name.removeprefix(below)] = size
    files = parts.pop("")
    if not _has_store(files):
        raise StoreError(f"there is no feature store at {path}")
    whole, store = _verify(backend, files, threads, progress)
    for below, there in sorted(parts.items()):
        if not _has_store(there):
            found = _others((f"{below}{name}" for name in sorted(there)), ())
            whole = replace(whole, findings=(*whole.findings, *found))
            continue
        one, annex = _verify(
            backend.within(below.rstrip("/")), there, threads, progress, annex=True
        )
        findings = list(one.findings)
        if store and annex and (why := no_annex(store, annex, below.rstrip("/"))):
            findings.append(
                Finding("damaged", STORE, f"it is no annex of the store: {why}")
            )
        named = (
            replace(finding, name=f"{below}{finding.name}") for finding in findings
        )
        whole = Verification(
            files=whole.files + one.files,
            bytes=whole.bytes + one.bytes,
            findings=(*whole.findings, *named),
            copies=whole.copies | {f"{below}{name}" for name in one.copies},
        )
    odd = (
        [ANNEXES]
        if ANNEXES in files
        else [name for name in backend.links(ANNEXES) if name.count("/") < 2]
    )
    why = "it is no folder, and annexes are not read through links"
    found = (Finding("damaged", name, why) for name in odd)
    return replace(whole, findings=tuple(dict.fromkeys((*whole.findings, *found))))


def _has_store(there: Iterable[str]) -> bool:
    return any(name == STORE or name.startswith(f"{COMMITS}/") for name in there)


def _verify(
    backend: Backend,
    there: Mapping[str, int],
    threads: int | None,
    progress: Progress,
    *,
    annex: bool = False,
) -> tuple[Verification, StoreRecord | None]:
    """Verify a store or an annex; also its own record."""
    found = _Records(backend)
    own = found.records.get(STORE)
    if annex:
        found.records.pop(STORE, None)  # it names the head of the store around it
    total = sum(
        size for record in found.records.values() for _, (size, _) in files_of(record)
    )
    checks = StoreChecks(backend, there, _layout(own, found.findings))

    def check(record: Record) -> tuple[int, list[Finding], pl.DataFrame | None]:
        files = files_of(record)
        size = sum(entry[0] for _, entry in files)
        if isinstance(record, Commit):
            some, index = checks.shard(record)
            return size, some, None if index is None else _contents(record.shard, index)
        if isinstance(record, StoreRecord):
            return size, checks.head(record), None
        return (
            size,
            checks.table(record) if isinstance(record, TableRecord) else [],
            None,
        )

    findings, contents, done = found.findings, list[pl.DataFrame | None](), 0
    most = threads or (min(4, os.cpu_count() or 1) if backend.is_local else STREAMS)
    checked = in_flight(check, found.records.values(), most)
    for (name, record), (size, some, mine) in zip(
        found.records.items(), checked, strict=True
    ):
        done += size
        progress(done, total)
        if some and found.is_current(
            name
        ):  # not when it was removed on purpose meanwhile
            findings += some
        if isinstance(record, Commit):
            contents.append(mine)
    samples = pl.concat([NOTHING, *(one for one in contents if one is not None)])
    findings += _differing(samples)
    if not any(one is None for one in contents):
        findings += _strays(backend, found, samples)
    promised = {
        name for record in found.records.values() for name, _ in files_of(record)
    }
    findings += _others(there, promised)
    findings += _links(backend)
    files = len(promised) + sum(map(_is_record, there))
    verified = Verification(files, total, tuple(findings), frozenset(found.copies))
    return verified, own if isinstance(own, StoreRecord) else None


def files_of(record: Record) -> list[tuple[str, Entry]]:
    """The files that a record names, with (bytes, blake3)."""
    if isinstance(record, Commit):
        return [
            (f"{record.named}/{name}", entry) for name, entry in record.files.items()
        ]
    if isinstance(record, StoreRecord):
        return [(record.head.file, record.head.entry)]
    return [(record.file, record.entry)] if isinstance(record, TableRecord) else []


class _Records:
    """All records of a store by name, the copy where one is lost, and what is wrong with them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.findings: list[Finding] = []
        self.records: dict[str, Record] = {}
        self.copies = set[str]()
        copies = [
            f"{folder}/{leaf}.json"
            for folder in KEPT
            for leaf in self._listed(f"{LEDGER}/{folder}")
        ]
        there = [
            f"{folder}/{leaf}.json"
            for folder in (*KEPT, CACHE)
            for leaf in self._listed(folder)
        ]
        names = [STORE, *sorted({*copies, *there})]
        origin = ""  # as `store.json` has it, which comes first
        uncovered = []
        for name, (record, copy) in zip(
            names, backend.map(self._read, names), strict=True
        ):
            gone = record is None and (copy is not None or name == STORE)
            if gone and not any(finding.name == name for finding in self.findings):
                why = (
                    f"it is lost: {LEDGER}/{name} is its copy"
                    if copy
                    else "the record is gone"
                )
                self.findings.append(Finding("missing", name, why))
            if copy:
                self.copies.add(name)
            record = record or copy
            if record is None:
                continue
            self.records[name] = record
            if isinstance(record, StoreRecord):
                origin = content_hash(record.provenance.to_dict())
            if isinstance(record, Commit) and origin and record.origin != origin:
                self.findings.append(
                    Finding("damaged", name, "it is of another origin than the store")
                )
            if name.split("/")[0] in KEPT and copy != record:
                uncovered.append(name)
        if uncovered:
            what = f"{len(uncovered)} records, such as {uncovered[0]}, have no copy: it would not be seen if "
            how = "they were lost. `vlmdistill store gc` makes the copies"
            self.findings.append(Finding("note", LEDGER, what + how))

    def _listed(self, folder: str) -> list[str]:
        return self._try(folder, lambda: record_names(self._backend, folder)) or []

    def _read(self, name: str) -> tuple[Record | None, Record | None]:
        """A record and its copy."""
        kept = name.split("/")[0] in KEPT
        record = self._try(name, lambda: self._find(name))
        return record, self._try(
            f"{LEDGER}/{name}", lambda: self._find_copy(name)
        ) if kept else None

    def _try(self, name: str, read: Callable[[], T]) -> T | None:
        """What is read, None and a finding when that fails; VersionError."""
        try:
            return read()
        except VersionError:
            raise
        except (StoreError, OSError) as error:
            self.findings.append(failed(name, error))
            return None

    def _find(self, name: str) -> Record | None:
        kind: type[Record] = StoreRecord if name == STORE else kind_of(name)
        return find_record(self._backend, name, kind)

    def _find_copy(self, name: str) -> Record | None:
        return find_copy(self._backend, name, kind_of(name))

    def is_current(self, name: str) -> bool:
        """Whether a record, or the copy of a lost one, is still the one that was read."""
        try:
            return (self._find(name) or self._find_copy(name)) == self.records[name]
        except (StoreError, OSError):
            return True


def _layout(store: Record | None, findings: list[Finding]) -> Layout | None:
    """The layout of the store; None, and a finding, when it declares none that makes sense."""
    if not isinstance(store, StoreRecord):
        return None
    try:
        return Layout.of(store.provenance, store.info, store.encoding)
    except StoreError as error:
        findings.append(failed(STORE, error))
        return None


def _contents(shard: str, index: pa.Table) -> pl.DataFrame:
    """The samples of a shard: key, name of the shard, and a hash of the checksums of all arrays."""
    columns = [name for name in index.column_names if name.startswith(XXH3)]
    content = pl.struct(columns).hash().alias("content")
    return frame_of(index).select(
        pl.col("key").cast(pl.String), pl.lit(shard).alias("shard"), content
    )


def _differing(samples: pl.DataFrame) -> Iterator[Finding]:
    """Samples of several shards that do not have the same tensors in all of them."""
    twice = samples.filter(samples["key"].is_duplicated())
    odd = (
        twice.group_by("key")
        .agg("shard", pl.col("content").n_unique())
        .filter(pl.col("content") > 1)
    )
    if len(odd):
        key, shards, _ = odd.sort("key").row(0)
        what = f"{len(odd)} samples differ from shard to shard, such as {key} in {' and '.join(shards)}"
        yield Finding("note", COMMITS, f"{what}: the first shard by name counts")


def _strays(
    backend: Backend, found: _Records, samples: pl.DataFrame
) -> Iterator[Finding]:
    """Views that keep samples which no shard has."""
    bad = {finding.name for finding in found.findings}
    for record in found.records.values():
        if not isinstance(record, ViewRecord) or record.file in bad:
            continue
        try:
            kept = frame_of(table_of(backend, record)).filter(
                pl.col("reason").is_null()
            )
        except (StoreError, OSError) as error:
            yield failed(record.file, error)
            continue
        stray = kept.join(samples, on="key", how="anti")
        if len(stray):
            what = f"it keeps {len(stray)} samples that no shard has, such as {stray['key'][0]}"
            yield Finding("damaged", record.file, what)


def _is_record(name: str) -> bool:
    folder, _, leaf = name.removeprefix(f"{LEDGER}/").rpartition("/")
    kept = folder in KEPT if name.startswith(LEDGER) else folder in (*KEPT, CACHE)
    return name == STORE or (kept and leaf.endswith(".json"))


def _others(there: Iterable[str], promised: Collection[str]) -> Iterator[Finding]:
    """What no record names."""
    for name in sorted(there):
        if name in promised or _is_record(name):
            continue
        if STAGING in name.split("/")[:3:2]:  # of a store, or of an annex
            yield Finding("unfinished", name, "a writer's work in progress")
        else:
            yield Finding("orphan", name, "no record names it")


def _links(backend: Backend) -> Iterator[Finding]:
    for name in backend.links():
        yield Finding(
            "note",
            name,
            "a symbolic link: what it leads to may lie outside of the store",
        )
