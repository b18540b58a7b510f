"""The store: hidden states and their index, committed shard by shard.

    STORE/
      store.json             provenance, target facts, layout, the frozen head's file; sealed
      heads/<hash>/          the target's frozen embedding and LM head
      commits/<shard>.json   a shard counts when its record is here; sealed
      shards/<shard>-<hash>/ a Zarr v3 group of arrays, and index.arrow
      views/, stats/         samples that filters keep; statistics from training
      ledger/                a copy of each record, by which lost ones are noticed
      annexes/<hash>/        a store, without heads/, of further features of the same samples
      staging/               unfinished work

`docs/store-format.md` describes every file.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vlmdistill.stores import notebook
from vlmdistill.stores.annexes import SAME_SAMPLE, annex_folder, misplaced_annex
from vlmdistill.stores.backends.backend import STAGING, Backend, writing
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.commits import commit, is_complete, require_all
from vlmdistill.stores.errors import StoreError, one_line
from vlmdistill.stores.heads import read_head, write_head
from vlmdistill.stores.index.merged import Lines, Shards
from vlmdistill.stores.index.tables import reserved, view_keys
from vlmdistill.stores.layout import Layout
from vlmdistill.stores.manifest import (
    ANNEXES,
    COMMITS,
    FORMAT,
    HEADS,
    STATS,
    STORE,
    Commit,
    StoreRecord,
    committed_shards,
    damaged,
    names_in,
    read_record,
    seal,
)
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.reading import Line, SampleReader, ShardRows
from vlmdistill.stores.schema import (
    SCHEMA_VERSION,
    Array,
    Feature,
    FrozenTables,
    PackedSamples,
    Provenance,
    Sample,
    TargetInfo,
    as_features,
    content_hash,
)
from vlmdistill.stores.suggestions import did_you_mean
from vlmdistill.stores.writer import Writer

if TYPE_CHECKING:
    import polars as pl
    import zarr


class Store:
    """A feature store at a local path or any fsspec URL; `open_store` and `create_store` make one.

    It maps keys to samples: `len(store)`, `key in store`, `for key in store` and `store[key]` work as on a
    dictionary.

    Attributes:
        path: The folder or URL.
        provenance: Hashes of the target that the features come from, their names and dtype.
        info: Facts of the target, such as `hidden_size` (D) and `vocab_size` (V).
    """

    def __init__(
        self, backend: Backend, record: StoreRecord, report: Progress = silent
    ) -> None:
        self.backend = backend
        self.record = record
        self.path = backend.url
        self.provenance = record.provenance
        self.info = record.info
        self.layout = Layout.of(self.provenance, self.info, record.encoding)
        self.buffers: list[dict[Feature, Array]] = []
        """Of finished epochs, each for the features of a batch."""
        self._report = report
        self._shards = Shards(backend, self.layout)
        self.rows = ShardRows(backend, self.layout, self.commit)
        self._samples = SampleReader(self.rows, self._find_feature)
        self._index: _MergedIndex | None = None

    @classmethod
    def create(
        cls,
        path: str | Path | Backend,
        provenance: Provenance,
        info: TargetInfo,
        head: FrozenTables,
        encoding: Mapping[str, str] | None = None,
    ) -> "Store":
        """Make a store, or open the one that is there if it is of the same origin.

        `encoding` maps feature names to `raw` (default) or `int8`. StoreError names the
        field in which an existing store differs, or another thing that the folder holds.
        """
        backend = open_backend(path)
        Layout.of(provenance, info, encoding or {})
        if backend.size(STORE) is None:
            with writing(backend):
                require_room(backend)
                record = StoreRecord(
                    schema=SCHEMA_VERSION,
                    format=FORMAT,
                    provenance=provenance,
                    info=info,
                    encoding=dict(encoding or {}),
                    head=write_head(backend, head),
                )
                backend.create(STORE, seal(record))
        store = cls.open(backend)
        store.require(provenance, info)
        store._require_encoding(encoding)
        return store

    @classmethod
    def open(
        cls,
        path: str | Path | Backend,
        cache: str | None = None,
        report: Progress = silent,
    ) -> "Store":
        """Open a store; StoreError when it is missing, damaged or of another version of the format.

        `cache`, as `DIR:SIZE`, keeps arrays that are read of a URL on a local disk, in at most so many bytes.
        `report` gets the number of shards whose index is read, and of all.
        """
        backend = open_backend(path, cache)
        try:
            record = read_record(backend, STORE, StoreRecord)
        except (FileNotFoundError, NotADirectoryError):
            place = backend.url if path is backend else path
            is_workspace = backend.size(f"features/{STORE}") is not None
            cure = "make one with `vlmdistill features`"
            if is_workspace:
                cure = f"it is {place}/features"
            raise StoreError(f"there is no feature store at {place}: {cure}") from None
        return cls(backend, record, report)

    @classmethod
    def find(cls, path: str | Path | Backend) -> "Store | None":
        """Open a store, None when there is none yet; StoreError as from `open`."""
        backend = open_backend(path)
        return cls.open(backend) if backend.size(STORE) is not None else None

    def require(self, provenance: Provenance, info: TargetInfo | None = None) -> None:
        """StoreError naming the first field in which this store's origin differs."""
        difference = self.provenance.mismatch(provenance)
        if difference is None and info is not None:
            difference = self._differing_fact(info)
        if difference is not None:
            raise StoreError(
                f"{self.path} is of another origin ({difference}): use another store"
            )

    def _differing_fact(self, info: TargetInfo) -> str | None:
        wanted = info.to_dict()
        for name, value in self.info.to_dict().items():
            if name != "name" and value != wanted[name]:
                return f"{name}: {value}, not {wanted[name]}"
        return None

    def _require_encoding(self, encoding: Mapping[str, str] | None) -> None:
        if encoding is not None and dict(encoding) != self.layout.encoding:
            raise StoreError(
                f"{self.path} was made with encoding {dict(self.layout.encoding)}, not {dict(encoding)}"
            )

    def head(self) -> FrozenTables:
        """Read the target's frozen tables.

        Returns:
            `embed_VD` and `lm_head_VD`, mapped arrays [vocabulary, hidden size] in the target's dtype
            (bfloat16 as uint16); the same array when the target ties them.

        Raises:
            StoreError: The file is missing or damaged.
        """
        return read_head(self.backend, self.record.head, self.layout.width)

    # Annexes: features that were added after the store was made

    @functools.cached_property
    def annexes(self) -> "tuple[Store, ...]":
        """The stores of further features of these samples; StoreError when one is damaged or does not fit."""
        annexes = []
        for name in names_in(self.backend, ANNEXES):
            folder = f"{ANNEXES}/{name}"
            backend = self.backend.within(folder)
            annex = Store.find(backend)
            if annex:
                self._require_annex(annex, folder)
                annexes.append(annex)
            elif backend.list_files(COMMITS):
                raise damaged(f"{self.path}/{folder}/{STORE}", "it is missing")
        return tuple(annexes)

    def annex(
        self, names: Collection[str], encoding: Mapping[str, str] | None = None
    ) -> "Store":
        """Make the annex of these features, or open it. It has the frozen head of this store.

        StoreError when it exists with another `encoding`, or when a feature is in the store already.
        """
        features = tuple(sorted(names))
        folder = annex_folder(features)
        backend = self.backend.within(folder)
        if backend.size(STORE) is None:
            self._require_new(features)
            record = replace(
                self.record,
                provenance=replace(self.provenance, features=features),
                encoding=dict(encoding or {}),
            )
            Layout.of(record.provenance, self.info, record.encoding)
            with writing(backend):
                require_room(backend)
                backend.create(STORE, seal(record))
        annex = Store.open(backend)
        self._require_annex(annex, folder)
        annex._require_encoding(encoding)
        self.__dict__.pop("annexes", None)  # it may be a new one
        return annex

    def _require_new(self, features: tuple[str, ...]) -> None:
        """StoreError when the store, or an annex of other features, has one of these already."""
        existing = {*self.provenance.features}
        for annex in self.annexes:
            if annex.provenance.features != features:
                existing.update(annex.provenance.features)
        shared = sorted(existing.intersection(features))
        if shared:
            raise StoreError(
                f"{self.path} has {', '.join(shared)} already, but not together with all of "
                f"{', '.join(features)}: use another store"
            )

    def _require_annex(self, annex: "Store", folder: str) -> None:
        why = misplaced_annex(self.record, annex.record, folder)
        if why:
            raise StoreError(
                f"{annex.path} is no annex of this store: {why}. Remove it, or move it away"
            )

    @property
    def features(self) -> tuple[Feature, ...]:
        """All features, including annexes; StoreError when an annex is damaged."""
        features = {*self.layout.features}
        for annex in self.annexes:
            features.update(annex.layout.features)
        return tuple(sorted(features))

    def choose(self, features: Collection[str | Feature] | None) -> tuple[Feature, ...]:
        """The requested features, all when None; StoreError names those that were never captured."""
        if features is None:
            return self.features
        chosen = tuple(sorted(as_features(features)))
        if self.layout.arrays_of.keys() >= {*chosen}:  # without a look at annexes
            return chosen
        missing = {*chosen} - {*self.features}
        if missing:
            raise StoreError(
                f"this store has no {_names(missing)}: it holds {_names(self.features)}. Capture the "
                "missing ones with `vlmdistill features --for DRAFTER`"
            )
        return chosen

    def holder(self, feature: Feature) -> "Store":
        """This store, or the first annex that has a feature; StoreError when none has."""
        if feature in self.layout.arrays_of:
            return self
        for annex in self.annexes:
            if feature in annex.layout.arrays_of:
                return annex
        raise StoreError(
            f"this store has no {feature.name}: it holds {_names(self.features)}"
        )

    def lines(
        self, rows: "pl.DataFrame", features: Collection[Feature]
    ) -> "Iterator[tuple[Store, pl.DataFrame]]":
        """This store and each annex with some of the features, and its lines of the samples `rows`.

        StoreError when an annex lacks a sample, as while it is captured, or has it with other tokens.
        """
        yield self, rows
        holders = dict.fromkeys(self.holder(feature) for feature in sorted(features))
        holders.pop(self, None)
        for annex in holders:
            lines = annex.index.join(
                rows.select(SAME_SAMPLE), on=SAME_SAMPLE, how="semi"
            )
            if len(lines) < len(rows):
                missing = rows.join(lines, on="key", how="anti")
                raise StoreError(
                    f"{len(rows) - len(lines)} of {len(rows)} samples, such as {missing['key'][0]}, lack "
                    f"{_names(annex.layout.features)} in {self.path}: run the `vlmdistill features` that "
                    "adds them again, or leave these samples out"
                )
            yield annex, lines

    def _find_feature(
        self, feature: Feature, line: Line
    ) -> tuple[ShardRows, Line] | None:
        """The shards with a feature of a sample, and its line there; None when it is not captured yet."""
        holder = self.holder(feature)
        if holder is self:
            return self.rows, line
        line_there = holder._find(line["key"])
        if not line_there:
            return None
        if any(line_there[name] != line[name] for name in SAME_SAMPLE):
            return None
        return holder.rows, line_there

    # Writing

    def writer(self, shard: str, *, hold: bool = False) -> Writer:
        """Write a shard: all samples added in one `with` block are committed, or none.

        Args:
            shard: Name of the shard: at most 200 letters, digits and `. _ = + -`. A shard that is committed
                already is not written again; its samples must then have the same keys.
            hold: The samples count once `count` gets the `held` of the writer, in any process.

        Returns:
            A context manager; `add(sample)` appends a sample.

        Raises:
            StoreError: The name cannot be used. On `add`: the sample does not fit the store, or its key was
                added before. At the end of the block: the shard holds other samples, or the disk is full.
        """
        origin = content_hash(self.provenance.to_dict())
        return Writer(self.backend, self.layout, shard, origin, self._shards, hold)

    def count(self, record: Commit) -> None:
        """Let a shard count that was held back.

        StoreError when it was removed, or when another shard of its name is committed.
        """
        with writing(self.backend):
            if not is_complete(self.backend, record):
                raise StoreError(
                    f"the files of shard {record.shard} were removed: write it again"
                )
            committed = commit(self.backend, record, publish=lambda: None)
            if committed.folder != record.folder:
                raise StoreError(
                    f"shard {record.shard} is already committed with other data"
                )

    def write_stats(
        self, run: str, table: "Mapping[str, Sequence[Any]] | pl.DataFrame"
    ) -> None:
        """Keep per-sample numbers of a training run: `key` and further columns.

        In the index they appear as `<run>.<column>`, and plain as `<column>` from the latest run
        that has a value. Writing a run again replaces it. StoreError on a column that the index has already,
        or that other runs have with another kind of values.
        """
        from vlmdistill.stores.index.run_stats import write_stats

        write_stats(self.backend, run, table, self.meta)

    # The index

    def keys(self) -> set[str]:
        """List the samples that are committed now, also by other processes.

        Returns:
            The keys, in no order.

        Raises:
            StoreError: The record or the index of a shard is damaged or missing.
        """
        try:
            return self._shards.keys(committed_shards(self.backend))
        except FileNotFoundError as error:
            raise damaged(self.path, f"a shard is missing ({error})") from None

    def shards(self) -> list[str]:
        """The names of the shards that are committed now, sorted."""
        return committed_shards(self.backend)

    def commit(self, shard: str) -> Commit:
        """The record of a committed shard; StoreError when it is damaged."""
        return self._shards.commit(shard)

    @property
    def index(self) -> "pl.DataFrame":
        """One row per sample, sorted by key; a key in several shards is taken from the first by name.

        Columns: key, dataset, text_tokens, visual_tokens, response_tokens, spans, where its rows
        lie (shard, text_row, visual_row, span_row, sample_row), xxh3.<array>, then meta.
        """
        return self._current_index().lines.frame

    @property
    def meta(self) -> "Mapping[str, pl.DataType]":
        """The columns of the index that came with the samples, and their types."""
        return self._current_index().meta

    def _current_index(self) -> "_MergedIndex":
        from vlmdistill.stores.index.run_stats import join_stats

        shards = committed_shards(self.backend)
        made_from = (tuple(shards), tuple(names_in(self.backend, STATS)))
        if self._index is None or self._index.made_from != made_from:
            merged = self._shards.merged(shards, self._report)
            schema = merged.schema
            meta = {name: schema[name] for name in schema if not reserved(name)}
            lines = Lines(join_stats(self.backend, merged))
            self._index = _MergedIndex(made_from, lines, meta)
        return self._index

    def view(self, name: str | None) -> "pl.DataFrame":
        """Select the samples of a view.

        Args:
            name: A view that `vlmdistill store filter` made; None for all samples.

        Returns:
            The rows of `index` that the view keeps, sorted by key.

        Raises:
            StoreError: There is no such view, it is damaged, or the record of a shard is lost.
        """
        require_all(self.backend, (COMMITS,))
        if name is None:
            return self.index
        return self.index.join(
            view_keys(self.backend, name), on="key", how="semi", maintain_order="left"
        )

    # Reading

    def __repr__(self) -> str:
        try:
            samples, names = f"{len(self)} samples", _names(self.features)
        except StoreError as error:
            samples, names = f"not readable ({error})", _names(self.layout.features)
        return f"<Store {self.path}: {samples} of {self.info.name}, {names} in {self.layout.dtype}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("store", self.path),
            ("target", self.info.name),
            ("dtype", self.layout.dtype),
            ("features", _names(self.layout.features)),
        ]
        try:
            rows.append(("samples", f"{len(self):,}"))
            for name in ("text_tokens", "visual_tokens", "response_tokens"):
                count = f"{self.index[name].sum():,}"
                rows.append((name.replace("_", " "), count))
        except StoreError as error:
            rows.append(("not readable", error))
        return notebook.table((), rows)

    def __bool__(self) -> bool:
        """True: an empty store is a store."""
        return True

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index["key"])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, key: str) -> Sample:
        return self.read(key)

    def read(
        self, key: str, features: Collection[str | Feature] | None = None
    ) -> Sample:
        """Read a sample; every byte is compared with its checksum.

        Args:
            key: The key of the sample.
            features: The features to read, or their names such as `hidden.text`; when None, all that
                the sample has.

        Returns:
            The sample. Its arrays are writable, and writing to them does not change the store.

        Raises:
            DataError: A name is not a feature.
            StoreError: There is no such sample or feature, or the data are damaged; the error names the
                shard, the array and the sample.
        """
        line = self._find(key) if isinstance(key, str) else None
        if line is None:
            raise StoreError(
                f"{self.path} has no sample {key!r}: `for key in store` gives the keys"
            )
        chosen = self.choose(features)
        if features is None:
            chosen = tuple(
                feature for feature in chosen if self._find_feature(feature, line)
            )
        return self._samples.one(line, chosen, self.commit(line["shard"]).meta)

    def array(self, name: str, shard: str) -> "zarr.Array[Any]":
        """Open an array of a shard with zarr, for reading alone; zarr compares no checksums.

        Args:
            name: `tokens` [T, 4], or an array of a feature, such as `hidden.text` [T, D] with the rows
                of all samples of the shard; `text_row` and the like in the index say which are whose.
            shard: Its name: a value of the column `shard` of the index.

        Returns:
            The array as it is stored: bfloat16 as uint16.

        Raises:
            StoreError: The store has no such array or shard, or zarr cannot open it.

        Example:
            >>> hidden_TD = store.array("hidden.text", store.index["shard"][0])[:100]
        """
        import zarr

        names = [spec.name for spec in self.layout.arrays]
        if name not in names:
            raise StoreError(
                f"a shard has no array '{name}'{did_you_mean(name, names)}: {', '.join(names)}"
            )
        try:
            folder = f"{self.path}/{self.commit(shard).path}"
            return zarr.open_array(f"{folder}/{name}", mode="r")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise StoreError(
                f"{name} of shard {shard} cannot be opened: {one_line(error)}"
            ) from error

    def _find(self, key: str) -> dict[str, Any] | None:
        """The line of a sample in the index, None when it is missing."""
        line = self._index.lines.find(key) if self._index else None
        return line or self._current_index().lines.find(key)  # committed since?

    def read_batch(
        self,
        rows: Sequence[Mapping[str, Any]],
        features: Collection[Feature],
        buffers: dict[Feature, Array] | None = None,
    ) -> PackedSamples:
        """The samples of several rows of the index, one after the other; StoreError as from `read`.

        The features are read into `buffers` (uint8, replaced when too small), so that the next batch that is
        given the same ones overwrites them: fresh memory costs more than copying into it.
        """
        return self._samples.batch(
            rows, self.choose(features), {} if buffers is None else buffers
        )


@dataclass(frozen=True)
class _MergedIndex:
    """The merged index with the statistics of runs."""

    made_from: tuple[tuple[str, ...], tuple[str, ...]]  # the shards, and `stats/`
    lines: Lines
    meta: "Mapping[str, pl.DataType]"  # types of the columns that came with the samples


def _names(features: Collection[Feature]) -> str:
    return ", ".join(sorted(feature.name for feature in features))


def require_room(backend: Backend) -> None:
    """StoreError when a folder holds more than hidden files and leftovers of an interrupted creation."""
    foreign = []
    for name in backend.list_names(""):
        if name not in (HEADS, STAGING) and not name.startswith("."):
            foreign.append(name)
    # Unless another process has made the store meanwhile.
    if foreign and backend.size(STORE) is None:
        raise StoreError(
            f"{backend.url} holds other things, such as {foreign[0]}, and no {STORE}: name a new folder"
        )
