"""Read the rows of a source: JSON, JSON lines, Parquet or tar files, also compressed, folders and datasets.

A bad row is yielded with its problem; a file that cannot be read raises DataError.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from vlmdistill.pipelines.data.prompts.json_rows import loads, parse, rows_of
from vlmdistill.pipelines.data.prompts.text_tables import separators_of, table_rows
from vlmdistill.pipelines.media.images import KINDS, kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, lone_surrogate, one_line
from vlmdistill.stores.input_files import open_regular
from vlmdistill.stores.suggestions import did_you_mean

XZ_MEMORY = 2**28  # bytes to unpack a file; `xz -9` needs 65 MiB


class _Xz(io.RawIOBase):
    """The content of an xz file, read with bounded memory, which `lzma.open` does not bound."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin()

    def _begin(self) -> None:
        self._unpacker = self._new_unpacker()
        self._waiting = b""  # packed bytes behind the end of a stream
        self._at = 0

    def _new_unpacker(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        """It is only read."""
        return True

    def seekable(self) -> bool:
        """To its beginning."""
        return True

    def tell(self) -> int:
        """How many bytes of the content were read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go back to the beginning; OSError for any other place."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("an xz file is read from its beginning")
        self._file.seek(0)
        self._begin()
        return 0

    def readinto(self, buffer: Any) -> int:
        """The next bytes of the content; 0 at its end. LZMAError if it is damaged, EOFError if it is cut."""
        while True:
            if self._unpacker.eof:  # another stream may follow, after zeros
                rest = self._unpacker.unused_data or self._waiting
                while not (rest := rest.lstrip(b"\0")):
                    if not (rest := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                self._unpacker, self._waiting = self._new_unpacker(), rest
            packed, self._waiting = self._waiting, b""
            if self._unpacker.needs_input and not packed:
                packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("it ends before its content does")
            content = self._unpacker.decompress(packed, len(buffer))
            if content:
                buffer[: len(content)] = content
                self._at += len(content)
                return len(content)


COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lambda file, mode: io.BufferedReader(_Xz(file)),
}
PARQUET = b"PAR1"
REFUSED = {  # first bytes of a file -> what it is
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"ARROW1": "an Arrow file",
}
TAR = 257  # offset of the magic bytes of a tar archive
FILES = (
    ".json",
    ".jsonl",
    ".parquet",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
    ".tar",
    ".csv",
    ".tsv",
    ".txt",
)
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SAME = ("id", "key", "__key__")  # columns that two files of a sample may have
ROWS = (".json", ".jsonl", ".parquet")  # of a folder that has images, too
ROWS_AT_ONCE = 16  # of Parquet: they may hold images
LIST_ITEM = 8  # bytes of an item of a list in memory, at least
MOST_RATIO = 200  # of unpacked to packed bytes in a large column of Parquet
MOST_BYTES, MOST_NAME = (
    2**30,
    2**20,
)  # of a file in a tar archive, and of its name, which are read whole


@dataclass(frozen=True)
class Row:
    """One row of a source, or its problem. `number` and `line` count from 1."""

    source: str
    dataset: str
    number: int
    value: Any
    line: int | None = None
    problem: BadRowError | None = None

    @property
    def folder(self) -> Path:
        """The folder to which paths in the row are relative."""
        path, _ = _located(self.source)
        return path if path.is_dir() else path.parent

    def __str__(self) -> str:
        """A description of the row, for messages."""
        if self.problem:
            return f"line {self.line} is {self.problem}"
        if isinstance(self.value, Mapping):
            return f"row {self.number} has the columns {', '.join(map(str, self.value)) or '(none)'}"
        return f"row {self.number} is a {type(self.value).__name__}, not an object"


def check(source: str, hub: bool) -> Path:
    """The path of a source; DataError if it is neither file nor folder nor, with `hub`, a name on the hub."""
    try:
        path, _ = _located(source)
    except RuntimeError as error:  # of a user that is not there
        raise DataError(f"{source}: {error}") from None
    if not source:
        raise DataError(
            "the name of a source is empty: give a file, a folder or a dataset"
        )
    if lone_surrogate(str(path)) or lone_surrogate(str(path.resolve())):
        raise DataError(f"{source}: the name is not UTF-8: rename the file")
    local = source.startswith((".", "/", "~")) or source.lower().endswith(FILES)
    if not path.exists() and (local or not hub):
        hint = "" if local else " (a Hugging Face dataset by name: add --format hf)"
        there = (
            [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
        )
        raise DataError(
            f"there is no file {source}{did_you_mean(path.name, there) or hint}"
        )
    return path


def _located(source: str) -> tuple[Path, str]:
    """The path of a source, and the split that follows it in `FOLDER@SPLIT`, or an empty string."""
    path, (folder, _, split) = Path(source).expanduser(), source.rpartition("@")
    if folder and split and not path.exists() and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser(), split
    return path, ""


def read(source: str, media: bool = False) -> Iterator[Row]:
    """Every row of a source, in order. A local path is never looked up on the hub.

    With `media`, a folder is one of images and videos, and each of them a row.
    """
    path, split = _located(source)
    if media and path.is_dir() and not split:
        yield from _folder(path)
        return
    if not path.exists() or path.is_dir():
        yield from _dataset(source)
        return
    try:
        handle = open_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    with open(handle, "rb") as plain:
        start = plain.read(8)
        plain.seek(0)
        yield from _unpacked(plain, start, path)


def _unpacked(plain: IO[bytes], start: bytes, path: Path) -> Iterator[Row]:
    """The rows of an open file, which may be compressed, as its first bytes say."""
    unpack = next(
        (function for magic, function in COMPRESSED.items() if start.startswith(magic)),
        None,
    )
    try:
        with nullcontext(plain) if unpack is None else unpack(plain, "rb") as file:
            yield from _file(file, path)
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # not of a decompressor
            raise
        if "emory" in str(error):
            raise DataError(
                f"{path} needs more than {XZ_MEMORY // 2**20} MiB of memory: pack it again with xz -6"
            ) from None
        raise DataError(
            f"{path} cannot be decompressed ({one_line(error)}): download it again"
        ) from None


def _file(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The rows of an open file, whose first bytes decide the format."""
    start = file.read(TAR + 5)
    file.seek(0)
    if start[TAR:] == b"ustar":
        return _samples(file, path)
    if what := next(
        (name for magic, name in REFUSED.items() if start.startswith(magic)), None
    ):
        raise DataError(
            f"{path} is {what}: unpack it and import the JSON or Parquet files in it, with --images for the "
            "folder of its images and videos"
        )
    if start.startswith(PARQUET):
        return _parquet(file, path)
    if separators := separators_of(path.name):
        rows = table_rows(file, separators, path)
    else:
        rows = rows_of(file, path)
    return (
        Row(str(path.resolve()), _stem(path), number, value, line, problem)
        for number, (value, line, problem) in rows
    )


def _stem(path: Path) -> str:
    """The name of a file without the endings of its format."""
    name = path.name
    while (end := Path(name).suffix.lower()) in FILES:
        name = name[: -len(end)]
    return name or path.name


@contextmanager
def reading_parquet(path: Path, advice: str = "") -> Iterator[None]:
    """Say which Parquet file cannot be read, and what to do."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {one_line(error)}{advice}"
        ) from None


def _parquet(file: IO[bytes], path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    source, number = str(path.resolve()), 0
    with reading_parquet(path):
        parquet = pq.ParquetFile(file)
        require_single_names(parquet.schema_arrow.names, path)
        for batch in parquet.iter_batches(_rows_at_once(parquet.metadata, path)):
            for value, problem in _values(batch):
                number += 1
                yield Row(source, _stem(path), number, value, problem=problem)


def require_single_names(names: Sequence[str], path: Path) -> None:
    """DataError if two columns of a table have one name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns {twice[0]!r}: rename one")


def _rows_at_once(metadata: Any, path: Path) -> int:
    """How many rows of a Parquet file memory can hold, whatever they unpack to.

    A single value may be as long as the column chunk that it is in. DataError if a chunk unpacks to far more
    than it has in the file.
    """
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for position in range(group.num_columns):
            chunk = group.column(position)
            unpacked = chunk.total_uncompressed_size
            if metadata.schema.column(position).max_repetition_level:
                unpacked = max(unpacked, chunk.num_values * LIST_ITEM)
            packed = max(chunk.total_compressed_size, 1)
            if unpacked > MOST_BYTES and unpacked > MOST_RATIO * packed:
                raise DataError(
                    f"{path}: {packed} bytes of its column {chunk.path_in_schema} unpack to {unpacked}: "
                    "write it again in smaller row groups"
                )
            largest = max(largest, unpacked)
    return max(1, min(ROWS_AT_ONCE, MOST_BYTES // largest))


def _values(batch: Any) -> Iterator[tuple[Any, BadRowError | None]]:
    """The rows of an Arrow batch, or what is wrong with a row. No prompt has dates, but logs have times.

    Times are numbers, of their unit since 1970: Python knows fewer.
    """
    import pyarrow as pa

    for at, its in enumerate(batch.schema):
        if pa.types.is_timestamp(its.type):
            batch = batch.set_column(at, its.name, batch.column(at).cast(pa.int64()))
    batch = batch.select(
        [
            at
            for at, its in enumerate(batch.schema)
            if not pa.types.is_temporal(its.type)
        ]
    )
    try:
        values = python_rows(batch)
    except (ValueError, OverflowError, BadRowError) as error:
        # Text that is not UTF-8, a date in a list, JSON text with a key twice.
        if batch.num_rows == 1:
            if isinstance(error, BadRowError):
                yield None, error
            else:
                yield None, BadRowError("unreadable value", one_line(error))
        else:  # which row it is
            for at in range(batch.num_rows):
                yield from _values(batch.slice(at, 1))
    else:
        yield from ((value, None) for value in values)


def python_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table or batch. Text of the type `arrow.json` becomes the value that it says.

    `datasets` has this type for columns with values of several types. ValueError if one cannot be read.
    """
    rows: list[dict[str, Any]] = table.to_pylist()
    for column in table.schema:
        if not _holds_json(column.type):
            continue
        for row in rows:
            row[column.name] = _without_json(row[column.name], column.type)
    return rows


def _holds_json(kind: Any) -> bool:
    """Whether an Arrow type is `arrow.json`, or has it inside."""
    import pyarrow as pa

    inner = (kind.field(position).type for position in range(kind.num_fields))
    return isinstance(kind, pa.JsonType) or any(map(_holds_json, inner))


def _without_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, with JSON text in it read."""
    import pyarrow as pa

    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return loads(value)
    if pa.types.is_struct(kind):
        return {
            field.name: _without_json(value[field.name], field.type) for field in kind
        }
    if pa.types.is_map(kind):
        return [(key, _without_json(item, kind.item_type)) for key, item in value]
    return [_without_json(item, kind.value_type) for item in value]


def walk(folder: Path) -> Iterator[tuple[Path, OSError | None]]:
    """The files below a folder by name, and the folders that cannot be read with the error.

    Links are followed, and each folder is read once. Hidden files are ignored.
    """
    seen = set[tuple[int, int]]()

    def below(folder: Path) -> Iterator[tuple[Path, OSError | None]]:
        try:
            facts = folder.stat()
            inside = (
                sorted(folder.iterdir())
                if (at := (facts.st_dev, facts.st_ino)) not in seen
                else []
            )
        except OSError as error:
            yield folder, error
            return
        seen.add(at)
        for path in inside:
            if not path.name.startswith("."):
                yield from below(path) if os.path.isdir(path) else [(path, None)]

    return below(folder)


def _folder(path: Path) -> Iterator[Row]:
    """The images and videos below a folder."""
    source = str(path.resolve())
    for number, (file, error) in enumerate(walk(path), 1):
        kind, name, problem = kind_of(file.name), str(file.relative_to(path)), None
        if error:
            problem = BadRowError("unreadable folder", f"{name}: {error.strerror}")
        elif not kind:
            problem = BadRowError("neither image nor video", name)
        yield Row(source, path.resolve().name, number, {kind: name}, problem=problem)


class _Member(tarfile.TarInfo):
    """A member of an archive. A broken header is an error, which tarfile takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        """The member of a header; ReadError if it is broken, or announces a name too long for any file."""
        try:
            member = super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None
        if member.type not in tarfile.SUPPORTED_TYPES and member.size > MOST_NAME:
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


def _samples(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The samples of a tar archive, as in WebDataset: consecutive files with one name but for the ending.

    Members are read into memory, and no name of one is used as a path. DataError if files of a sample are
    apart: each part would be a sample of its own, such as a question without its image.
    """
    try:
        with _tar(file, "r:") as archive:
            _check_order(_members(archive), path)
        file.seek(0)
        with _tar(file, "r|") as archive:
            for number, (_, members) in enumerate(
                groupby(_members(archive), _SampleOf()), 1
            ):
                value, problem = _sample(archive, members)
                yield Row(
                    str(path.resolve()), _stem(path), number, value, problem=problem
                )
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as a tar archive: {one_line(error)}"
        ) from None


def _tar(file: IO[bytes], mode: Literal["r:", "r|"]) -> tarfile.TarFile:
    # Zeros end an archive, and another one may follow.
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member, ignore_zeros=True)


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive. Hidden ones are ignored, such as those that macOS adds for each file."""
    for member in archive:
        hidden = any(
            part.startswith(".") and part != ".."
            for part in PurePosixPath(member.name).parts
        )
        if not (member.isdir() or hidden):
            yield member


def _sample_name(name: str) -> str:
    """The name of a member up to the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + (last.partition(".")[0] or last)


def _ending(name: str) -> str:
    """The rest of a member's name: `seg.png` of `a/000.seg.png`."""
    return name[len(_sample_name(name)) + 1 :]


class _SampleOf:
    """The sample of each member: its name and number. Another one begins where a member comes again."""

    def __init__(self) -> None:
        self._name, self._number, self._seen = "", 0, set[str]()

    def __call__(self, member: tarfile.TarInfo) -> tuple[str, int]:
        name = _sample_name(member.name)
        if name != self._name or member.name in self._seen:
            self._name, self._number, self._seen = name, self._number + 1, set()
        self._seen.add(member.name)
        return name, self._number


def _check_order(members: Iterator[tarfile.TarInfo], path: Path) -> None:
    """DataError if files of a sample do not follow each other, or lie in two folders."""
    kinds: dict[str, dict[str, str]] = {}  # of the files of each name, with one of them
    for (name, _), group in groupby(members, _SampleOf()):
        new = {
            kind_of(member.name) or _ending(member.name): member.name
            for member in group
        }
        before = kinds.setdefault(name, new)
        if before.keys() != new.keys():
            raise DataError(
                f"{path}: {min(new.values())} does not follow {min(before.values())}, so that they would be "
                "two samples: sort the archive by name, as tar --sort=name does"
            )
    pictures: dict[
        str, str
    ] = {}  # samples of images and videos alone, by the last part of their name
    for name, its in kinds.items():
        if its.keys() <= KINDS.keys():
            pictures[PurePosixPath(name).name] = min(its.values())
    for name, its in kinds.items():
        picture = pictures.get(PurePosixPath(name).name)
        if picture and "json" in its and not its.keys() & KINDS.keys():
            raise DataError(
                f"{path}: {its['json']} lies in another folder than {picture}, so that they would be two "
                "samples: pack the files of a sample into one folder"
            )


def _sample(
    archive: tarfile.TarFile, members: Iterator[tarfile.TarInfo]
) -> tuple[dict[str, Any], BadRowError | None]:
    """The columns of one sample: of its JSON file, its images and videos, and its text as a caption."""
    value: dict[str, Any] = {}
    media: dict[str, dict[str, bytes]] = {}  # by kind and name
    problem = None
    room = MOST_BYTES  # of the sample, which memory holds
    for member in members:
        content = (
            archive.extractfile(member)
            if member.isreg() and not member.issparse()
            else None
        )
        if content is None or member.size > room:
            what = (
                f"{member.size} bytes, more than the {room} that a sample may still have"
                if content
                else "not an ordinary file"
            )
            problem = problem or BadRowError(
                "not a file of a sample", f"{member.name[:200]}: {what}"
            )
            continue
        room -= member.size
        data, ending = content.read(), PurePosixPath(member.name).suffix.lower()
        if kind := kind_of(member.name):
            media.setdefault(kind, {})[member.name] = data
        elif ending in (".json", ".txt", ".caption"):
            try:
                text = data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                problem = problem or BadRowError(
                    "not UTF-8", f"{member.name[:200]}: {error.reason}"
                )
                continue
            parsed, wrong = (
                parse(text) if ending == ".json" else ({"caption": text}, None)
            )
            if wrong or not isinstance(parsed, dict):
                problem = (
                    problem or wrong or BadRowError("not an object", member.name[:200])
                )
                continue
            same = (
                SAME if ending == ".json" else parsed.keys()
            )  # a caption may be in both
            if twice := [
                name
                for name in parsed.keys() & value.keys()
                if name not in same or value[name] != parsed[name]
            ]:
                detail = f"{member.name[:200]} has '{twice[0]}', as a file before it"
                problem = problem or BadRowError("two files of one sample", detail)
            value |= parsed
        else:
            value.setdefault(
                ending.lstrip(".") or member.name[:200], data[:1]
            )  # counts as unread
    for (
        kind,
        files,
    ) in media.items():  # instead of the names that the JSON file has for them
        named = value.pop(f"{kind}s", None) or value.get(kind)
        shown = _shown(files, named)
        value[kind] = [files[name] for name in shown]
        value |= {
            _ending(name): files[name][:1] for name in files if name not in shown
        }  # unread
        if not shown:
            detail = f"{', '.join(files)[:200]}: number those of the prompt, as 000.0.png and 000.1.png"
            problem = problem or BadRowError(f"several {kind}s", detail)
    return value, problem


def _shown(files: Collection[str], named: Any) -> list[str]:
    """The images of a sample that its prompt shows, in order; none if that cannot be told.

    All if the row names as many, else those without a second ending or with a number in it: `000.seg.png`
    beside `000.png` may be a mask.
    """
    names = named if isinstance(named, list) else [named]
    by_leaf = {PurePosixPath(file).name: file for file in files}
    leaves = [PurePosixPath(name).name for name in names if isinstance(name, str)]
    by_ending = {_ending(file): file for file in files}
    for by_name in (by_leaf, by_ending):
        if len(leaves) == len(by_name) == len(files) and set(leaves) == set(by_name):
            return [by_name[leaf] for leaf in leaves]
    second = {file: _ending(file).rpartition(".")[0] for file in files}
    numbers = {
        file: [int(digits) for digits in re.findall(r"\d+", second[file])]
        for file in files
    }
    shown = sorted(files, key=lambda file: numbers[file])
    if len(files) > 1 and len(names) != len(files):
        shown = [file for file in shown if not second[file] or numbers[file]]
    has_order = all(numbers[file] != numbers[after] for file, after in pairwise(shown))
    return shown if has_order else []


def _own_rows(folder: Path, split: str) -> Iterator[Row]:
    """The rows of a local dataset that are read here; none if `datasets` reads it."""
    rows = _metadata_rows(folder, split)
    first = next(rows, None)
    if first is not None:
        yield first
        yield from rows
        return
    for file in _own_files(folder, split):
        yield from read(str(file))


def _as_text(name: str, subset: str, split: str) -> dict[str, Any]:
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


def _own_files(folder: Path, split: str) -> list[Path]:
    """The files that hold the rows of a local dataset and are read here; none if `datasets` reads it.

    `datasets` takes a folder with more images than JSON files for one of images alone. In a column of values
    of several types it reads text that looks like JSON as what that text says, and in a CSV file it takes
    `None` and `NA` for no value.
    """
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    builder, names = datasets.load_dataset_builder(str(folder)), set[str]()
    if builder.name in ("imagefolder", "videofolder"):
        names |= {path.name for path, _ in walk(folder)}
        root = str(folder.resolve())
        patterns = get_data_patterns(root)
        by_split = DataFilesDict.from_patterns(
            patterns, root, allowed_extensions=[*ROWS]
        )
    elif _is_plain(builder.config) and builder.name in ("json", "csv"):
        by_split = builder.config.data_files
    else:
        return []
    files = by_split.get(split or "train", [])
    if not files and not split:  # `train` may name the folder of the images
        files = [str(path) for path, _ in walk(folder) if path.suffix.lower() in ROWS]
    if not files and (
        csv := next((name for name in names if name.lower().endswith(".csv")), "")
    ):
        raise DataError(
            f"it has images and {csv}: move that into a folder of its own, and give --images"
        )
    return [Path(file) for file in files]


def _metadata_rows(folder: Path, split: str) -> Iterator[Row]:
    """The rows of the metadata files in a folder of images or videos, by a convention of `datasets`.

    A row names its file, relative to the metadata, in the column `file_name`, `file_names` or
    `image_file_name`. DataError if there is no such split.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    found = [path for path, _ in walk(folder) if path.name in METADATA]
    if not found:
        return
    root = folder.resolve()
    by_split = DataFilesDict.from_patterns(get_data_patterns(str(root)), str(root))
    if split and split not in by_split:
        raise DataError(f"no split '{split}': there is {', '.join(map(str, by_split))}")
    of_split = {str(path) for path in by_split.get(split or "train", [])}
    for path in found:
        for row in read(str(path)):
            row, files = _with_media_columns(row, path.parent.resolve())
            is_elsewhere = [
                file.exists() and str(file) not in of_split for file in files
            ]
            if not (of_split and any(is_elsewhere)):
                yield row


def _with_media_columns(row: Row, folder: Path) -> tuple[Row, list[Path]]:
    """A row of metadata with the columns `image` and `video`, and the files that it names."""
    if not isinstance(row.value, Mapping):
        return row, []
    value: dict[str, Any] = {}
    files: list[Path] = []
    problem = row.problem
    for name, content in row.value.items():
        column, is_named, _ = str(name).rpartition("file_name")
        names = content if isinstance(content, list) else [content]
        if not is_named or not all(isinstance(item, str) for item in names):
            column, content = name, content
        else:
            paths = [Path(os.path.normpath(folder / item)) for item in names]
            files += paths
            kind = kind_of(paths[0].name) if paths else ""
            column = column.rstrip("_") or kind or name
            content = [str(path) for path in paths]
        if column in value:
            problem = BadRowError("several media columns", f"{name} and {column}")
        value[column] = content
    return replace(row, value=value, problem=problem), files


def _is_plain(config: Any) -> bool:
    """Whether a folder does not say how `datasets` shall read its JSON or CSV files."""
    settings, usual = vars(config), vars(type(config)())
    where = {"name", "version", "data_dir", "data_files", "description", "sep"}
    return all(
        settings[name] == usual[name] for name in settings.keys() & usual.keys() - where
    )


def _dataset(source: str) -> Iterator[Row]:
    """The rows of a Hugging Face dataset: `name`, `name:subset`, `...@split`, or a local folder."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"reading the dataset {source} needs the package datasets: pip install 'vlmdistill[hf]'"
        ) from None
    folder, split = _located(source)
    if folder.exists():
        name, subset = str(folder), ""
    else:
        name, _, split = source.partition("@")
        name, _, subset = name.partition(":")
    saved = (folder / "state.json").is_file() or (
        folder / "dataset_dict.json"
    ).is_file()
    number = 0
    try:
        for row in _own_rows(folder, split) if folder.is_dir() and not saved else ():
            number += 1
            yield replace(row, source=source, dataset=Path(name).name, number=number)
        if number:
            return
        split = split or "train"
        if saved:
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, Mapping) and split not in loaded:
                raise DataError(
                    f"no split '{split}': write {name}@SPLIT, with one of {', '.join(loaded)}"
                )
            data = loaded[split] if isinstance(loaded, Mapping) else loaded
        else:
            data = datasets.load_dataset(
                name, subset or None, split=split, **_as_text(name, subset, split)
            )
        # Arrow rows hold images as encoded bytes, not decoded.
        for table in data.with_format("arrow").iter(batch_size=1):
            for value, problem in _values(table):
                number += 1
                yield Row(source, Path(name).name, number, value, problem=problem)
    except Exception as error:  # noqa: BLE001 - loaders of datasets raise anything; the user needs one line
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot read the dataset {name}{f' at row {number + 1}' if number else ''}: {reason}"
        ) from None
