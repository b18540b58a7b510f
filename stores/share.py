"""Sharing: copy what is missing from one store into another, near or far.

Merging, pushing and pulling are one act. Samples are missing when neither their key nor their
content is there. A shard that is wanted whole is copied file by file, continuing what an
interrupted copy left, and counts once every checksum was compared on arrival; of others the
wanted samples are written anew, in the very bits they are stored in.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import polars as pl

from vlmdistill.stores.arrays import write_file
from vlmdistill.stores.commits import commit
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import (
    SHARDS,
    STATS,
    STORE,
    VIEWS,
    Record,
    commit_name,
    damaged,
    read_record,
    shard_name,
)
from vlmdistill.stores.place import Place, place_of, writing
from vlmdistill.stores.schema import Feature, Provenance, content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.tables import (
    CORE,
    INDEX,
    LOSS,
    ROW,
    XXH3,
    read_arrow,
    read_table,
    table_names,
    to_arrow,
    write_table,
)

BLOCK = 1 << 24
Progress = Callable[[int, int], None]  # samples done, samples in all


class InterruptedCopyError(StoreError):
    """A file could not be read to its end; what arrived of it stays."""


@dataclass(frozen=True)
class Copied:
    """What a copy did, in samples."""

    copied: int
    present: int  # were there already, by key and content
    twins: int  # were there already under another key
    conflicts: tuple[str, ...]  # keys that are there with other content: the ones there stay


def merge(
    target: str | Path, sources: Sequence[str | Path], *, progress: Progress | None = None
) -> list[Copied]:
    """Copy what `target` misses from each source, making it when it is not there.

    StoreError naming the field when a source is of another target, processor, template, feature
    set or dtype; nothing is copied from any then.
    """
    stores = [Store.open(path) for path in sources]
    for store in stores[1:]:
        stores[0].require(store.provenance, store.info)
    into = _like(target, stores[0], stores[0].layout.features)
    for store in stores:
        into.require(store.provenance, store.info)
    return [copy(store, into, progress=progress) for store in stores]


def send(
    source: str | Path,
    target: str | Path,
    *,
    view: str | None = None,
    features: Collection[Feature] | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Push or pull: copy a store, or a view of it, or some features of it, where they are missing.

    The frozen head travels along; so do views and statistics when the store goes whole.
    StoreError when the target is of another origin, or when what arrives is not what was sent.
    """
    store = Store.open(source)
    return copy(store, _like(target, store, store.layout.choose(features)), view=view, progress=progress)


def _like(path: str | Path, store: Store, features: Sequence[Feature]) -> Store:
    """A store at `path` of the same origin, with these features; opened when it is there."""
    names = tuple(feature.name for feature in features)
    provenance = Provenance.from_dict({**store.provenance.to_dict(), "features": names})
    encoding = {name: value for name, value in store.layout.encoding.items() if name in names}
    if place_of(path).size(STORE) is None:
        return Store.create(path, provenance, store.info, store.head(), encoding)
    target = Store.open(path)
    target.require(provenance, store.info)
    if target.layout.encoding != encoding:
        theirs = dict(target.layout.encoding) or "raw"
        raise StoreError(f"{path} keeps its features as {theirs}, {store.path} as {encoding or 'raw'}")
    return target


def copy(
    source: Store, target: Store, *, view: str | None = None, progress: Progress | None = None
) -> Copied:
    """Copy the samples of a view (all when None) that `target` misses, with the features it holds."""
    wanted, there = source.view(view), target.index
    xxh3 = [XXH3 + spec.name for spec in target.layout.arrays]
    known = wanted.join(there.select("key", *xxh3), on="key", how="inner", suffix=".there")
    unlike = known.filter(pl.any_horizontal(pl.col(name) != pl.col(f"{name}.there") for name in xxh3))
    fresh = wanted.join(there.select("key"), on="key", how="anti", maintain_order="left")
    missing = fresh.join(there.select(xxh3).unique(), on=xxh3, how="anti", maintain_order="left")
    done = 0
    for (unit,), rows in missing.sort("unit", "sample_row").group_by("unit", maintain_order=True):
        _copy_unit(source, target, str(unit), rows)
        done += len(rows)
        if progress:
            progress(done, len(missing))
    if view is None:
        _copy_tables(source.place, target.place)
    conflicts = tuple(unlike["key"].to_list())
    return Copied(len(missing), len(known) - len(conflicts), len(fresh) - len(missing), conflicts)


