"""Rows of datasets: local folders, what `save_to_disk` wrote, and names on the Hugging Face hub."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.data.prompts.folders import (
    UnreadFileError,
    media_rows,
    unreadable,
    walk,
)
from vlmdistill.pipelines.data.prompts.parquet_rows import values
from vlmdistill.pipelines.data.prompts.row import Row, located
from vlmdistill.pipelines.media.images import kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"  # ends the names of columns of metadata with files
ROW_FILES = (".json", ".jsonl", ".parquet")  # of a folder that has images, too
DESCRIPTIONS = (
    "LICENSE",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
)
DEFAULT_SPLIT = "train"
OWN_BUILDERS = ("json", "csv", "webdataset")  # whose files are read here
MEDIA_BUILDERS = ("imagefolder", "videofolder")  # of `datasets`

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
    rows: Iterator[Row]
    if folder.exists():
        folder = Path(os.path.abspath(folder))  # `datasets` takes "." for no name
        name = str(folder)
        rows = _Folder(folder, split, read_file).rows()
    else:
        name, _, split = source.partition("@")
        name, _, subset = name.partition(":")
        rows = _hub_rows(name, subset, split)
    dataset = Path(name).name
    number = 0
    try:
        for row in rows:
            number += 1
            yield replace(
                row, source=source, dataset=dataset, number=number, file=row.source
            )
    except Exception as error:  # noqa: BLE001 - loaders of datasets raise anything; the user needs one line
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f" at row {number + 1}" if number else ""
        raise DataError(f"cannot read the dataset {name}{where}: {reason}") from None


def metadata_files(folder: Path) -> list[Path]:
    """The files below a folder that say something about its images or videos."""
    return [path for path, _ in walk(folder) if path.name in METADATA]


@dataclass
class _Folder:
    """A local dataset."""

    path: Path
    split: str
    read_file: ReadFile
    files_read: set[Path] = field(default_factory=set)  # absolute, without links
    names_media: bool = False  # all images and videos that belong to it

    def rows(self) -> Iterator[Row]:
        """Its rows, and then a row for each file that was not read, with that as its problem."""
        is_empty = True
        for row in self._own_rows():
            is_empty = False
            yield row
        if is_empty:
            yield from self._loaded_rows()
        yield from self._unread_files()

    def _own_rows(self) -> Iterator[Row]:
        """The rows that are read here; none if `datasets` reads them."""
        if not self.path.is_dir() or _is_saved(self.path):
            return
        rows = self._metadata_rows()
        first = next(rows, None)
        if first is not None:
            yield first
            yield from rows
            return
        for file in _own_files(self.path, self.split):
            self.files_read.add(file.resolve())
            yield from self.read_file(file)

    def _loaded_rows(self) -> Iterator[Row]:
        files = _files_of_datasets(self.path, self.split)
        self.files_read.update(Path(file).resolve() for file in files)
        if _is_saved(self.path):
            yield from _saved_rows(self.path, self.split)
        elif not files and not self.split and _builder(self.path) in MEDIA_BUILDERS:
            # Names such as evaluation-1.png look like a split to `datasets`.
            for row in media_rows(self.path):
                if row.problem is None:
                    yield row
        else:
            yield from _loaded_rows(str(self.path), "", self.split)

    def _metadata_rows(self) -> Iterator[Row]:
        """The rows of the metadata files in a folder of images or videos, by a convention of `datasets`.

        A row names its file, relative to the metadata, in the column `file_name`, `file_names` or
        `image_file_name`. DataError if there is no such split.
        """
        from datasets.data_files import DataFilesDict, get_data_patterns

        metadata = metadata_files(self.path)
        if not metadata:
            return
        root = str(self.path.resolve())
        by_split = DataFilesDict.from_patterns(get_data_patterns(root), root)
        if self.split and self.split not in by_split:
            raise DataError(
                f"no split '{self.split}': there is {', '.join(map(str, by_split))}"
            )
        of_split = {str(path) for path in by_split.get(self.split or DEFAULT_SPLIT, [])}
        for path in metadata:
            self.files_read.add(path.resolve())
            for row in self.read_file(path):
                row, files = _with_media_columns(row, path.parent.resolve())
                others = [file for file in files if str(file) not in of_split]
                is_of_other_split = any(file.exists() for file in others)
                if not of_split or not is_of_other_split:
                    self.names_media |= bool(files)
                    self.files_read.update(file.resolve() for file in files)
                    yield row

    def _unread_files(self) -> Iterator[Row]:
        for file, error in walk(self.path):
            name = str(file.relative_to(self.path))
            may_be_named = bool(kind_of(file.name)) and not self.names_media
            problem: BadRowError | None = None
            if error:
                problem = unreadable(name, error)
            elif not may_be_named and not self._is_used(file):
                problem = UnreadFileError("file not read", name)
            if problem:
                yield Row("", "", 0, None, problem=problem)

    def _is_used(self, file: Path) -> bool:
        is_description = file.name in DESCRIPTIONS or file.suffix.lower() == ".md"
        return is_description or file.resolve() in self.files_read


def _hub_rows(name: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of a dataset on the hub; DataError if `datasets` may change their values: see `_own_files`."""
    import datasets

    builder = datasets.load_dataset_builder(name, subset or None).name
    if builder in (*OWN_BUILDERS, *MEDIA_BUILDERS):
        raise DataError(
            f"its files are {builder}, and only Parquet is read from the hub: download them (hf download "
            f"{name} --repo-type dataset --local-dir DIR) and import DIR"
        )
    yield from _loaded_rows(name, subset, split)


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    names = ("state.json", "dataset_dict.json")
    return any((folder / name).is_file() for name in names)


