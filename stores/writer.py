"""Writing: one unit of samples becomes one shard, or nothing.

A unit names a share of the work, such as a range of input rows. Its shard is written aside,
forced to the disk, and published under a name made from its content; it counts from the moment
its record appears in `commits/`. Writers share no file, so any number may work anywhere.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vlmdistill.stores.arrays import ArraySpec, ArrayWriter, Rows, write_file
from vlmdistill.stores.commits import commit
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.indexing import Shards
from vlmdistill.stores.layout import Layout, rows_of
from vlmdistill.stores.manifest import SHARDS, check_name, commit_name, shard_name
from vlmdistill.stores.place import Place, writing
from vlmdistill.stores.schema import SCHEMA_VERSION, Array, Sample
from vlmdistill.stores.tables import INDEX, LOSS, XXH3, index_table, reserved, to_arrow


class Writer:
    """Collects the samples of a unit; a context manager that commits on a clean exit.

    When the unit is already committed, samples are only compared by key: the first commit stands.
    """

    def __init__(self, place: Place, layout: Layout, unit: str, origin: str, shards: Shards):
        self.unit = check_name(unit, "unit")
        self._place = place
        self._layout = layout
        self._origin = origin  # hash of the provenance, recorded in the commit
        self._shards = shards  # the committed units
        self._torn: str | None = None  # the sample that was not written to its end
        self._added: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._ends: dict[Rows, int] = {"text": 0, "visual": 0, "span": 0, "sample": 0}
        self._arrays: dict[str, ArrayWriter] = {}
        self._folder: Path | None = None
        self.committed = place.size(commit_name(unit)) is not None

    def __enter__(self) -> "Writer":
        if not self.committed:
            try:
                with writing(self._place):
                    self._folder = self._place.workspace()
                    for spec in self._layout.arrays:
                        self._arrays[spec.name] = ArrayWriter(self._folder, spec)
            except BaseException:
                self._release()
                raise
        return self

    def add(self, sample: Sample) -> None:
        """Append one sample; StoreError when it does not fit the store or its key is already here.

        A sample that is refused leaves no trace. After one that could not be written to its end, as on a
        full disk, the unit can only be written again.
        """
        odd = sorted(name for name in sample.meta if reserved(name) and name != "dataset")
        if odd:
            raise StoreError(f"sample {sample.key}: the meta column '{odd[0]}' is the index's own, rename it")
        self._layout.check(sample)
        row: dict[str, Any] = {
            **sample.meta,
            "key": sample.key,
            "dataset": str(sample.meta.get("dataset") or ""),
            "text_tokens": len(sample.ids_T),
            "visual_tokens": sample.visual_tokens,
            "response_tokens": int(sample.response_T.sum()),
            "spans": [{"start": span.start, "length": span.length} for span in sample.spans],
        }
        losses: dict[str, list[float]] = {}
        self.copy(row, self._layout.split(sample, losses), losses)

    def copy(
        self,
        row: Mapping[str, Any],
        arrays: Iterable[tuple[ArraySpec, Array]],
        losses: Mapping[str, Sequence[float]],
    ) -> None:
        """Append a sample in the form it is stored in: its line of the index, and its rows of each array.

        `losses`, complete once `arrays` is consumed: what its 8-bit features lost.
        """
        key = row["key"]
        self._require_whole()
        if key in self._added:
            raise StoreError(f"sample {key} is given twice in unit {self.unit}")
        if self._folder is None:
            self._added.add(key)
            return
        line = {**row, **{f"{rows}_row": end for rows, end in self._ends.items()}}
        held = list(arrays)  # what cannot be encoded or read is refused before anything is written
        self._added.add(key)
        self._torn = key
        with writing(self._place):
            for spec, array in held:
                line[XXH3 + spec.name] = self._arrays[spec.name].append(array)
        self._torn = None
        line |= {LOSS + name: list(sums) for name, sums in losses.items()}
        for rows in self._ends:
            self._ends[rows] += rows_of(rows, row)
        self._rows.append(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self._place):
                    self._commit()
        finally:
            self._release()

    def _release(self) -> None:
        for array in self._arrays.values():
            array.abort()
        if self._folder is not None:
            self._place.release(self._folder)

    def _require_whole(self) -> None:
        if self._torn is not None:
            what = f"unit {self.unit} cannot be finished: sample {self._torn} was not written to its end"
            raise StoreError(f"{what}. Write the unit again, with a writer of its own")

    def _commit(self) -> None:
        self._require_whole()
        if self._folder is None or not self._rows:
            self._compare()
            return
        table = index_table(self._rows, list(self._arrays))
        self._shards.require_kinds(self.unit, table.schema)
        files: dict[str, tuple[int, str]] = {}
        for array in self._arrays.values():
            files |= array.close()
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"unit": self.unit}}
        files[INDEX] = write_file(self._folder / INDEX, to_arrow(table))
        files["zarr.json"] = write_file(self._folder / "zarr.json", json.dumps(group).encode())
        name = shard_name(self.unit, files)
        record = {
            "schema": SCHEMA_VERSION,
            "unit": self.unit,
            "shard": name,
            "origin": self._origin,
            "rows": self._ends,
            "meta": [name for name in table.column_names if not reserved(name)],
            "files": files,
            "losses": self._losses(),
        }
        self._place.publish(self._folder, f"{SHARDS}/{name}")
        if commit(self._place, record):
            self._shards.learn(self.unit, table.schema)
        else:
            self._compare()

    def _losses(self) -> dict[str, list[float]]:
        names = sorted(name for name in self._rows[0] if name.startswith(LOSS))
        return {
            name.removeprefix(LOSS): [sum(row[name][part] for row in self._rows) for part in (0, 1)]
            for name in names
        }

    def _compare(self) -> None:
        if self._added and self._added != (there := set(self._shards.table(self.unit)["key"].to_pylist())):
            odd = min(self._added ^ there)
            raise StoreError(
                f"unit {self.unit} is already committed with other samples ({odd} is in only one of them): "
                "name each unit after the samples it holds"
            )
