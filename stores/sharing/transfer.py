"""Moving samples between stores: each shard arrives whole and checked, or not at all.

A shard that is wanted whole is copied file by file, continuing an interrupted copy, and counts once every
checksum was compared on arrival. Of other shards, the wanted samples are written anew, in the very bits that
they are stored in.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import polars as pl
from msgspec.structs import replace

from vlmdistill.stores.arrays import write_file
from vlmdistill.stores.backends.backend import BLOCK, Backend, check_wanted, writing
from vlmdistill.stores.commits import commit, find_commit, is_complete
from vlmdistill.stores.errors import RacedError, StoreError
from vlmdistill.stores.index.arrow import read_arrow, to_arrow
from vlmdistill.stores.index.tables import CORE, LOSS, ROW, XXH3
from vlmdistill.stores.manifest import (
    INDEX,
    Commit,
    Entry,
    Files,
    damaged,
    digest,
    shard_folder,
)
from vlmdistill.stores.retry import retried
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store

LONGEST = 200  # characters in the name of a shard


def copy_shard(source: Store, target: Store, shard: str, rows: pl.DataFrame) -> None:
    """Copy samples of a shard, rows of the index of `source`, with the features that the target holds."""
    record = source.commit(shard)
    if len(rows) == record.rows["sample"]:
        _copy_whole(source, target, record)
        return
    spec_of = {spec.name: spec for spec in source.layout.arrays}
    features = target.provenance.features
    losses = [name for name in record.losses if name in features]
    # Where the rows lie and the statistics of training are not part of a sample.
    columns = [name for name in CORE if not name.endswith(ROW)] + [*record.meta]
    with target.writer(_derived_name(shard, rows["key"].to_list())) as writer:
        for line in rows.iter_rows(named=True):
            arrays = (
                (spec, source.rows.read(spec_of[spec.name], line))
                for spec in target.layout.arrays
            )
            writer.copy(
                {column: line[column] for column in columns},
                arrays,
                {name: line[LOSS + name] for name in losses},
            )


def _derived_name(shard: str, content: Any) -> str:
    """A name for some of the samples of a shard, or for other samples under that name."""
    mark = f".{content_hash([shard, content])[:8]}"
    return shard[: LONGEST - len(mark)] + mark


@retried()
def _copy_whole(source: Store, target: Store, record: Commit) -> None:
    """Copy a shard's files; without the arrays that the target does not hold.

    RacedError when another process commits other samples under the name of the shard first: a further
    attempt takes another name.
    """
    arrays = {spec.name for spec in target.layout.arrays}
    backend = target.backend
    # A folder of its own name, so that an interrupted copy is found again and continued.
    label = digest(f"{record.folder} {sorted(arrays)}".encode())[:16]
    with writing(backend):
        folder = backend.workspace(f"copy-{label}")
        keep = True  # files that arrived before an interruption are not fetched again
        try:
            files = _gather(source, target, record, folder)
            copy = _copied_record(record, target, files)
            committed = commit(backend, copy, partial(_publish, backend, folder, copy))
            if committed.folder != copy.folder:
                raise RacedError(
                    f"{backend.url} is written to by too many others at once: run it again"
                )
            keep = False
        finally:
            backend.release(folder, keep=keep)


def _copied_record(record: Commit, target: Store, files: Files) -> Commit:
    """The record of a shard in the target, which may hold fewer arrays and have other names."""
    shard = _free_name(target.backend, record.shard, files)
    losses = record.losses
    arrays = {spec.name for spec in target.layout.arrays}
    return replace(
        record,
        shard=shard,
        folder=shard_folder(shard, files),
        files=files,
        origin=content_hash(target.provenance.to_dict()),
        losses={name: losses[name] for name in losses if name in arrays},
    )


def _gather(
    source: Store, target: Store, record: Commit, folder: Path
) -> dict[str, Entry]:
    """Bring the files of a shard, or links to them, into a folder; (bytes, blake3) of each.

    Only arrays that the target holds are brought.
    """
    arrays = {spec.name for spec in target.layout.arrays}
    files = {}
    for name, entry in record.files.items():
        if "/" not in name or name.split("/")[0] in arrays:
            files[name] = entry
    fetched = dict(files)
    if len(files) < len(record.files):
        del fetched[INDEX]
        files[INDEX] = _copy_index(source, record, folder, arrays)
    # Files of a disk are sent to a URL from where they lie.
    link = source.backend.is_local and not target.backend.is_local
    bring = _link if link else _fetch
    for name, entry in fetched.items():
        bring(source.backend, f"{record.path}/{name}", folder / name, entry)
    return files


def _free_name(backend: Backend, shard: str, files: Files) -> str:
    """The name of the shard, or another where a shard of that name has other samples."""
    while True:
        present = find_commit(backend, shard)
        if not present or present.folder == shard_folder(shard, files):
            return shard
        shard = _derived_name(shard, files)


def _copy_index(
    source: Store, record: Commit, folder: Path, arrays: set[str]
) -> tuple[int, str]:
    table = read_arrow(source.backend, f"{record.path}/{INDEX}", record.files[INDEX])
    dropped = []
    for column in table.column_names:
        of_array = column.startswith((XXH3, LOSS))
        if of_array and column.partition(".")[2] not in arrays:
            dropped.append(column)
    (folder / INDEX).unlink(missing_ok=True)
    return write_file(folder / INDEX, to_arrow(table.drop_columns(dropped)))


def _link(backend: Backend, name: str, path: Path, entry: Entry) -> None:
    """Link to a file of a local backend; StoreError when it is not as its record says."""
    size = backend.size(name)
    if size is None:
        raise damaged(f"{backend.url}/{name}", "it is missing")
    if (size, backend.digest(name, size)) != entry:
        raise damaged(f"{backend.url}/{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(backend.url, name).absolute())


def _fetch(backend: Backend, name: str, path: Path, entry: Entry) -> None:
    """Copy a file, continuing an interrupted copy; StoreError when it is not as its record says."""
    size, checksum = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    # A part that is there may be to blame: then again, from the start.
    attempts = 2 if path.exists() else 1
    for _ in range(attempts):
        if _fetch_rest(backend, name, path, size) == checksum:
            return
        path.unlink(missing_ok=True)
    raise damaged(f"{backend.url}/{name}")


def _fetch_rest(backend: Backend, name: str, path: Path, size: int) -> str:
    """Copy the missing end of a file; the blake3 of all of it.

    Each byte goes where it belongs: two processes whose locks hold on one machine only write the same.
    """
    state = blake3.blake3()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(handle, "r+b") as file:
        present = file.seek(0, os.SEEK_END)
        if present > size:
            present = file.seek(file.truncate(0))
        # Hash the first part.
        file.seek(0)
        while data := file.read(min(BLOCK, present - file.tell())):
            state.update(data)
        # Fetch and hash the rest.
        for start in range(present, size, BLOCK):
            check_wanted()
            block = _read_block(backend, name, start, min(BLOCK, size - start))
            file.write(block)
            state.update(block)
        file.flush()
        os.fsync(file.fileno())
        written = os.fstat(file.fileno())
        if not path.exists() or not os.path.samestat(path.stat(), written):
            raise OSError(
                f"{path} was replaced by another process while it was written"
            )
        return state.hexdigest() if path.stat().st_size == size else ""


def _read_block(backend: Backend, name: str, start: int, length: int) -> memoryview:
    try:
        return backend.read_range(name, start, length).data
    except FileNotFoundError as error:
        raise damaged(f"{backend.url}/{name}", "it is missing") from error
    except OSError as error:
        raise StoreError(
            f"{backend.url}/{name} cannot be read: {error}. Run it again: it goes on from here"
        ) from error


def _publish(backend: Backend, folder: Path, record: Commit) -> None:
    """Publish a shard and compare every file as it arrived.

    StoreError when one differs from the sent one: it is removed, to be sent again.
    """
    backend.publish(folder, record.path)
    if backend.is_local:
        # The folder was renamed, or one of its name was compared with it.
        if not is_complete(backend, record):
            raise StoreError(
                f"another process has removed files of {backend.url}/{record.path} before it was committed: "
                "run it again"
            )
        return
    for file, (size, checksum) in record.files.items():
        name = f"{record.path}/{file}"
        if not _arrived(backend, name, size, checksum):
            backend.remove(name)
            raise StoreError(
                f"{backend.url}/{name} arrived with another checksum. Run it again: that file will be sent "
                "again"
            )


def _arrived(backend: Backend, name: str, size: int, checksum: str) -> bool:
    try:
        return backend.digest(name, size) == checksum
    except FileNotFoundError:
        return False
