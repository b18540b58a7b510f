"""Verification: read and compare everything that records name, and list every other file.

A store that passes can be read, see `checks`. A lost record, which the ledger still has, is damage, as is a
missing file.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import polars as pl
import pyarrow as pa

from vlmdistill.stores.annexes import misplaced_annex
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

NO_SAMPLES = pl.DataFrame(
    schema={"key": pl.String, "shard": pl.String, "content": pl.UInt64}
)
FAULTS = ("damaged", "missing", "unreadable")
T = TypeVar("T")


@dataclass(frozen=True)
class Verification:
    """The findings of a verification."""

    files: int
    bytes: int
    findings: tuple[Finding, ...]
    copies: frozenset[str]  # the records that have a good copy in the ledger

    @property
    def damage(self) -> tuple[Finding, ...]:
        """The files that are not as their records say, or could not be read."""
        return tuple(finding for finding in self.findings if finding.kind in FAULTS)

    def with_findings(self, findings: Iterable[Finding]) -> "Verification":
        """The same with further findings, each once."""
        return replace(self, findings=tuple(dict.fromkeys((*self.findings, *findings))))

    def with_annex(self, prefix: str, annex: "Verification") -> "Verification":
        """The same together with an annex, whose files are named by the `prefix` and their own name."""
        findings = [
            replace(finding, name=f"{prefix}{finding.name}")
            for finding in annex.findings
        ]
        return Verification(
            files=self.files + annex.files,
            bytes=self.bytes + annex.bytes,
            findings=(*self.findings, *findings),
            copies=self.copies | {f"{prefix}{name}" for name in annex.copies},
        )


def verify(
    path: str | Path, *, threads: int | None = None, progress: Progress = silent
) -> Verification:
    """Read everything once and compare it with its record, one annex after the other as well.

    `progress` is called with (bytes done, bytes in all), of each. StoreError only when there is no
    store, or a record of it is newer than this code.
    """
    backend = open_backend(path)
    stores = _by_store(backend.list_files(""))
    files = stores.pop("")
    if not _has_store(files):
        raise StoreError(f"there is no feature store at {path}")
    verified, store = _verify(backend, files, threads, progress)
    for prefix, files_there in sorted(stores.items()):
        if not _has_store(files_there):
            strays = _others((f"{prefix}{name}" for name in sorted(files_there)), ())
            verified = verified.with_findings(strays)
            continue
        folder = prefix.rstrip("/")
        of_annex, annex = _verify(
            backend.within(folder), files_there, threads, progress, is_annex=True
        )
        if store and annex:
            why = misplaced_annex(store, annex, folder)
            if why:
                wrong = f"it is no annex of the store: {why}"
                finding = Finding("damaged", STORE, wrong)
                of_annex = of_annex.with_findings([finding])
        verified = verified.with_annex(prefix, of_annex)
    return verified.with_findings(_linked_annexes(backend, files))


def _by_store(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The files of the store, under '', and of each annex, under its folder with a slash: name -> bytes."""
    stores: dict[str, dict[str, int]] = {"": {}}
    for name, size in sizes.items():
        folders = name.split("/")
        in_annex = folders[0] == ANNEXES and len(folders) > 2
        prefix = f"{folders[0]}/{folders[1]}/" if in_annex else ""
        stores.setdefault(prefix, {})[name.removeprefix(prefix)] = size
    return stores


def _linked_annexes(backend: Backend, files: Collection[str]) -> Iterator[Finding]:
    """Annexes, or the folder of all annexes, that are links or files."""
    names = [name for name in backend.links(ANNEXES) if name.count("/") < 2]
    if ANNEXES in files:
        names = [ANNEXES]
    for name in names:
        why = "it is no folder, and annexes are not read through links"
        yield Finding("damaged", name, why)


def _has_store(files: Iterable[str]) -> bool:
    return any(name == STORE or name.startswith(f"{COMMITS}/") for name in files)


@dataclass(frozen=True)
class _Checked:
    """The findings about the files of one record."""

    bytes: int
    findings: list[Finding]
    samples: pl.DataFrame | None = None  # of a shard with a good index


