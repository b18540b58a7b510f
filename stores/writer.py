"""Writing: one unit of samples becomes one shard, or nothing.

A unit names a share of the work, such as a range of input rows. Its shard is written aside,
forced to the disk, and published under a name made from its content; it counts from the moment
its record appears in `commits/`. Writers share no file, so any number may work anywhere.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from vlmdistill.stores.arrays import ArrayWriter, HashedFile, Rows
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.layout import Layout, rows_of
from vlmdistill.stores.manifest import DEAD, SHARDS, check_name, commit_name, read_record, seal, shard_name
from vlmdistill.stores.place import Place, writing
from vlmdistill.stores.schema import SCHEMA_VERSION, Sample
from vlmdistill.stores.tables import INDEX, XXH3, index_table, reserved, to_arrow


class Writer:
    """Collects the samples of a unit; a context manager that commits on a clean exit.

    When the unit is already committed, samples are only compared by key: the first commit stands.
    """

    def __init__(self, place: Place, layout: Layout, unit: str, origin: str, keys: Callable[[str], set[str]]):
        self.unit = check_name(unit, "unit")
        self._place = place
        self._layout = layout
        self._origin = origin  # hash of the provenance, recorded in the commit
        self._keys = keys  # the keys of a committed unit
        self._added: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._ends: dict[Rows, int] = {"text": 0, "visual": 0, "span": 0, "sample": 0}
        self._losses: dict[str, list[float]] = {}
        self._arrays: dict[str, ArrayWriter] = {}
        self._folder: Path | None = None
        self.committed = place.size(commit_name(unit)) is not None

    def __enter__(self) -> "Writer":
        if not self.committed:
            with writing(self._place):
                self._folder = self._place.workspace()
                for spec in self._layout.arrays:
                    self._arrays[spec.name] = ArrayWriter(self._folder, spec)
        return self

    def add(self, sample: Sample) -> None:
        """Append one sample; StoreError when it does not fit the store or its key is already here."""
        if sample.key in self._added:
            raise StoreError(f"sample {sample.key} is given twice in unit {self.unit}")
        odd = sorted(name for name in sample.meta if reserved(name) and name != "dataset")
        if odd:
            raise StoreError(f"sample {sample.key}: the meta column '{odd[0]}' is the index's own, rename it")
        self._layout.check(sample)
        self._added.add(sample.key)
        if self._folder is None:
            return
        row: dict[str, Any] = {
            **sample.meta,
            "key": sample.key,
            "dataset": str(sample.meta.get("dataset") or ""),
            "text_tokens": len(sample.ids_T),
            "visual_tokens": sample.visual_tokens,
            "response_tokens": int(sample.response_T.sum()),
            "spans": [{"start": span.start, "length": span.length} for span in sample.spans],
        }
        for rows, end in self._ends.items():
            row[f"{rows}_row"] = end
        with writing(self._place):
            for spec, array in self._layout.split(sample, self._losses):
                row[XXH3 + spec.name] = self._arrays[spec.name].append(array)
        for rows in self._ends:
            self._ends[rows] += rows_of(rows, row)
        self._rows.append(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self._place):
                    self._commit()
        finally:
            for array in self._arrays.values():
                array.abort()
            if self._folder is not None:
                self._place.release(self._folder)

    def _commit(self) -> None:
        if self._folder is None or not self._rows:
            self._compare()
            return
        files: dict[str, tuple[int, str]] = {}
        for array in self._arrays.values():
            files |= array.close()
        table = index_table(self._rows, list(self._arrays))
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"unit": self.unit}}
        for name, data in ((INDEX, to_arrow(table)), ("zarr.json", json.dumps(group).encode())):
            file = HashedFile(self._folder / name)
            try:
                file.write(data)
                files[name] = file.close()
            finally:
                file.abort()
        name = shard_name(self.unit, files)
        record = {
            "schema": SCHEMA_VERSION,
            "unit": self.unit,
            "shard": name,
            "origin": self._origin,
            "rows": self._ends,
            "files": files,
            "losses": self._losses,
        }
        shard = f"{SHARDS}/{name}"
        self._place.publish(self._folder, shard)
        if not self._place.create(commit_name(self.unit), seal(record)):
            self._lost(name)
        elif self._place.size(f"{DEAD}/{name}") is not None or not _whole(self._place, record):
            # A collector took this shard for dead while we were away; our record must not count.
            self._place.remove(commit_name(self.unit))
            what = f"unit {self.unit} was being removed by `store gc` while it was written"
            raise StoreError(f"{what}: let gc finish, then write it again")

    def _lost(self, name: str) -> None:
        """Another writer committed the unit first: its shard stands, ours goes if it is another."""
        self._compare()
        if read_record(self._place, commit_name(self.unit))["shard"] != name:
            self._place.remove(f"{SHARDS}/{name}")

    def _compare(self) -> None:
        if self._added and self._added != (there := self._keys(self.unit)):
            odd = min(self._added ^ there)
            raise StoreError(
                f"unit {self.unit} is already committed with other samples ({odd} is in only one of them): "
                "name each unit after the samples it holds"
            )


def _whole(place: Place, record: dict[str, Any]) -> bool:
    """Whether every file of a record is there with its size."""
    there = place.files(f"{SHARDS}/{record['shard']}")
    return all(there.get(name) == size for name, (size, _) in record["files"].items())
