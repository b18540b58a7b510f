"""Read the rows of a source: JSON, JSON lines, tables, Parquet or tar files, also compressed, and folders.

A bad row is yielded with its problem; a file that cannot be read raises DataError.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vlmdistill.pipelines.data.prompts.archives import archive_rows, is_archive
from vlmdistill.pipelines.data.prompts.folders import media_rows
from vlmdistill.pipelines.data.prompts.hub_datasets import dataset_rows, metadata_files
from vlmdistill.pipelines.data.prompts.json_rows import rows_of
from vlmdistill.pipelines.data.prompts.parquet_rows import parquet_rows
from vlmdistill.pipelines.data.prompts.row import FILES, Row, dataset_name, located
from vlmdistill.pipelines.data.prompts.text_tables import separators_of, table_rows
from vlmdistill.pipelines.data.prompts.unpacking import unpacked
from vlmdistill.stores.errors import DataError, lone_surrogate
from vlmdistill.stores.input_files import open_regular
from vlmdistill.stores.suggestions import did_you_mean

START = 512  # bytes of a file that tell its format
PARQUET = b"PAR1"
REFUSED = {  # first bytes of a file -> what it is
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"ARROW1": "an Arrow file",
}


def check(source: str, hub: bool) -> Path:
    """The path of a source; DataError if it is neither file nor folder nor, with `hub`, a name on the hub."""
    try:
        path, _ = located(source)
    except RuntimeError as error:  # the home of a user who does not exist
        raise DataError(f"{source}: {error}") from None
    if not source:
        raise DataError(
            "the name of a source is empty: give a file, a folder or a dataset"
        )
    if lone_surrogate(str(path)) or lone_surrogate(os.path.realpath(path)):
        raise DataError(f"{source}: the name is not UTF-8: rename the file")
    is_local = source.startswith((".", "/", "~")) or source.lower().endswith(FILES)
    if path.exists() or (hub and not is_local):
        return path
    if path.is_symlink():
        raise DataError(f"there is no file {source}: it is a link to {path.readlink()}")
    hint = "" if is_local else " (a Hugging Face dataset by name: add --format hf)"
    # `glob` finds nothing in a folder that does not exist or cannot be read.
    siblings = [sibling.name for sibling in path.parent.glob("*")]
    similar = did_you_mean(path.name, siblings)
    raise DataError(f"there is no file {source}{similar or hint}")


def read(source: str, media: bool = False) -> Iterator[Row]:
    """Every row of a source, in order. A local path is never looked up on the hub.

    With `media`, a folder is one of images and videos, and each of them a row, unless it has metadata.
    """
    path, split = located(source)
    if media and path.is_dir() and not split and not metadata_files(path):
        yield from media_rows(path)
    elif path.exists() and not path.is_dir():
        yield from _file_rows(path)
    else:
        yield from dataset_rows(source, _file_rows)


def _file_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, compressed or not; DataError if it is no regular file."""
    try:
        handle = open_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    with open(handle, "rb") as packed, unpacked(packed, path) as file:
        yield from _rows(file, path)


def _rows(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The rows of an open file, whose first bytes decide the format."""
    start = file.read(START)
    file.seek(0)
    if is_archive(start):
        return archive_rows(file, path)
    for magic, description in REFUSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path} is {description}: unpack it and import the JSON or Parquet files in it, with "
                "--images for the folder of its images and videos"
            )
    if start.startswith(PARQUET):
        return parquet_rows(file, path)
    return _text_rows(file, path)


def _text_rows(file: IO[bytes], path: Path) -> Iterator[Row]:
    separators = separators_of(path.name)
    rows = table_rows(file, separators, path) if separators else rows_of(file, path)
    source = str(path.resolve())
    dataset = dataset_name(path)
    for row in rows:
        yield Row(source, dataset, row.number, row.value, row.line, row.problem)
