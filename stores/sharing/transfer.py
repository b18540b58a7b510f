"""Moving samples between stores: each shard arrives whole and checked, or not at all.

A shard that is wanted whole is copied file by file, continuing what an interrupted copy left, and
counts once every checksum was compared on arrival. Of others, and where the target compresses
otherwise, the wanted samples are written anew, in the very bits they are stored in.
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
    specs = {spec.name: spec for spec in source.layout.arrays}
    if len(rows) == record.rows["sample"]:
        _copy_whole(source, target, record)
        return
    features = target.provenance.features
    with target.writer(_another(shard, rows["key"].to_list())) as writer:
        # Where the rows lie and what training said of them is not part of the sample.
        written = [name for name in CORE if not name.endswith(ROW)] + [*record.meta]
        for row in rows.iter_rows(named=True):
            arrays = (
                (spec, source.rows.read(specs[spec.name], row))
                for spec in target.layout.arrays
            )
            losses = {
                name: row[LOSS + name] for name in record.losses if name in features
            }
            writer.copy({column: row[column] for column in written}, arrays, losses)


def _another(shard: str, content: Any) -> str:
    """A name for some of the samples of a shard, or for other samples under that name."""
    mark = f".{content_hash([shard, content])[:8]}"
    return shard[: LONGEST - len(mark)] + mark


@retried()
def _copy_whole(source: Store, target: Store, record: Commit) -> None:
    """Copy a shard's files; without the arrays that the target does not hold.

    RacedError when another process commits other samples under the name of the shard first: a further attempt
    takes another name.
    """
    arrays = {spec.name for spec in target.layout.arrays}
    backend = target.backend
    # A folder of its own name, so that an interrupted copy is found again and continued.
    label = digest(f"{record.folder} {sorted(arrays)}".encode())[:16]
    with writing(backend):
        folder = backend.workspace(f"copy-{label}")
        keep = True  # what arrived before an interruption is not fetched again
        try:
            link = (
                source.backend.is_local and not backend.is_local
            )  # sent from where they lie
            files = _gather(source, record, folder, arrays, link)
            shard = _free_name(backend, record.shard, files)
            copy = replace(
                record,
                shard=shard,
                folder=shard_folder(shard, files),
                files=files,
                origin=content_hash(target.provenance.to_dict()),
                losses={
                    name: sums for name, sums in record.losses.items() if name in arrays
                },
            )
            if (
                commit(backend, copy, partial(_publish, backend, folder, copy)).folder
                != copy.folder
            ):
                raise RacedError(
                    f"{backend.url} is written to by too many others at once: run it again"
                )
            keep = False
        finally:
            backend.release(folder, keep=keep)


def _gather(
    source: Store, record: Commit, folder: Path, arrays: set[str], link: bool
) -> dict[str, Entry]:
    """Bring the files of a shard, or links, into a folder, of some arrays alone; (bytes, blake3) of each."""
    files = {
        name: entry
        for name, entry in record.files.items()
        if "/" not in name or name.split("/")[0] in arrays
    }
    fetched = dict(files)
    if len(files) < len(record.files):
        del fetched[INDEX]
        files[INDEX] = _copy_index(source, record, folder, arrays)
    bring = _link if link else _fetch
    for name, entry in fetched.items():
        bring(source.backend, f"{record.named}/{name}", folder / name, entry)
    return files


def _free_name(backend: Backend, shard: str, files: Files) -> str:
    """The name of the shard, or another where a shard of that name has other samples."""
    while (taken := find_commit(backend, shard)) and taken.folder != shard_folder(
        shard, files
    ):
        shard = _another(shard, files)
    return shard


def _copy_index(
    source: Store, record: Commit, folder: Path, arrays: set[str]
) -> tuple[int, str]:
    table = read_arrow(source.backend, f"{record.named}/{INDEX}", record.files[INDEX])
    gone = [
        column
        for column in table.column_names
        if column.startswith((XXH3, LOSS)) and column.partition(".")[2] not in arrays
    ]
    (folder / INDEX).unlink(missing_ok=True)
    return write_file(folder / INDEX, to_arrow(table.drop_columns(gone)))


def _link(backend: Backend, name: str, path: Path, entry: Entry) -> None:
    """Link to a file of a local backend; StoreError when it is not what its record says."""
    size = backend.size(name)
    if size is None:
        raise damaged(f"{backend.url}/{name}", "it is missing")
    if (size, backend.digest(name, size)) != entry:
        raise damaged(f"{backend.url}/{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(backend.url, name).absolute())


def _fetch(backend: Backend, name: str, path: Path, entry: Entry) -> None:
    """Copy a file, continuing after what is there; StoreError when it is not what its record says."""
    size, checksum = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(
        2 if path.exists() else 1
    ):  # what is there may be to blame: again, from the start
        if _fetch_rest(backend, name, path, size) == checksum:
            return
        path.unlink(missing_ok=True)
    raise damaged(f"{backend.url}/{name}")


def _fetch_rest(backend: Backend, name: str, path: Path, size: int) -> str:
    """Copy what is missing at the end of a file; the blake3 of all of it.

    Each byte goes where it belongs: two processes whose locks hold on one machine only write the same.
    """
    state = blake3.blake3()
    with open(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b"
    ) as file:
        there = file.seek(0, os.SEEK_END)
        if there > size:
            there = file.seek(file.truncate(0))
        file.seek(0)
        while data := file.read(min(BLOCK, there - file.tell())):
            state.update(data)
        for start in range(there, size, BLOCK):
            check_wanted()
            try:
                part = backend.read_range(name, start, min(BLOCK, size - start)).data
            except FileNotFoundError as error:
                raise damaged(f"{backend.url}/{name}", "it is missing") from error
            except OSError as error:
                what = f"{backend.url}/{name} cannot be read: {error}"
                raise StoreError(
                    f"{what}. Run it again: it goes on from here"
                ) from error
            file.write(part)
            state.update(part)
        file.flush()
        os.fsync(file.fileno())
        if not path.exists() or not os.path.samestat(
            path.stat(), os.fstat(file.fileno())
        ):
            raise OSError(
                f"{path} was replaced by another process while it was written"
            )
        return state.hexdigest() if path.stat().st_size == size else ""


def _publish(backend: Backend, folder: Path, record: Commit) -> None:
    """Publish a shard and compare every file as it arrived.

    StoreError when one differs from what was sent: it is removed, to be sent again.
    """
    backend.publish(folder, record.named)
    if (
        backend.is_local
    ):  # the folder was renamed, or what was there was compared with it
        if not is_complete(backend, record):
            what = f"another process has removed files of {backend.url}/{record.named}"
            raise StoreError(f"{what} before it was committed: run it again")
        return
    for file, (size, checksum) in record.files.items():
        name = f"{record.named}/{file}"
        try:
            same = backend.digest(name, size) == checksum
        except FileNotFoundError:
            same = False
        if not same:
            backend.remove(name)
            what = f"{backend.url}/{name} arrived with another checksum"
            raise StoreError(f"{what}. Run it again: that file will be sent again")