def _copy_unit(source: Store, target: Store, unit: str, rows: pl.DataFrame) -> None:
    record = source.commit(unit)
    if len(rows) == record["rows"]["sample"]:
        _copy_shard(source, target, record)
        return
    name = f"{unit}.{content_hash(rows['key'].to_list())[:8]}"
    features = target.provenance.features
    with target.writer(name) as writer:
        # Where the rows lie and what training said of them is not part of the sample.
        written = [name for name in CORE if not name.endswith(ROW)] + record["meta"]
        for row in rows.iter_rows(named=True):
            arrays = ((spec, source.rows(spec, row)) for spec in target.layout.arrays)
            losses = {name: row[LOSS + name] for name in record["losses"] if name in features}
            writer.copy({column: row[column] for column in written}, arrays, losses)


def _copy_shard(source: Store, target: Store, record: Record) -> None:
    """Copy a shard's files; without the arrays that the target does not hold."""
    arrays = {spec.name for spec in target.layout.arrays}
    files = {
        name: tuple(entry)
        for name, entry in record["files"].items()
        if "/" not in name or name.split("/")[0] in arrays
    }
    origin = f"{SHARDS}/{record['shard']}"
    # A folder of its own name, so that an interrupted copy is found again and continued.
    label = hashlib.sha256(f"{record['shard']} {sorted(arrays)}".encode()).hexdigest()[:16]
    with writing(target.place):
        folder = target.place.workspace(f"copy-{label}")
        keep = True  # what arrived before an interruption is not fetched again
        try:
            fetched = dict(files)
            if len(files) < len(record["files"]):
                del fetched[INDEX]
                files[INDEX] = _copy_index(source, record, folder, arrays)
            for name, entry in fetched.items():
                _fetch(source.place, f"{origin}/{name}", folder / name, entry)
            unit = _free_unit(target, record["unit"], files)
            shard = shard_name(unit, files)
            target.place.publish(folder, f"{SHARDS}/{shard}")
            _arrived(target.place, shard, files)
            changed = {
                "unit": unit,
                "shard": shard,
                "files": files,
                "origin": content_hash(target.provenance.to_dict()),
                "losses": {name: sums for name, sums in record["losses"].items() if name in arrays},
            }
            commit(target.place, {**record, **changed})
            keep = False
        except StoreError as error:
            keep = isinstance(error, InterruptedCopyError)
            raise
        finally:
            target.place.release(folder, keep=keep)


def _free_unit(target: Store, unit: str, files: Record) -> str:
    """The unit's own name, or another where that stands for other samples in the target."""
    try:
        taken = read_record(target.place, commit_name(unit))["shard"]
    except FileNotFoundError:
        return unit
    if taken == shard_name(unit, files):
        return unit
    return f"{unit}.{content_hash(files)[:8]}"


def _copy_index(source: Store, record: Record, folder: Path, arrays: set[str]) -> tuple[int, str]:
    name = f"{SHARDS}/{record['shard']}/{INDEX}"
    table = read_arrow(source.place, name, record["files"][INDEX])
    gone = [
        column
        for column in table.column_names
        if column.startswith((XXH3, LOSS)) and column.partition(".")[2] not in arrays
    ]
    (folder / INDEX).unlink(missing_ok=True)
    return write_file(folder / INDEX, to_arrow(table.drop_columns(gone)))


def _fetch(place: Place, name: str, path: Path, entry: tuple[Any, ...]) -> None:
    """Copy a file, continuing after what is there; StoreError when it is not what its record says."""
    size, checksum = entry
    state = blake3.blake3()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if file.tell() > size:
            file.seek(file.truncate(0))
        if file.tell():
            state.update_mmap(path)
        for start in range(file.tell(), size, BLOCK):
            try:
                data = place.extent(name, start, min(BLOCK, size - start)).data
            except FileNotFoundError as error:
                raise damaged(f"{place.url}/{name}", "it is missing") from error
            except OSError as error:
                what = f"{place.url}/{name} cannot be read: {error}"
                raise InterruptedCopyError(f"{what}. Run it again: it goes on from here") from error
            file.write(data)
            state.update(data)
        file.flush()
        os.fsync(file.fileno())
    if state.hexdigest() != checksum:
        path.unlink()
        raise damaged(f"{place.url}/{name}")


def _arrived(place: Place, shard: str, files: Record) -> None:
    """Compare every file where it now is, unless it was compared on this very file system."""
    if place.here:
        return
    for name, (size, checksum) in files.items():
        state = blake3.blake3()
        for start in range(0, size, BLOCK):
            state.update(place.extent(f"{SHARDS}/{shard}/{name}", start, min(BLOCK, size - start)).data)
        if state.hexdigest() != checksum:
            place.remove(f"{SHARDS}/{shard}/{name}")  # so that it is sent again
            raise damaged(f"{place.url}/{SHARDS}/{shard}/{name}", "it arrived with another checksum")


def _copy_tables(source: Place, target: Place) -> None:
    """Copy views and statistics whose names are free."""
    for folder in (VIEWS, STATS):
        for name in set(table_names(source, folder)) - set(table_names(target, folder)):
            facts, table = read_table(source, folder, name)
            write_table(target, folder, name, table, facts)