def _builder(folder: Path) -> str:
    """What `datasets` reads a folder with."""
    import datasets

    return str(datasets.load_dataset_builder(str(folder)).name)


def _loaded_rows(name: str, subset: str, split: str) -> Iterator[Row]:
    """The rows that `datasets` reads. Images in them are encoded bytes."""
    import datasets

    split = split or DEFAULT_SPLIT
    settings = _settings_for_text(name, subset, split)
    data = datasets.load_dataset(name, subset or None, split=split, **settings)
    if data.builder_name == "json":
        _require_one_type(data.features)
    yield from _rows_of(data)


def _require_one_type(features: Mapping[str, Any]) -> None:
    """DataError if a column has values of several types: a text such as "7" would become a number."""
    for name, feature in features.items():
        if _has_json(feature):
            raise DataError(
                f"'{name}' has values of several types, and `datasets` reads some texts in it as numbers "
                "or lists: import its files, one by one"
            )


def _has_json(feature: Any) -> bool:
    """Whether a feature of `datasets`, or one in it, is JSON of any type."""
    import datasets

    if isinstance(feature, Mapping):
        return any(map(_has_json, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_json, feature))
    # Versions before 4.7 have no such type.
    if isinstance(feature, getattr(datasets, "Json", ())):
        return True
    return hasattr(feature, "feature") and _has_json(feature.feature)


def _saved_rows(folder: Path, split: str) -> Iterator[Row]:
    """The rows that `save_to_disk` wrote; DataError if there is no such split."""
    import datasets

    data = datasets.load_from_disk(str(folder))
    if isinstance(data, Mapping):
        split = split or DEFAULT_SPLIT
        if split not in data:
            raise DataError(
                f"no split '{split}': write {folder}@SPLIT, with one of {', '.join(data)}"
            )
        data = data[split]
    elif split and split != str(data.split):
        raise DataError(
            f"no split '{split}': {folder} holds one alone, {data.split or 'without a name'}"
        )
    yield from _rows_of(data)


def _rows_of(data: Any) -> Iterator[Row]:
    for table in data.with_format("arrow").iter(batch_size=1):
        for value, problem in values(table):
            yield Row("", "", 0, value, problem=problem)


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


def _files_of_datasets(folder: Path, split: str) -> list[str]:
    """The files of a local dataset that `datasets` reads."""
    import datasets

    split = split or DEFAULT_SPLIT
    if not _is_saved(folder):
        by_split = datasets.load_dataset_builder(str(folder)).config.data_files
        return list(by_split.get(split, []))
    of_split = folder / split if (folder / "dataset_dict.json").is_file() else folder
    return [str(path) for path, _ in walk(of_split)]


def _own_files(folder: Path, split: str) -> list[Path]:
    """The files that hold the rows of a local dataset and are read here; none if `datasets` reads it.

    `datasets` takes a folder with more images than JSON files for one of images alone. In a column of values
    of several types it reads text that looks like JSON as what that text says, and in a CSV file it takes
    `None` and `NA` for no value. Of each file of a sample in a tar archive it makes a column.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder))
    if builder.name in MEDIA_BUILDERS:
        return _files_beside_media(folder, split)
    if builder.name not in OWN_BUILDERS or not _is_plain(builder.config):
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
