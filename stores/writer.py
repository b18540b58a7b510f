"""Writing: the samples of a shard are committed together, or none is.

A shard is named after its share of the work, such as a range of input rows. It is written in a folder of
its own, fsynced, and published under its name and a hash of its content; it exists once its record is in
`commits/`.
Writers share no file, so any number of them may run anywhere.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from vlmdistill.stores.arrays import ArraySpec, ArrayWriter, write_file
from vlmdistill.stores.backends.backend import Backend, writing
from vlmdistill.stores.commits import LEDGER, commit, find_copy
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.arrow import read_arrow, to_arrow
from vlmdistill.stores.index.merged import Shards
from vlmdistill.stores.index.tables import LOSS, XXH3, index_table, reserved
from vlmdistill.stores.layout import Layout, rows_of
from vlmdistill.stores.manifest import (
    GROUP,
    INDEX,
    Commit,
    Entry,
    check_name,
    commit_name,
    find_record,
    shard_folder,
)
from vlmdistill.stores.schema import SCHEMA_VERSION, Array, Rows, Sample

log = logging.getLogger("vlmdistill.stores")


class Writer:
    """Collects the samples of a shard; a context manager that commits on a clean exit.

    When the shard is already committed, samples are only compared by key: the first commit counts. With
    `hold` the shard is published, and counts once `Store.count` gets `held`.
    """

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        shard: str,
        origin: str,
        shards: Shards,
        hold: bool = False,
    ):
        self.shard = check_name(shard, "shard")
        self._backend = backend
        self._layout = layout
        self._origin = origin  # hash of the provenance, recorded in the commit
        self._shards = shards  # the committed shards
        self._torn: str | None = None  # the sample that was not written to its end
        self._added: set[str] = set()
        self._lines: list[dict[str, Any]] = []
        self._not_finite: list[str] = []  # rows with infinities or NaN, by array
        self._ends: dict[Rows, int] = {"text": 0, "visual": 0, "span": 0, "sample": 0}
        self._arrays: dict[str, ArrayWriter] = {}
        self._folder: Path | None = None
        self._hold = hold
        self.held: Commit | None = None  # the record of a shard that does not count yet
        self.committed = backend.size(commit_name(shard)) is not None

    def __enter__(self) -> "Writer":
        if not self.committed:
            try:
                with writing(self._backend):
                    self._folder = self._backend.workspace()
                    for spec in self._layout.arrays:
                        self._arrays[spec.name] = ArrayWriter(self._folder, spec)
            except BaseException:
                self._release()
                raise
        return self

    def add(self, sample: Sample) -> None:
        """Append a sample.

        A sample that is refused leaves no trace. After one that could not be written to its end, as on a
        full disk, the shard can only be written again.

        Args:
            sample: The sample, with the features of the store [T, U or M, hidden size] in its dtype.

        Raises:
            StoreError: The sample does not fit the store, its key was added before, or it cannot be written.
        """
        for name in sorted(sample.meta):
            if reserved(name) and name != "dataset":
                raise StoreError(
                    f"sample {sample.key}: the meta column '{name}' is the index's own, rename it"
                )
        self._layout.check(sample)
        spans = [{"start": span.start, "length": span.length} for span in sample.spans]
        line: dict[str, Any] = {
            **sample.meta,
            "key": sample.key,
            "dataset": str(sample.meta.get("dataset") or ""),
            "text_tokens": len(sample.ids_T),
            "visual_tokens": sample.visual_tokens,
            "response_tokens": int(sample.response_T.sum()),
            "spans": spans,
        }
        losses: dict[str, list[float]] = {}
        self.copy(line, self._layout.split(sample, losses), losses)

    def copy(
        self,
        facts: Mapping[str, Any],
        arrays: Iterable[tuple[ArraySpec, Array]],
        losses: Mapping[str, Sequence[float]],
    ) -> None:
        """Append a sample in the form it is stored in.

        Args:
            facts: Its line of the index, without the places of its rows.
            arrays: Its rows of each array.
            losses: The errors of its 8-bit features, complete once `arrays` is consumed.
        """
        key = facts["key"]
        self._require_whole()
        if key in self._added:
            raise StoreError(f"sample {key} is given twice in shard {self.shard}")
        if self._folder is None:
            self._added.add(key)
            return
        line = {**facts, **{f"{rows}_row": end for rows, end in self._ends.items()}}
        # Errors in encoding or reading come here, before anything is written.
        rows_of_arrays = list(arrays)
        self._added.add(key)
        self._torn = key
        with writing(self._backend):
            for spec, rows in rows_of_arrays:
                checksum, bad_rows = self._arrays[spec.name].append(rows)
                line[XXH3 + spec.name] = checksum
                if bad_rows:
                    self._not_finite.append(f"{bad_rows} rows of {spec.name} of {key}")
        self._torn = None
        for name, sums in losses.items():
            line[LOSS + name] = list(sums)
        for kind in self._ends:
            self._ends[kind] += rows_of(kind, facts)
        self._lines.append(line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with writing(self._backend):
                    self._commit()
        finally:
            self._release()

    def _release(self) -> None:
        for array in self._arrays.values():
            array.abort()
        if self._folder is not None:
            self._backend.release(self._folder)

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise StoreError(
                f"shard {self.shard} cannot be finished: sample {self._torn} was not written to its end. "
                "Write the shard again, with a writer of its own"
            )

    def _commit(self) -> None:
        self._require_whole()
        folder = self._folder
        if folder is None or not self._lines:
            self._require_same_samples()
            return
        table = index_table(self._lines, list(self._arrays))
        self._shards.require_types(self.shard, table.schema)
        record = self._record(table, self._close(folder, table))
        misfit = self._layout.misfit(record.rows, record.files)
        if misfit:
            raise StoreError(f"shard {self.shard} cannot be kept: {misfit}")
        self._require_unused(record)
        if self._not_finite:
            log.warning(
                "%d features of shard %s are not finite, the first %s: training on them fails",
                len(self._not_finite),
                self.shard,
                self._not_finite[0],
            )

        def publish() -> None:
            self._backend.publish(folder, record.path)

        if self._hold:
            publish()
            self.held = record
            return
        committed = commit(self._backend, record, publish)
        if committed.folder == record.folder:
            self._shards.learn(self.shard, table.schema)
        else:
            self._require_same_samples()

    def _close(self, folder: Path, table: pa.Table) -> dict[str, Entry]:
        """Finish all files of the shard; (bytes, blake3) of each."""
        files: dict[str, Entry] = {}
        for array in self._arrays.values():
            files |= array.close()
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"shard": self.shard},
        }
        files[INDEX] = write_file(folder / INDEX, to_arrow(table))
        files[GROUP] = write_file(folder / GROUP, json.dumps(group).encode())
        return files

    def _record(self, table: pa.Table, files: Mapping[str, Entry]) -> Commit:
        meta = [name for name in table.column_names if not reserved(name)]
        return Commit(
            schema=SCHEMA_VERSION,
            shard=self.shard,
            folder=shard_folder(self.shard, files),
            origin=self._origin,
            rows=self._ends,
            meta=tuple(meta),
            files=files,
            losses=self._losses(),
        )

    def _require_unused(self, record: Commit) -> None:
        """StoreError when the record of the shard is lost, and its samples are not those written now."""
        name = commit_name(self.shard)
        copy = find_copy(self._backend, name, Commit)
        if copy is None or copy.folder == record.folder:
            return
        if self._backend.size(name) is not None:
            return
        try:
            index = f"{copy.path}/{INDEX}"
            table = read_arrow(self._backend, index, copy.files[INDEX])
        except (StoreError, OSError):  # lost files cannot be read either
            return
        other_keys = set(table["key"].to_pylist()) - self._added
        if other_keys:
            raise StoreError(
                f"shard {self.shard} was committed with other samples, such as {min(other_keys)}, and its "
                f"record is lost: copy {LEDGER}/{name} back to {name}, or remove that to give them up"
            )

    def _losses(self) -> dict[str, tuple[float, float]]:
        """Of each 8-bit feature, the sums of squared errors and of squares."""
        losses = {}
        for name in sorted(self._lines[0]):
            if name.startswith(LOSS):
                error = sum(line[name][0] for line in self._lines)
                squares = sum(line[name][1] for line in self._lines)
                losses[name.removeprefix(LOSS)] = (error, squares)
        return losses

    def _require_same_samples(self) -> None:
        """StoreError unless the committed shard has the same samples."""
        if not self._added:
            return
        if find_record(self._backend, commit_name(self.shard), Commit) is None:
            raise StoreError(
                f"shard {self.shard} was removed while it was written: write it again"
            )
        committed = set(self._shards.table(self.shard)["key"].to_pylist())
        if self._added != committed:
            differing = min(self._added ^ committed)
            raise StoreError(
                f"shard {self.shard} is already committed with other samples ({differing} is in only one of "
                "them): name each shard after the samples it holds"
            )
