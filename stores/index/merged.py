"""The merged index of all shards, and the copy of it that makes opening a large store quick.

Reading thousands of small indexes takes seconds on a disk and minutes on an object store. So the merged index
of many shards is kept in `cache/`. It only saves time: shards that it lacks are read themselves, and
a damaged one is ignored.
"""

import contextlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.arrow import frame_of, read_arrow
from vlmdistill.stores.index.tables import (
    ADDED,
    check_columns,
    check_values,
    merge_index,
    read_table,
    reserved,
    unlike,
    write_table,
)
from vlmdistill.stores.layout import Layout
from vlmdistill.stores.manifest import (
    INDEX,
    SHARDS,
    CacheRecord,
    Commit,
    commit_name,
    committed_shards,
    damaged,
    read_record,
)
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import polars as pl

WORTH = 64  # shards from which on the merged index is kept
TOGETHER = 256  # shards whose indexes become one frame
log = logging.getLogger("vlmdistill.stores")


class Lines:
    """The merged index, and its lines by key: a bisection, six times as quick as a query."""

    def __init__(self, frame: "pl.DataFrame") -> None:
        self.frame = frame  # sorted by key
        self._keys = frame["key"]
        self._columns = frame.columns

    def find(self, key: str) -> dict[str, Any] | None:
        """The line of a sample, None when it is missing."""
        number = bisect_left(self._keys, key)
        if number == len(self._keys) or self._keys[number] != key:
            return None
        return dict(zip(self._columns, self.frame.row(number), strict=True))


@dataclass(frozen=True)
class Covered:
    """The shards that a merged index covers, as name -> folder, and that index; None if it covers none."""

    folders: Mapping[str, str]
    index: "pl.DataFrame | None"


NOTHING = Covered({}, None)