def _verify(
    backend: Backend,
    sizes: Mapping[str, int],
    threads: int | None,
    progress: Progress,
    *,
    is_annex: bool = False,
) -> tuple[Verification, StoreRecord | None]:
    """Verify a store or an annex, whose files were listed with these sizes; also returns its own record."""
    records = _Records(backend)
    own = records.by_name.get(STORE)
    if is_annex:
        records.by_name.pop(STORE, None)  # it names the head of the store around it
    findings = records.findings
    checks = StoreChecks(backend, sizes, _layout(own, findings))
    checked = list[_Checked]()
    total = sum(map(_bytes_of, records.by_name.values()))
    done = 0
    at_once = threads or _default_threads(backend)
    results = in_flight(
        lambda record: _check(checks, record), records.by_name.values(), at_once
    )
    for name, result in zip(records.by_name, results, strict=True):
        done += result.bytes
        progress(done, total)
        # Of a record that was removed on purpose meanwhile, nothing is damaged.
        if result.findings and records.is_current(name):
            findings += result.findings
        if isinstance(records.by_name[name], Commit):
            checked.append(result)

    # Compare the records with each other, and with the list of files.
    frames = [result.samples for result in checked if result.samples is not None]
    samples = pl.concat([NO_SAMPLES, *frames])
    findings += _differing(samples)
    if len(frames) == len(checked):
        findings += _strays(backend, records, samples)
    promised = set[str]()
    for record in records.by_name.values():
        promised.update(name for name, _ in files_of(record))
    findings += _others(sizes, promised)
    findings += _links(backend)
    verified = Verification(
        files=len(promised) + sum(map(_is_record, sizes)),
        bytes=total,
        findings=tuple(findings),
        copies=frozenset(records.copies),
    )
    return verified, own if isinstance(own, StoreRecord) else None


def _default_threads(backend: Backend) -> int:
    if backend.is_local:
        return min(4, os.cpu_count() or 1)
    return STREAMS


def _check(checks: StoreChecks, record: Record) -> _Checked:
    """Compare the files that a record names with it."""
    size = _bytes_of(record)
    if isinstance(record, Commit):
        findings, index = checks.shard(record)
        samples = None if index is None else _contents(record.shard, index)
        return _Checked(size, findings, samples)
    if isinstance(record, StoreRecord):
        return _Checked(size, checks.head(record))
    if isinstance(record, TableRecord):
        return _Checked(size, checks.table(record))
    return _Checked(size, [])


def _bytes_of(record: Record) -> int:
    """The bytes of all files that a record names."""
    return sum(entry[0] for _, entry in files_of(record))


def files_of(record: Record) -> list[tuple[str, Entry]]:
    """The files that a record names, with (bytes, blake3)."""
    if isinstance(record, Commit):
        entries = record.files.items()
        return [(f"{record.path}/{name}", entry) for name, entry in entries]
    if isinstance(record, StoreRecord):
        return [(record.head.file, record.head.entry)]
    if isinstance(record, TableRecord):
        return [(record.file, record.entry)]
    return []


