"""Moving samples between stores: each unit arrives whole and checked, or not at all.

A shard that is wanted whole is copied file by file, continuing what an interrupted copy left, and
counts once every checksum was compared on arrival. Of others, and where the target compresses
otherwise, the wanted samples are written anew, in the very bits they are stored in.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import blake3
import polars as pl

from vlmdistill.stores.arrays import write_file
from vlmdistill.stores.commits import commit
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import SHARDS, Record, commit_name, damaged, read_record, shard_name
from vlmdistill.stores.place import Place, writing
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.tables import CORE, INDEX, LOSS, ROW, XXH3, read_arrow, to_arrow

BLOCK = 1 << 24
LONGEST = 200  # characters in the name of a unit


def copy_unit(source: Store, target: Store, unit: str, rows: pl.DataFrame) -> None:
    """Copy samples of a unit, rows of the index of `source`, with the features that the target holds."""
    record = source.commit(unit)
    specs = {spec.name: spec for spec in source.layout.arrays}
    alike = all(specs[spec.name] == spec for spec in target.layout.arrays)
    if alike and len(rows) == record["rows"]["sample"]:
        _copy_shard(source, target, record)
        return
    features = target.provenance.features
    with target.writer(_another(unit, rows["key"].to_list())) as writer:
        # Where the rows lie and what training said of them is not part of the sample.
        written = [name for name in CORE if not name.endswith(ROW)] + record["meta"]
        for row in rows.iter_rows(named=True):
            arrays = ((spec, source.rows(specs[spec.name], row)) for spec in target.layout.arrays)
            losses = {name: row[LOSS + name] for name in record["losses"] if name in features}
            writer.copy({column: row[column] for column in written}, arrays, losses)


def _another(unit: str, content: Any) -> str:
    """A name for some of the samples of a unit, or for other samples than those of that name."""
    mark = f".{content_hash(content)[:8]}"
    return unit[: LONGEST - len(mark)] + mark


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
            if not target.place.here:  # there it was moved, or what lies there compared with it
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
        finally:
            target.place.release(folder, keep=keep)


def _free_unit(target: Store, unit: str, files: Record) -> str:
    """The unit's own name, or another where that stands for other samples in the target."""
    try:
        taken = read_record(target.place, commit_name(unit))["shard"]
    except FileNotFoundError:
        return unit
    return unit if taken == shard_name(unit, files) else _another(unit, files)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    continued = path.exists()
    if _fetch_rest(place, name, path, size) == checksum:
        return
    path.unlink()  # what was there may be to blame: once more, from the start
    if continued and _fetch_rest(place, name, path, size) == checksum:
        return
    path.unlink(missing_ok=True)
    raise damaged(f"{place.url}/{name}")


def _fetch_rest(place: Place, name: str, path: Path, size: int) -> str:
    """Copy what is missing at the end of a file; the blake3 of all of it."""
    state = blake3.blake3()
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
                raise StoreError(f"{what}. Run it again: it goes on from here") from error
            file.write(data)
            state.update(data)
        file.flush()
        os.fsync(file.fileno())
    return state.hexdigest()


def _arrived(place: Place, shard: str, files: Record) -> None:
    """Compare every file where it now is; one that is not as it was sent is removed, to be sent again."""
    for name, (size, checksum) in files.items():
        state = blake3.blake3()
        for start in range(0, size, BLOCK):
            state.update(place.extent(f"{SHARDS}/{shard}/{name}", start, min(BLOCK, size - start)).data)
        if state.hexdigest() != checksum:
            place.remove(f"{SHARDS}/{shard}/{name}")
            what = f"{place.url}/{SHARDS}/{shard}/{name} arrived with another checksum"
            raise StoreError(f"{what}. Run it again: that file is sent anew")
