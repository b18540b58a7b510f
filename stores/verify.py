"""Verification: every file a store's records name is read and compared; every other file is told."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import blake3

from vlmdistill.stores.arrays import CHUNK_FILE, read_rows
from vlmdistill.stores.errors import NewerError, StoreError
from vlmdistill.stores.layout import TOKENS, untiled
from vlmdistill.stores.manifest import (
    CACHE,
    COMMITS,
    DEAD,
    SHARDS,
    STATS,
    STORE,
    VIEWS,
    Record,
    commit_name,
    read_record,
    shard_name,
    units,
)
from vlmdistill.stores.place import STAGING, Place, place_of
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.tables import INDEX, read_arrow, table_names

BLOCK = 1 << 24
Kind = Literal["damaged", "missing", "orphan", "unfinished"]


@dataclass(frozen=True)
class Finding:
    """One file that is not as it should be.

    `damaged` and `missing` files are named by a record; `orphan` files are named by none and
    `unfinished` ones belong to a writer, perhaps a dead one: neither is ever read, and gc removes what
    a writer made of them.
    """

    kind: Kind
    name: str
    detail: str


@dataclass(frozen=True)
class Report:
    """What a verification found."""

    files: int
    bytes: int
    findings: tuple[Finding, ...]

    @property
    def damage(self) -> tuple[Finding, ...]:
        """What was promised and is not there as promised."""
        return tuple(finding for finding in self.findings if finding.kind in ("damaged", "missing"))


def verify(
    path: str | Path, *, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Read everything once and compare it with its record.

    `progress` is called with (bytes done, bytes in all). StoreError only when there is no
    store, or a record of it is newer than this code.
    """
    place = place_of(path)
    there = place.files("")
    if STORE not in there and not any(name.startswith(f"{COMMITS}/") for name in there):
        raise StoreError(f"there is no feature store at {path}")
    findings: list[Finding] = []
    commits: list[Record] = []
    promised = dict(_promises(place, findings, commits))
    total = sum(size for size, _ in promised.values())

    def check(item: tuple[str, tuple[int, str]]) -> tuple[int, Finding | None]:
        name, (size, checksum) = item
        try:
            has = there.get(name)
            if has != size:
                has = place.size(name)  # it may have come since all was listed
            if has is None:
                return size, Finding("missing", name, f"{size} bytes are gone")
            if has != size:
                return size, Finding("damaged", name, f"it has {has} bytes, its record says {size}")
            found = _checksum(place, name, size)
        except (OSError, StoreError) as error:
            return size, Finding("damaged", name, f"it cannot be read: {error}")
        return size, None if found == checksum else Finding("damaged", name, "its checksum does not match")

    done = 0
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1)) as pool:
        for size, finding in pool.map(check, promised.items()):
            done += size
            if progress:
                progress(done, total)
            if finding:
                findings.append(finding)
    bad = {finding.name for finding in findings}
    for commit in commits:
        if bad.isdisjoint(f"{SHARDS}/{commit['shard']}/{name}" for name in commit["files"]):
            try:
                findings += _untiled(place, commit)
            except (OSError, StoreError) as error:
                index = f"{SHARDS}/{commit['shard']}/{INDEX}"
                findings.append(Finding("damaged", index, f"it cannot be read: {error}"))
    if findings:  # what a collector removed meanwhile, with the record that named it, is not missing
        still = dict(_promises(place, [], []))
        findings = [
            found
            for found in findings
            if found.name not in promised or still.get(found.name) == promised[found.name]
        ]
    records = {STORE} | {name for name in there if _is_record(name)}
    for name in sorted(set(there) - set(promised) - records):
        if name.startswith((f"{STAGING}/", f"{DEAD}/")):
            findings.append(Finding("unfinished", name, "a writer's or collector's work in progress"))
        else:
            findings.append(Finding("orphan", name, "no record names it"))
    return Report(len(promised) + len(records), total, tuple(findings))


def _is_record(name: str) -> bool:
    folder, _, leaf = name.rpartition("/")
    return folder in (COMMITS, VIEWS, STATS, CACHE) and leaf.endswith(".json")


def _checksum(place: Place, name: str, size: int) -> str:
    state = blake3.blake3()
    for start in range(0, size, BLOCK):
        state.update(place.extent(name, start, min(BLOCK, size - start)).data)
    return str(state.hexdigest())


def _untiled(place: Place, commit: Record) -> Iterator[Finding]:
    """Samples that are as they were written and yet make no sequence: only a faulty writer leaves such."""
    shard, rows, files = f"{SHARDS}/{commit['shard']}", commit["rows"]["text"], commit["files"]
    size = files.get(f"{TOKENS.name}/{CHUNK_FILE}", (0,))[0]
    position_T = read_rows(place, shard, TOKENS, range(rows), rows, size)[0][:, 1]
    table = read_arrow(place, f"{shard}/{INDEX}", files[INDEX])
    for row in table.select(["key", "text_row", "text_tokens", "spans"]).to_pylist():
        mine_T = position_T[row["text_row"] : row["text_row"] + row["text_tokens"]]
        why = untiled(mine_T, [(span["start"], span["length"]) for span in row["spans"]])
        if why:
            yield Finding("damaged", f"{shard}/{INDEX}", f"sample {row['key']}: {why}")


def _promises(
    place: Place, findings: list[Finding], commits: list[Record]
) -> Iterator[tuple[str, tuple[int, str]]]:
    """Every file that some record names, with (bytes, blake3).

    Damaged records become `findings`, intact ones of units are added to `commits`.
    """

    def record(name: str) -> Record | None:
        try:
            return read_record(place, name)
        except FileNotFoundError:
            if name == STORE:  # others may go, and nothing is promised then
                findings.append(Finding("missing", name, "the record is gone"))
        except NewerError:
            raise
        except (StoreError, OSError) as error:
            findings.append(Finding("damaged", name, str(error)))
        return None

    def entry(pair: Any) -> tuple[int, str]:
        size, checksum = pair
        return int(size), str(checksum)

    store = record(STORE)
    if store is not None:
        yield store["head"]["file"], entry(store["head"]["entry"])
    origin = content_hash(store["provenance"]) if store is not None else None
    for unit in units(place):
        commit = record(commit_name(unit))
        if commit is None:
            continue
        commits.append(commit)
        # A record is intact and yet wrong where it was copied from another unit or store.
        if commit["unit"] != unit or commit["shard"] != shard_name(unit, commit["files"]):
            findings.append(Finding("damaged", commit_name(unit), f"it is the record of {commit['unit']}"))
        if origin is not None and commit["origin"] != origin:
            findings.append(Finding("damaged", commit_name(unit), "it is of another origin than the store"))
        for name, pair in commit["files"].items():
            yield f"{SHARDS}/{commit['shard']}/{name}", entry(pair)
    for folder in (VIEWS, STATS, CACHE):
        for name in table_names(place, folder):
            table = record(f"{folder}/{name}.json")
            if table is not None:
                yield table["file"], entry(table["entry"])