class Shards:
    """The records and indexes of the committed shards of a store, each read once."""

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend = backend
        self._layout = layout
        self._arrays = tuple(spec.name for spec in layout.arrays)
        self._commits: dict[str, Commit] = {}
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        """Of each meta column, its type and the first shard that was seen to have it."""
        self._searched_types = False
        self._schemas = set[bytes]()  # whose types were learned
        self._covered: Covered | None = None

    def commit(self, shard: str) -> Commit:
        """The record of a shard; StoreError when it is damaged."""
        if shard not in self._commits:
            name = commit_name(shard)
            record = read_record(self._backend, name, Commit)
            misfit = self._layout.misfit(record.rows, record.files)
            if misfit:
                raise damaged(f"{self._backend.url}/{name}", misfit)
            self._commits[shard] = record
        return self._commits[shard]

    def table(self, shard: str) -> pa.Table:
        """The index of a shard; StoreError when it is damaged."""
        record = self.commit(shard)
        name = f"{record.path}/{INDEX}"
        table = read_arrow(self._backend, name, record.files[INDEX])
        schema = bytes(table.schema.serialize())
        samples = record.rows["sample"]
        try:
            check_columns(schema, self._arrays, record.meta, tuple(record.losses))
            if len(table) != samples:
                raise ValueError(f"it has {len(table)} samples, not {samples}")
        except ValueError as error:
            raise damaged(f"{self._backend.url}/{name}", str(error)) from error
        if schema not in self._schemas:
            self.learn(shard, table.schema)
            self._schemas.add(schema)
        return table

    def require_types(self, shard: str, schema: pa.Schema) -> None:
        """StoreError when a meta column of a new shard has another type than in the shards seen so far.

        Where none was seen, one is read first, once: other writers may still commit another type at the same
        time, which `merge_index` reports.
        """
        if not self._types and not self._searched_types:
            self._searched_types = True
            # Damage of another shard is not an error of this one.
            with contextlib.suppress(StoreError, OSError):
                for first in committed_shards(self._backend)[:1]:
                    self.table(first)
        for field in schema:
            kind, other = self._types.get(field.name, (field.type, shard))
            if kind != field.type and _differ(kind, field.type):
                raise StoreError(
                    f"the meta column '{field.name}' is {field.type} in shard {shard}, and {kind} in the "
                    f"committed {other}: give it that type, or another name"
                )

    def learn(self, shard: str, schema: pa.Schema) -> None:
        """Note the types of a committed shard's meta columns."""
        for field in schema:
            if reserved(field.name) or pa.types.is_null(field.type):
                continue
            self._types.setdefault(field.name, (field.type, shard))

    def keys(self, shards: Sequence[str]) -> set[str]:
        """The keys of the samples of `shards`, which are all that are committed."""
        covered = self._usable(shards)
        keys = set[str]() if covered.index is None else set(covered.index["key"])
        fresh = [shard for shard in shards if shard not in covered.folders]
        for table in self._backend.map(self.table, fresh):
            keys.update(table["key"].to_pylist())
        return keys

    def merged(
        self, shards: Sequence[str], report: Progress = silent
    ) -> "pl.DataFrame":
        """The index of `shards`, which are all that are committed; cached when that is worth it."""
        covered = self._usable(shards)
        folders = dict(covered.folders)
        fresh = [shard for shard in shards if shard not in folders]
        frames = [] if covered.index is None else [covered.index]
        # Without these two references, columns can be freed one by one.
        self._covered = None
        del covered
        for start in range(0, len(fresh), TOGETHER):
            frames += self._frames(fresh[start : start + TOGETHER])
            report(min(start + TOGETHER, len(fresh)), len(fresh))
        merged = merge_index(frames, self._arrays)
        check_values(merged, self._arrays, map(self.commit, fresh))
        folders |= {shard: self.commit(shard).folder for shard in fresh}
        if len(fresh) >= WORTH:
            self._keep(folders, merged)
        self._covered = Covered(folders, merged)
        return merged

    def _frames(self, shards: Sequence[str]) -> "Iterator[pl.DataFrame]":
        """The indexes of some shards, a frame per schema: a frame costs more than a shard."""
        import polars as pl

        tables = self._backend.map(self.table, shards)
        by_schema: dict[bytes, list[tuple[str, pa.Table]]] = {}
        for shard, table in zip(shards, tables, strict=True):
            schema = bytes(table.schema.serialize())
            by_schema.setdefault(schema, []).append((shard, table))
        for group in by_schema.values():
            names = pl.Series("shard", [shard for shard, _ in group])
            lengths = [len(table) for _, table in group]
            number_of_shard = np.repeat(np.arange(len(group)), lengths)
            together = pa.concat_tables([table for _, table in group])
            frame = frame_of(together.unify_dictionaries().combine_chunks())
            yield frame.with_columns(names.gather(number_of_shard))

    def _usable(self, shards: Sequence[str]) -> Covered:
        """The merged index that this process has or the cache holds, if it covers none but these shards."""
        if self._covered is None:
            self._covered = self._read_cache()
        covered = self._covered or NOTHING
        # A shard that is gone was damaged and will be written anew: the index has the old one.
        return covered if covered.folders.keys() <= set(shards) else NOTHING

    def _read_cache(self) -> Covered | None:
        try:
            record, table = read_table(self._backend, CacheRecord, "index")
            schema = bytes(table.schema.serialize())
            check_columns(schema, self._arrays, added=ADDED)
            if self._is_current(record.shards):
                return Covered(record.shards, frame_of(table))
        except FileNotFoundError:
            pass
        except (StoreError, OSError, ValueError) as error:
            log.info("the cached index is not used: %s", error)
        return None

    def _is_current(self, folders: Mapping[str, str]) -> bool:
        """Whether shards still have the folders that the cache was made from: a damaged one is made anew.

        One listing shows nearly all; where a shard has two folders, its record decides.
        """
        present = self._backend.list_names(SHARDS)
        if not set(present).issuperset(folders.values()):
            return False
        copies = Counter(folder.rpartition("-")[0] for folder in present)
        doubtful = [shard for shard in folders if copies[shard] > 1]
        return all(self.commit(shard).folder == folders[shard] for shard in doubtful)

    def _keep(self, folders: Mapping[str, str], merged: "pl.DataFrame") -> None:
        record = CacheRecord(schema=SCHEMA_VERSION, shards=folders)
        try:
            write_table(self._backend, record, merged)
        except (StoreError, pa.ArrowInvalid) as error:
            # The store cannot be written to, or a column has numbers of 128 bits.
            log.debug("the index is not cached: %s", error)


def _differ(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of two types cannot be in one column of the merged index."""
    schemas = [pa.schema({"column": each}) for each in (kind, other)]
    frames = [frame_of(schema.empty_table()) for schema in schemas]
    return unlike(frame.schema for frame in frames) is not None
