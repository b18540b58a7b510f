"""The merged index of all shards, and the copy of it that makes opening a large store quick.

Reading thousands of small indexes takes seconds on a disk and minutes far away. So whoever merged
many leaves the result in `cache/`. It only ever saves time: what it lacks is read from the
shards, and a damaged or unwritable one is done without.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import CACHE, SHARDS, Record, commit_name, read_record
from vlmdistill.stores.place import Place
from vlmdistill.stores.tables import INDEX, merge_index, read_arrow, read_table, write_table

if TYPE_CHECKING:
    import polars as pl

WORTH = 64  # shards from which on the merged index is kept
REQUESTS = 16  # at once, to a place far away
NAME = "index"
log = logging.getLogger("vlmdistill.stores")


class Lines:
    """The merged index, and its lines by key: a bisection, six times as quick as a query."""

    def __init__(self, frame: "pl.DataFrame") -> None:
        self.frame = frame  # sorted by key
        self._keys, self._columns = frame["key"], frame.columns

    def find(self, key: str) -> dict[str, Any] | None:
        """The line of a sample, None when there is none."""
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return None
        return dict(zip(self._columns, self.frame.row(at), strict=True))


class Shards:
    """The records and indexes of the committed units of a place, each read once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._commits: dict[str, Record] = {}
        self._tables: dict[str, pa.Table] = {}
        self._cache: tuple[frozenset[str], pa.Table] | None = None  # the units it covers

    def commit(self, unit: str) -> Record:
        """The record of a unit; StoreError when it is damaged."""
        if unit not in self._commits:
            self._commits[unit] = read_record(self._place, commit_name(unit))
        return self._commits[unit]

    def table(self, unit: str) -> pa.Table:
        """The index of a unit's shard; StoreError when it is damaged."""
        if unit not in self._tables:
            record = self.commit(unit)
            name = f"{SHARDS}/{record['shard']}/{INDEX}"
            self._tables[unit] = read_arrow(self._place, name, record["files"][INDEX])
        return self._tables[unit]

    def load(self, units: Iterable[str]) -> None:
        """Read the indexes of these units, many at a time where each is a request."""
        missing = [unit for unit in units if unit not in self._tables]
        if self._place.here or len(missing) < 2:
            return
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(self.table, missing))

    def keys(self, units: Sequence[str]) -> set[str]:
        """The sample keys of these units, all there are."""
        covered, table = self._cached(units)
        keys = set(table["key"].to_pylist()) if table is not None else set()
        rest = [unit for unit in units if unit not in covered]
        self.load(rest)
        return keys.union(*(self.table(unit)["key"].to_pylist() for unit in rest))

    def merged(self, units: Sequence[str], arrays: Sequence[str]) -> "pl.DataFrame":
        """The index of these units, all there are; kept in the cache when that is worth it."""
        import polars as pl

        covered, cached = self._cached(units)
        fresh = [unit for unit in units if unit not in covered]
        self.load(fresh)
        frames = [] if cached is None else [_frame(cached)]
        for unit in fresh:
            names = (pl.lit(unit).alias("unit"), pl.lit(self.commit(unit)["shard"]).alias("shard"))
            frames.append(_frame(self.table(unit)).with_columns(*names))
        merged = merge_index(frames, arrays)
        if len(fresh) >= WORTH:
            self._keep(units, merged)
        return merged

    def _cached(self, units: Sequence[str]) -> tuple[frozenset[str], pa.Table | None]:
        if self._cache is None:
            try:
                record, table = read_table(self._place, CACHE, NAME)
                self._cache = frozenset(record["units"]), table
            except (StoreError, OSError) as error:
                if not isinstance(error, FileNotFoundError):
                    log.info("the cached index is not used: %s", error)
                return frozenset(), None
        covered, table = self._cache
        # A unit that is gone was damaged and will be written anew: the cache speaks of the old one.
        return (covered, table) if covered.issubset(units) else (frozenset(), None)

    def _keep(self, units: Sequence[str], merged: "pl.DataFrame") -> None:
        import polars as pl

        facts: Mapping[str, Any] = {"units": list(units)}
        try:
            table = merged.to_arrow(compat_level=pl.CompatLevel.oldest())
            write_table(self._place, CACHE, NAME, table, dict(facts))
        except StoreError as error:  # a store one may read but not write, or a full disk
            log.debug("the index is not cached: %s", error)


def _frame(table: pa.Table) -> "pl.DataFrame":
    import polars as pl

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
