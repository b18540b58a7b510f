"""The merged index of all shards, and the copy of it that makes opening a large store quick.

Reading thousands of small indexes takes seconds on a disk and minutes on an object store. So the merged index
of many shards is kept in `cache/`. It only saves time: what it lacks is read from the shards, and a damaged
one is ignored.
"""

import contextlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
        self._keys, self._columns = frame["key"], frame.columns

    def find(self, key: str) -> dict[str, Any] | None:
        """The line of a sample, None when it is missing."""
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return None
        return dict(zip(self._columns, self.frame.row(at), strict=True))


class Shards:
    """The records and indexes of the committed shards of a store, each read once."""

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend = backend
        self._layout = layout
        self._arrays = tuple(spec.name for spec in layout.arrays)
        self._commits: dict[str, Commit] = {}
        self._looked = False
        self._kinds: dict[
            str, tuple[pa.DataType, str]
        ] = {}  # meta column -> type, in which shard
        self._schemas = set[bytes]()  # those that were learned
        self._known: tuple[Mapping[str, str], pl.DataFrame] | None = (
            None  # the folders of shards; their index
        )

    def commit(self, shard: str) -> Commit:
        """The record of a shard; StoreError when it is damaged."""
        if shard not in self._commits:
            record = read_record(self._backend, commit_name(shard), Commit)
            if why := self._layout.misfit(record.rows, record.files):
                raise damaged(f"{self._backend.url}/{commit_name(shard)}", why)
            self._commits[shard] = record
        return self._commits[shard]

    def table(self, shard: str) -> pa.Table:
        """The index of a shard; StoreError when it is damaged."""
        record = self.commit(shard)
        name = f"{record.named}/{INDEX}"
        table = read_arrow(self._backend, name, record.files[INDEX])
        try:
            schema = bytes(table.schema.serialize())
            check_columns(schema, self._arrays, record.meta, tuple(record.losses))
            if len(table) != record.rows["sample"]:
                raise ValueError(
                    f"it has {len(table)} samples, not {record.rows['sample']}"
                )
        except ValueError as error:
            raise damaged(f"{self._backend.url}/{name}", str(error)) from error
        if schema not in self._schemas:
            self.learn(shard, table.schema)
            self._schemas.add(schema)
        return table

    def require_kinds(self, shard: str, schema: pa.Schema) -> None:
        """StoreError when a meta column of a shard is of another type than in those seen so far, or in one.

        Looks once, not at each commit: what others write at the same time may still differ. `merge_index`
        reports that.
        """
        if not self._kinds and not self._looked:
            self._looked = True
            with contextlib.suppress(
                StoreError, OSError
            ):  # another's damage is not this shard's
                for first in committed_shards(self._backend)[:1]:
                    self.table(first)
        for field in schema:
            kind, other = self._kinds.get(field.name, (field.type, shard))
            if kind != field.type and _differ(kind, field.type):
                raise StoreError(
                    f"the meta column '{field.name}' is {field.type} in shard {shard}, and {kind} in the "
                    f"committed {other}: give it that type, or another name"
                )

    def learn(self, shard: str, schema: pa.Schema) -> None:
        """Note the types of a committed shard's meta columns."""
        for field in schema:
            if not (reserved(field.name) or pa.types.is_null(field.type)):
                self._kinds.setdefault(field.name, (field.type, shard))

    def keys(self, shards: Sequence[str]) -> set[str]:
        """The sample keys of these shards, all there are."""
        known, frame = self._covered(shards)
        keys = set[str]() if frame is None else set(frame["key"])
        fresh = [shard for shard in shards if shard not in known]
        return keys.union(
            *(
                table["key"].to_pylist()
                for table in self._backend.map(self.table, fresh)
            )
        )

    def merged(
        self, shards: Sequence[str], report: Progress = silent
    ) -> "pl.DataFrame":
        """The index of these shards, all there are; kept in the cache when that is worth it."""
        known, frame = self._covered(shards)
        fresh = [shard for shard in shards if shard not in known]
        frames = [] if frame is None else [frame]
        self._known = frame = None  # the columns may be freed one by one
        for at in range(0, len(fresh), TOGETHER):
            frames += self._frames(fresh[at : at + TOGETHER])
            report(min(at + TOGETHER, len(fresh)), len(fresh))
        merged = merge_index(frames, self._arrays)
        check_values(merged, self._arrays, map(self.commit, fresh))
        folders = {**known, **{shard: self.commit(shard).folder for shard in fresh}}
        if len(fresh) >= WORTH:
            self._keep(folders, merged)
        self._known = folders, merged
        return merged

    def _frames(self, shards: Sequence[str]) -> "Iterator[pl.DataFrame]":
        """The indexes of some shards, a frame per schema: a frame costs more than a shard."""
        import polars as pl

        alike: dict[bytes, list[tuple[str, pa.Table]]] = {}
        for shard, table in zip(
            shards, self._backend.map(self.table, shards), strict=True
        ):
            alike.setdefault(bytes(table.schema.serialize()), []).append((shard, table))
        for found in alike.values():
            table = (
                pa.concat_tables([table for _, table in found])
                .unify_dictionaries()
                .combine_chunks()
            )
            at = np.repeat(np.arange(len(found)), [len(table) for _, table in found])
            names = pl.Series("shard", [shard for shard, _ in found])
            yield frame_of(table).with_columns(names.gather(at))

    def _covered(
        self, shards: Sequence[str]
    ) -> "tuple[Mapping[str, str], pl.DataFrame | None]":
        """The folders of the shards that are known or cached, and their index."""
        if self._known is None:
            try:
                record, table = read_table(self._backend, CacheRecord, "index")
                check_columns(
                    bytes(table.schema.serialize()), self._arrays, added=ADDED
                )
                if not self._current(record.shards):
                    return {}, None
                self._known = record.shards, frame_of(table)
            except (StoreError, OSError, ValueError) as error:
                if not isinstance(error, FileNotFoundError):
                    log.info("the cached index is not used: %s", error)
                return {}, None
        # A shard that is gone was damaged and will be written anew: the cache speaks of the old one.
        return self._known if self._known[0].keys() <= set(shards) else ({}, None)

    def _current(self, folders: Mapping[str, str]) -> bool:
        """Whether shards still have the folders that the cache was made from: a damaged one is made anew.

        One listing shows nearly all; where a shard has two folders, its record decides.
        """
        there = self._backend.list_names(SHARDS)
        of = Counter(folder.rpartition("-")[0] for folder in there)
        doubtful = [shard for shard in folders if of[shard] > 1]
        return set(there).issuperset(folders.values()) and all(
            self.commit(shard).folder == folders[shard] for shard in doubtful
        )

    def _keep(self, folders: Mapping[str, str], merged: "pl.DataFrame") -> None:
        try:
            write_table(
                self._backend,
                CacheRecord(schema=SCHEMA_VERSION, shards=folders),
                merged,
            )
        except (
            StoreError,
            pa.ArrowInvalid,
        ) as error:  # cannot be written to, or numbers of 128 bits
            log.debug("the index is not cached: %s", error)


def _differ(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of two types make no one column, as `merge_index` has it."""
    frames = [
        frame_of(pa.schema({"column": one}).empty_table()) for one in (kind, other)
    ]
    return unlike(frame.schema for frame in frames) is not None
