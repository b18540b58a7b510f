"""Rows of datasets: local folders, what `save_to_disk` wrote, and names on the Hugging Face hub."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.data.prompts.folders import walk
from vlmdistill.pipelines.data.prompts.parquet_rows import values
from vlmdistill.pipelines.data.prompts.row import Row, located
from vlmdistill.pipelines.media.images import kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"  # ends the names of columns of metadata with files
ROW_FILES = (".json", ".jsonl", ".parquet")  # of a folder that has images, too
DEFAULT_SPLIT = "train"

ReadFile = Callable[[Path], Iterator[Row]]
"""Reads the rows of one file."""


def dataset_rows(source: str, read_file: ReadFile) -> Iterator[Row]:
    """The rows of a Hugging Face dataset: `name`, `name:subset`, `...@split`, or a local folder."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise DataError(
            f"reading the dataset {source} needs the package datasets: pip install 'vlmdistill[hf]'"
        ) from None
    folder, split = located(source)
    name, subset = str(folder), ""
    if not folder.exists():
        name, _, split = source.partition("@")
        name, _, subset = name.partition(":")
    dataset = Path(name).name
    number = 0
    try:
        for row in _local_rows(folder, split, read_file):
            number += 1
            yield replace(row, source=source, dataset=dataset, number=number)
        if number:
            return
        for value, problem in _loaded_rows(name, subset, folder, split):
            number += 1
            yield Row(source, dataset, number, value, problem=problem)
    except Exception as error:  # noqa: BLE001 - loaders of datasets raise anything; the user needs one line
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f" at row {number + 1}" if number else ""
        raise DataError(f"cannot read the dataset {name}{where}: {reason}") from None


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    names = ("state.json", "dataset_dict.json")
    return any((folder / name).is_file() for name in names)


def _local_rows(folder: Path, split: str, read_file: ReadFile) -> Iterator[Row]:
    """The rows of a local folder that are read here; none if `datasets` reads it."""
    if not folder.is_dir() or _is_saved(folder):
        return
    rows = _metadata_rows(folder, split, read_file)
    first = next(rows, None)
    if first is not None:
        yield first
        yield from rows
        return
    for file in _own_files(folder, split):
        yield from read_file(file)


def _loaded_rows(
    name: str, subset: str, folder: Path, split: str
) -> Iterator[tuple[Any, BadRowError | None]]:
    """The rows that `datasets` reads. Images in them are encoded bytes."""
    import datasets

    split = split or DEFAULT_SPLIT
    if _is_saved(folder):
        data = datasets.load_from_disk(str(folder))
        if isinstance(data, Mapping):
            if split not in data:
                raise DataError(
                    f"no split '{split}': write {name}@SPLIT, with one of {', '.join(data)}"
                )
            data = data[split]
    else:
        settings = _settings_for_text(name, subset, split)
        data = datasets.load_dataset(name, subset or None, split=split, **settings)
    for table in data.with_format("arrow").iter(batch_size=1):
        yield from values(table)


def _settings_for_text(name: str, subset: str, split: str) -> dict[str, Any]:
    """The settings by which `datasets` leaves values of CSV files as they are: 007 and NA may be answers."""
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    config = datasets.load_dataset_builder(name, subset or None).config
    if not isinstance(config, CsvConfig) or config.features is not None:
        return {}
    first = datasets.load_dataset(name, subset or None, split=split, nrows=1)
    text = datasets.Value("string")
    features = datasets.Features(dict.fromkeys(first.column_names, text))
    return {"features": features, "keep_default_na": False, "na_filter": False}


def _metadata_rows(folder: Path, split: str, read_file: ReadFile) -> Iterator[Row]:
    """The rows of the metadata files in a folder of images or videos, by a convention of `datasets`.

    A row names its file, relative to the metadata, in the column `file_name`, `file_names` or
    `image_file_name`. DataError if there is no such split.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    metadata = [path for path, _ in walk(folder) if path.name in METADATA]
    if not metadata:
        return
    root = str(folder.resolve())
    by_split = DataFilesDict.from_patterns(get_data_patterns(root), root)
    if split and split not in by_split:
        raise DataError(f"no split '{split}': there is {', '.join(map(str, by_split))}")
    of_split = {str(path) for path in by_split.get(split or DEFAULT_SPLIT, [])}
    for path in metadata:
        for row in read_file(path):
            row, files = _with_media_columns(row, path.parent.resolve())
            others = [file for file in files if str(file) not in of_split]
            is_of_other_split = any(file.exists() for file in others)
            if not of_split or not is_of_other_split:
                yield row


def _with_media_columns(row: Row, folder: Path) -> tuple[Row, list[Path]]:
    """A row of metadata with the columns `image` and `video`, and the files that it names."""
    if not isinstance(row.value, Mapping):
        return row, []
    columns: dict[str, Any] = {}
    files: list[Path] = []
    problem = row.problem
    for name, content in row.value.items():
        column = name
        paths = _paths(str(name), content, folder)
        if paths:
            files += paths
            prefix = str(name).rpartition(FILE_NAME)[0].rstrip("_")
            column = prefix or kind_of(paths[0].name) or name
            content = [str(path) for path in paths]
        if column in columns:
            problem = BadRowError("several media columns", f"{name} and {column}")
        columns[column] = content
    return replace(row, value=columns, problem=problem), files


def _paths(name: str, content: Any, folder: Path) -> list[Path]:
    """The files in a column of metadata; none if it holds something else."""
    names = content if isinstance(content, list) else [content]
    if FILE_NAME not in name or not all(isinstance(item, str) for item in names):
        return []
    return [Path(os.path.normpath(folder / item)) for item in names]


def _own_files(folder: Path, split: str) -> list[Path]:
    """The files that hold the rows of a local dataset and are read here; none if `datasets` reads it.

    `datasets` takes a folder with more images than JSON files for one of images alone. In a column of values
    of several types it reads text that looks like JSON as what that text says, and in a CSV file it takes
    `None` and `NA` for no value.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder))
    if builder.name in ("imagefolder", "videofolder"):
        return _files_beside_media(folder, split)
    if builder.name not in ("json", "csv") or not _is_plain(builder.config):
        return []
    by_split = builder.config.data_files
    files = [Path(file) for file in by_split.get(split or DEFAULT_SPLIT, [])]
    if files or split:
        return files
    return _row_files_below(folder)


def _files_beside_media(folder: Path, split: str) -> list[Path]:
    """The files with rows in a folder of images or videos; DataError if those are in a CSV file."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    root = str(folder.resolve())
    by_split = DataFilesDict.from_patterns(
        get_data_patterns(root), root, allowed_extensions=[*ROW_FILES]
    )
    files = [Path(file) for file in by_split.get(split or DEFAULT_SPLIT, [])]
    if not files and not split:  # `train` may name the folder of the images
        files = _row_files_below(folder)
    tables = [path.name for path, _ in walk(folder) if path.suffix.lower() == ".csv"]
    if not files and tables:
        raise DataError(
            f"it has images and {tables[0]}: move that into a folder of its own, and give --images"
        )
    return files


def _row_files_below(folder: Path) -> list[Path]:
    return [path for path, _ in walk(folder) if path.suffix.lower() in ROW_FILES]


def _is_plain(config: Any) -> bool:
    """Whether a folder does not say how `datasets` shall read its JSON or CSV files."""
    settings = vars(config)
    defaults = vars(type(config)())
    locations = {"name", "version", "data_dir", "data_files", "description", "sep"}
    names = settings.keys() & defaults.keys() - locations
    return all(settings[name] == defaults[name] for name in names)
