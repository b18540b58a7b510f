"""A disk-backed buffer of rows, deleted when the process exits."""

import mmap
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Spool:
    """Arrow rows on disk, each of which can be read without the others."""

    def __init__(self, folder: Path, schema: Any, batches: Iterable[Any]) -> None:
        """Write record batches of one schema to a file in the folder, or in TMPDIR if that is read-only."""
        import pyarrow as pa

        with _file_in(folder) as file:
            with pa.ipc.new_file(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = pa.ipc.open_file(pa.py_buffer(self._map))
        self._batches = [
            reader.get_batch(number) for number in range(reader.num_record_batches)
        ]
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + len(batch))
        pa.default_memory_pool().release_unused()  # the memory of the batches

    def row(self, number: int) -> dict[str, Any]:
        """One row, by its number."""
        batch = bisect_right(self._starts, number) - 1
        offset = number - self._starts[batch]
        rows: list[dict[str, Any]] = self._batches[batch].slice(offset, 1).to_pylist()
        # The pages that were read stay in the page cache alone.
        self._map.madvise(mmap.MADV_DONTNEED)
        return rows[0]


def _file_in(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()
