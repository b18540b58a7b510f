"""The store: hidden states and their index, committed shard by shard.

    STORE/
      store.json            provenance, target facts, layout, the frozen head's file; sealed
      heads/<hash>/         the target's frozen embedding and LM head
      commits/<unit>.json   a shard counts when its record is here; sealed
      shards/<unit>-<hash>/ a Zarr v3 group of arrays, and index.arrow
      views/, stats/        what filters keep; what training says of samples
      staging/, dead/       unfinished work; what a collector is removing

`docs/store-format.md` describes every file.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmdistill.stores.arrays import CHUNK_FILE, ArraySpec, extent_of, read_rows
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.heads import read_head, write_head
from vlmdistill.stores.indexing import Lines, Shards
from vlmdistill.stores.layout import TOKENS, Layout, rows_of
from vlmdistill.stores.manifest import (
    DEAD,
    HEADS,
    SHARDS,
    STATS,
    STORE,
    Record,
    damaged,
    read_record,
    seal,
    units,
)
from vlmdistill.stores.memory import Pool
from vlmdistill.stores.place import STAGING, Place, place_of, writing
from vlmdistill.stores.schema import (
    SCHEMA_VERSION,
    Array,
    Feature,
    Head,
    Provenance,
    Sample,
    Span,
    TargetInfo,
    content_hash,
)
from vlmdistill.stores.tables import XXH3, reserved
from vlmdistill.stores.writer import Writer

if TYPE_CHECKING:
    import polars as pl

FORMAT = "vlmdistill-store"


class Store:
    """A feature store at a local path or any fsspec URL. Make one with `create` or `open`."""

    def __init__(self, place: Place, record: Mapping[str, Any]) -> None:
        self.place = place
        self.record = record
        self.path = place.url
        self.provenance = Provenance.from_dict(record["provenance"])
        self.info = TargetInfo.from_dict(record["info"])
        self.layout = Layout.of(self.provenance, self.info, record["encoding"])
        self._shards = Shards(place)
        self._pool = Pool()
        self._index: tuple[Any, Lines] | None = None  # what it was made from; the index
        self._meta: Mapping[str, pl.DataType] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        provenance: Provenance,
        info: TargetInfo,
        head: Head,
        encoding: Mapping[str, str] | None = None,
    ) -> "Store":
        """Make a store, or open the one that is there if it is of the same origin.

        `encoding` maps feature names to `raw` (default), `zstd` or `int8`. StoreError names the
        field in which an existing store differs, or what else the folder holds.
        """
        place = place_of(path)
        Layout.of(provenance, info, encoding or {})
        if place.size(STORE) is None:
            record: Record = {
                "format": FORMAT,
                "schema": SCHEMA_VERSION,
                "provenance": provenance.to_dict(),
                "info": info.to_dict(),
                "encoding": dict(encoding or {}),
            }
            with writing(place):
                _require_room(place)
                place.create(STORE, seal({**record, "head": write_head(place, head)}))
        store = cls.open(path)
        store.require(provenance, info)
        if encoding is not None and dict(encoding) != store.layout.encoding:
            mine = dict(store.layout.encoding)
            raise StoreError(f"{store.path} was made with encoding {mine}, not {dict(encoding)}")
        return store

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Open a store; StoreError when there is none, or it is damaged or newer than this code."""
        place = place_of(path)
        try:
            record = read_record(place, STORE)
        except (FileNotFoundError, NotADirectoryError):
            what = f"there is no feature store at {path}"
            raise StoreError(f"{what}: make one with `vlmdistill features`") from None
        if record.get("format") != FORMAT:
            raise StoreError(f"{path} is not a feature store: its {STORE} does not say '{FORMAT}'")
        return cls(place, record)

    def require(self, provenance: Provenance, info: TargetInfo | None = None) -> None:
        """StoreError naming the first field in which this store's origin differs."""
        difference = self.provenance.mismatch(provenance)
        if difference is None and info is not None:
            mine, theirs = self.info.to_dict(), info.to_dict()
            odd = [name for name in mine if name != "name" and mine[name] != theirs[name]]
            difference = f"{odd[0]}: {mine[odd[0]]}, not {theirs[odd[0]]}" if odd else None
        if difference is not None:
            raise StoreError(f"{self.path} is of another origin ({difference}): use another store")

    def head(self) -> Head:
        """The target's frozen tables, checked against their checksum."""
        return read_head(self.place, self.record["head"])

    # Writing

    def writer(self, unit: str) -> Writer:
        """A context manager that commits the samples added to it all at once, or not at all."""
        origin = content_hash(self.provenance.to_dict())
        return Writer(self.place, self.layout, unit, origin, self._shards)

    def write_stats(self, run: str, table: "Mapping[str, Sequence[Any]] | pl.DataFrame") -> None:
        """Keep per-sample numbers of a training run beside the samples: `key` and further columns.

        In the index they appear as `<run>.<column>`, and plain as `<column>` from the latest run
        that has a value. Writing a run again replaces it. StoreError on a column that the index has already,
        or that other runs have with another kind of values.
        """
        from vlmdistill.stores.sidecar import write_stats

        write_stats(self.place, run, table, self.meta)

    # The index

    def keys(self) -> set[str]:
        """The keys of every committed sample, as of now."""
        return self._shards.keys(units(self.place))

    def commit(self, unit: str) -> Record:
        """The record of a committed unit; StoreError when it is damaged."""
        return self._shards.commit(unit)

    @property
    def index(self) -> "pl.DataFrame":
        """One row per sample, sorted by key; a key in several units is taken from the first by name.

        Columns: key, dataset, text_tokens, visual_tokens, response_tokens, spans, where its rows
        lie (unit, shard, text_row, visual_row, span_row, sample_row), xxh3.<array>, then meta.
        """
        return self._lines().frame

    @property
    def meta(self) -> "Mapping[str, pl.DataType]":
        """The columns of the index that came with the samples, and their types."""
        self._lines()
        return self._meta

    def _lines(self) -> Lines:
        from vlmdistill.stores.sidecar import join_stats

        there = tuple(units(self.place)), tuple(self.place.names(STATS))
        if self._index is None or self._index[0] != there:
            merged = self._shards.merged(there[0], [spec.name for spec in self.layout.arrays])
            self._meta = {name: kind for name, kind in merged.schema.items() if not reserved(name)}
            self._index = there, Lines(join_stats(self.place, merged))
        return self._index[1]

    def view(self, name: str | None) -> "pl.DataFrame":
        """The rows of the index that a view keeps, all when None; StoreError when there is no such view."""
        if name is None:
            return self.index
        from vlmdistill.stores.filters import view_keys

        return self.index.join(view_keys(self, name), on="key", how="semi", maintain_order="left")

    # Reading

    def read(self, key: str, features: Collection[Feature] | None = None) -> Sample:
        """One whole sample with the features asked for (all when None), every byte checked.

        StoreError when there is no such sample or feature, or when the data are damaged: it
        names the shard, the field and the sample.
        """
        row = self._index[1].find(key) if self._index else None
        row = row or self._lines().find(key)  # committed since we last looked?
        if row is None:
            raise StoreError(f"{self.path} has no sample '{key}'")
        chosen = self.layout.choose(features)
        self._announce(row, chosen)
        return self._read(row, chosen)

    def _read(
        self,
        row: Mapping[str, Any],
        features: Sequence[Feature],
        into: Mapping[Feature, Array] | None = None,
    ) -> Sample:
        """The sample of one row of the index, its features read `into` arrays [n, D] if given."""
        tokens_T4 = self.rows(TOKENS, row)
        ids_T, position_T, rope_T, response_T = np.ascontiguousarray(tokens_T4.T)
        written = self.commit(row["unit"])["meta"]  # without what training says of the sample
        held = {}
        for feature in features:
            specs, out = self.layout.parts(feature), into[feature] if into else None
            if len(specs) == 1:
                held[feature] = self.rows(specs[0], row, out)
                continue
            held[feature] = self.layout.join(feature, tuple(self.rows(spec, row) for spec in specs))
            if out is not None:
                out[:] = held[feature]
                held[feature] = out
        return Sample(
            key=row["key"],
            ids_T=ids_T,
            response_T=response_T.astype(np.bool_),
            position_T=position_T,
            rope_T=rope_T,
            spans=tuple(Span(span["start"], span["length"]) for span in row["spans"]),
            features=held,
            meta={
                name: value
                for name, value in row.items()
                if value is not None and (name in written or (name == "dataset" and value))
            },
        )

    def read_batch(self, rows: Sequence[Mapping[str, Any]], features: Collection[Feature]) -> list[Sample]:
        """The samples of several rows of the index, each feature's rows side by side in reused memory.

        `tensors.packed` makes one tensor of them without a copy. The memory is used for other samples
        once nothing refers to it any more.
        """
        blocks = {
            feature: self._pool.take(
                sum(rows_of(feature.where, row) for row in rows), self.layout.width, self.layout.storage
            )
            for feature in self.layout.choose(features)
        }
        for row in rows:
            self._announce(row, tuple(blocks))
        ends = dict.fromkeys(blocks, 0)
        samples = []
        for row in rows:
            into = {}
            for feature, block in blocks.items():
                start, ends[feature] = ends[feature], ends[feature] + rows_of(feature.where, row)
                into[feature] = block[start : ends[feature]]
            samples.append(self._read(row, tuple(blocks), into))
        return samples

    def _announce(self, row: Mapping[str, Any], features: Sequence[Feature]) -> None:
        """Let the disk start on all arrays of a sample at once, in the order of reading."""
        shard = f"{SHARDS}/{self.commit(row['unit'])['shard']}"
        specs = [spec for feature in features for spec in self.layout.parts(feature)]
        with contextlib.suppress(FileNotFoundError):  # whoever reads it says what is missing
            for spec in (TOKENS, *specs):
                span = self._span(spec, row)
                if span and not spec.compressed:
                    self.place.announce(*extent_of(shard, spec, span))

    @staticmethod
    def _span(spec: ArraySpec, row: Mapping[str, Any]) -> range:
        start = row[f"{spec.rows}_row"]
        return range(start, start + rows_of(spec.rows, row))

    def rows(self, spec: ArraySpec, row: Mapping[str, Any], out: Array | None = None) -> Array:
        """The rows of one array for one row of the index, as stored and checked, in `out` if given."""
        record = self.commit(row["unit"])
        span = self._span(spec, row)
        total = record["rows"][spec.rows]
        size = record["files"].get(f"{spec.name}/{CHUNK_FILE}", (0,))[0]
        shard = f"{SHARDS}/{record['shard']}"
        try:
            rows, checksum = read_rows(self.place, shard, spec, span, total, size, out)
        except FileNotFoundError as error:
            raise damaged(self._where(shard, spec, row), "it is missing") from error
        except OSError as error:
            raise StoreError(f"{self._where(shard, spec, row)} cannot be read: {error}") from error
        if checksum != row[XXH3 + spec.name]:
            raise damaged(self._where(shard, spec, row))
        return rows

    def _where(self, shard: str, spec: ArraySpec, row: Mapping[str, Any]) -> str:
        return f"{self.path}/{shard}: {spec.name} of sample {row['key']}"


def _require_room(place: Place) -> None:
    """StoreError when a place holds more than hidden files and what an interrupted creation leaves."""
    ours = (HEADS, STAGING, DEAD)
    others = [name for name in place.names("") if name not in ours and not name.startswith(".")]
    if others and place.size(STORE) is None:  # unless another process made the store since we looked
        what = f"{place.url} holds other things, such as {others[0]}, and no {STORE}"
        raise StoreError(f"{what}: name a new folder")