class _Records:
    """All records of a store, the copy where one is lost; and the faults of records."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.findings: list[Finding] = []
        self.by_name: dict[str, Record] = {}
        self.copies = set[str]()  # the names of records that have a good copy
        names = self._names()
        origin = ""  # as `store.json` has it, which comes first
        uncovered = []
        for name, (record, copy) in zip(
            names, backend.map(self._read, names), strict=True
        ):
            if copy:
                self.copies.add(name)
            if record is None and (copy is not None or name == STORE):
                self._note_lost(name, copy)
            present = record or copy
            if present is None:
                continue
            self.by_name[name] = present
            if isinstance(present, StoreRecord):
                origin = content_hash(present.provenance.to_dict())
            if isinstance(present, Commit) and origin and present.origin != origin:
                why = "it is of another origin than the store"
                self.findings.append(Finding("damaged", name, why))
            if name.split("/")[0] in KEPT and copy != present:
                uncovered.append(name)
        if uncovered:
            why = (
                f"{len(uncovered)} records, such as {uncovered[0]}, have no copy: it would not be seen if "
                "they were lost. `vlmdistill store gc` makes the copies"
            )
            self.findings.append(Finding("note", LEDGER, why))

    def _note_lost(self, name: str, copy: Record | None) -> None:
        if any(finding.name == name for finding in self.findings):
            return
        why = "the record is gone"
        if copy:
            why = f"it is lost: {LEDGER}/{name} is its copy"
        self.findings.append(Finding("missing", name, why))

    def _names(self) -> list[str]:
        """The names of records and of their copies, `store.json` first."""
        names = set[str]()
        for folder in KEPT:
            for leaf in self._listed(f"{LEDGER}/{folder}"):
                names.add(f"{folder}/{leaf}.json")
        for folder in (*KEPT, CACHE):
            for leaf in self._listed(folder):
                names.add(f"{folder}/{leaf}.json")
        return [STORE, *sorted(names)]

    def _listed(self, folder: str) -> list[str]:
        return self._try(folder, lambda: record_names(self._backend, folder)) or []

    def _read(self, name: str) -> tuple[Record | None, Record | None]:
        """A record and its copy."""
        record = self._try(name, lambda: self._find(name))
        if name.split("/")[0] not in KEPT:
            return record, None
        copy = self._try(f"{LEDGER}/{name}", lambda: self._find_copy(name))
        return record, copy

    def _try(self, name: str, read: Callable[[], T]) -> T | None:
        """The result of `read`; None, and a finding, when it fails. A VersionError is raised."""
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
            record = self._find(name) or self._find_copy(name)
            return record == self.by_name[name]
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
    checksums = [name for name in index.column_names if name.startswith(XXH3)]
    key = pl.col("key").cast(pl.String)
    content = pl.struct(checksums).hash().alias("content")
    return frame_of(index).select(key, pl.lit(shard).alias("shard"), content)


def _differing(samples: pl.DataFrame) -> Iterator[Finding]:
    """Samples of several shards that do not have the same tensors in all of them."""
    repeated = samples.filter(samples["key"].is_duplicated())
    contents = repeated.group_by("key").agg("shard", pl.col("content").n_unique())
    differing = contents.filter(pl.col("content") > 1)
    if len(differing):
        key, shards, _ = differing.sort("key").row(0)
        detail = (
            f"{len(differing)} samples differ from shard to shard, such as {key} in {' and '.join(shards)}: "
            "the first shard by name counts"
        )
        yield Finding("note", COMMITS, detail)


def _strays(
    backend: Backend, records: _Records, samples: pl.DataFrame
) -> Iterator[Finding]:
    """Views that keep samples which no shard has."""
    damaged = {finding.name for finding in records.findings}
    for record in records.by_name.values():
        if not isinstance(record, ViewRecord) or record.file in damaged:
            continue
        try:
            table = table_of(backend, record)
        except (StoreError, OSError) as error:
            yield failed(record.file, error)
            continue
        kept = frame_of(table).filter(pl.col("reason").is_null())
        strays = kept.join(samples, on="key", how="anti")
        if len(strays):
            why = f"it keeps {len(strays)} samples that no shard has, such as {strays['key'][0]}"
            yield Finding("damaged", record.file, why)


def _is_record(name: str) -> bool:
    """Whether a file is a record, or the copy of one, by its name."""
    if name == STORE:
        return True
    folder, _, leaf = name.removeprefix(f"{LEDGER}/").rpartition("/")
    folders = KEPT if name.startswith(LEDGER) else (*KEPT, CACHE)
    return folder in folders and leaf.endswith(".json")


def _others(files: Iterable[str], promised: Collection[str]) -> Iterator[Finding]:
    """The files that no record names."""
    for name in sorted(files):
        if name in promised or _is_record(name):
            continue
        if STAGING in name.split("/")[:3:2]:  # of a store, or of an annex
            yield Finding("unfinished", name, "a writer's work in progress")
        else:
            yield Finding("orphan", name, "no record names it")


def _links(backend: Backend) -> Iterator[Finding]:
    for name in backend.links():
        detail = "a symbolic link: its target may lie outside of the store"
        yield Finding("note", name, detail)
