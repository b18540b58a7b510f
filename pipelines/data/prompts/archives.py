"""The samples of a tar archive, as in WebDataset: consecutive files with one name but for the ending."""

import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from vlmdistill.pipelines.data.prompts.json_rows import parse
from vlmdistill.pipelines.data.prompts.row import MOST_BYTES, Row, dataset_name
from vlmdistill.pipelines.media.frames import numbers_of
from vlmdistill.pipelines.media.images import KINDS, kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line

MAGIC, MAGIC_OFFSET = b"ustar", 257
MOST_NAME = 2**20  # bytes of a member's name, which is read whole
SHOWN_NAME = 200  # characters of it in messages
SHARED_COLUMNS = ("id", "key", "__key__")  # that two JSON files of a sample may have
CAPTIONS = (".txt", ".caption")
TABLES = (".jsonl", ".parquet", ".csv", ".tsv")


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


def is_archive(start: bytes) -> bool:
    """Whether a file that begins so is a tar archive."""
    return start[MAGIC_OFFSET : MAGIC_OFFSET + len(MAGIC)] == MAGIC


def archive_rows(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The samples of an open tar archive.

    Members are read into memory, and no name of one is used as a path. DataError if files of a sample are
    apart: each part would be a sample of its own, such as a question without its image.
    """
    source = str(path.resolve())
    try:
        with _open(file, "r:") as archive:
            _check_order(_members(archive), path)
        file.seek(0)
        with _open(file, "r|") as archive:
            samples = groupby(_members(archive), _SampleOf())
            for number, (_, members) in enumerate(samples, 1):
                value, problem = _Sample().read(archive, members)
                yield Row(source, dataset_name(path), number, value, problem=problem)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as a tar archive: {one_line(error)}"
        ) from None


def _open(file: IO[bytes], mode: Literal["r:", "r|"]) -> tarfile.TarFile:
    # Zeros end an archive, and another one may follow.
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member, ignore_zeros=True)


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive. Hidden ones are ignored, such as those that macOS adds for each file.

    ReadError if no block of zeros ends it: a download may stop behind a member.
    """
    end = 0
    for member in archive:
        end = archive.offset  # of the member
        parts = PurePosixPath(member.name).parts
        is_hidden = any(part.startswith(".") and part != ".." for part in parts)
        if not member.isdir() and not is_hidden:
            yield member
    if archive.offset == end:
        raise tarfile.ReadError(
            "it has no end, as after a download that was cut: fetch it again, or if it is whole, append 1024 "
            "bytes of zeros"
        )


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
        self._name = ""
        self._number = 0
        self._seen: set[str] = set()

    def __call__(self, member: tarfile.TarInfo) -> tuple[str, int]:
        name = _sample_name(member.name)
        if name != self._name or member.name in self._seen:
            self._name = name
            self._number += 1
            self._seen = set()
        self._seen.add(member.name)
        return name, self._number


def _check_order(members: Iterator[tarfile.TarInfo], path: Path) -> None:
    """DataError if files of a sample do not follow each other, or lie in two folders."""
    files: dict[str, dict[str, str]] = {}  # sample -> kind or ending -> a member
    for (name, _), group in groupby(members, _SampleOf()):
        by_kind = {
            kind_of(member.name) or _ending(member.name): member.name
            for member in group
        }
        earlier = files.setdefault(name, by_kind)
        if earlier.keys() != by_kind.keys():
            raise DataError(
                f"{path}: {min(by_kind.values())} does not follow {min(earlier.values())}, so that they "
                "would be two samples: sort the archive by name, as tar --sort=name does"
            )
    pictures: dict[str, str] = {}  # last part of a sample of media alone -> a member
    for name, by_kind in files.items():
        if by_kind.keys() <= KINDS.keys():
            pictures[PurePosixPath(name).name] = min(by_kind.values())
    for name, by_kind in files.items():
        picture = pictures.get(PurePosixPath(name).name)
        is_text = "json" in by_kind and not by_kind.keys() & KINDS.keys()
        if picture and is_text:
            raise DataError(
                f"{path}: {by_kind['json']} lies in another folder than {picture}, so that they would be two "
                "samples: pack the files of a sample into one folder"
            )


@dataclass
class _Sample:
    """The columns of one sample: of its JSON file, its images and videos, and its text as a caption."""

    value: dict[str, Any] = field(default_factory=dict)
    problem: BadRowError | None = None  # the first one
    _media: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Kind -> name of a member -> content."""
    _has_caption_file: bool = False
    _table: str = ""  # a file that may have rows of many samples
    _has_text: bool = False  # a row or a caption, so that its images are one sample
    _room: int = field(default_factory=lambda: MOST_BYTES)

    def read(
        self, archive: tarfile.TarFile, members: Iterator[tarfile.TarInfo]
    ) -> tuple[dict[str, Any], BadRowError | None]:
        """The columns of a sample, and what is wrong with it."""
        for member in members:
            try:
                self._add(member, self._content(archive, member))
            except BadRowError as error:
                self.problem = self.problem or error
        if self._table and not self._media and not self._has_text:
            self.problem = self.problem or BadRowError(
                "a table in an archive",
                f"{self._table}: unpack the archive, and import that file",
            )
        names = [name for files in self._media.values() for name in files]
        if len(names) > 1 and not self._has_text:
            self.problem = self.problem or BadRowError(
                "several media files without text",
                f"{', '.join(names)[:SHOWN_NAME]}: one sample, since its name ends at the first dot, or "
                "several: add a JSON file to it, or rename them",
            )
        for kind, files in self._media.items():
            self._add_media(kind, files)
        return self.value, self.problem

    def _content(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        is_ordinary = member.isreg() and not member.issparse()
        file = archive.extractfile(member) if is_ordinary else None
        if file is None:
            raise _bad_member(member, "not an ordinary file")
        if member.size > self._room:
            raise _bad_member(
                member,
                f"{member.size} bytes, and the sample may have {self._room} more",
            )
        self._room -= member.size
        return file.read()

    def _add(self, member: tarfile.TarInfo, content: bytes) -> None:
        """Add a file to the columns; BadRowError if it cannot be read, or has a column of an earlier file."""
        ending = PurePosixPath(member.name).suffix.lower()
        kind = kind_of(member.name)
        if kind:
            self._media.setdefault(kind, {})[member.name] = content
        elif ending == ".json":
            self._add_columns(member, _json_object(member, content), SHARED_COLUMNS)
        elif ending in CAPTIONS:
            if self._has_caption_file:
                detail = f"{_shown(member)} is another caption"
                raise BadRowError("two files of one sample", detail)
            self._has_caption_file = True
            # A caption may be in the JSON file, too.
            caption = {"caption": _text(member, content)}
            self._add_columns(member, caption, ("caption",))
        else:
            if ending in TABLES:
                self._table = _shown(member)
            column = ending.lstrip(".") or member.name[:SHOWN_NAME]
            self._add_unread(column, content)

    def _add_columns(
        self,
        member: tarfile.TarInfo,
        columns: dict[str, Any],
        shared: Collection[str],
    ) -> None:
        self._has_text = True
        for name in columns.keys() & self.value.keys():
            if name not in shared or self.value[name] != columns[name]:
                detail = f"{_shown(member)} has '{name}', as a file before it"
                raise BadRowError("two files of one sample", detail)
        self.value |= columns

    def _add_unread(self, column: str, content: bytes) -> None:
        """Add a column that no prompt has, which counts as unread."""
        self.value.setdefault(column, content[:1])

    def _add_media(self, kind: str, files: dict[str, bytes]) -> None:
        """Put images or videos in the place of the names that the JSON file has for them."""
        in_parts = [*_places_of_names(self.value, kind)]
        has_column = self.value.get(kind) or self.value.get(f"{kind}s")
        if in_parts and not has_column:
            self._fill_in_parts(kind, files, in_parts)
            return
        named = self.value.pop(f"{kind}s", None) or self.value.get(kind)
        shown = _shown_files(files, named)
        self.value[kind] = [files[name] for name in shown]
        for name in files:
            if name not in shown:
                self.value[_ending(name)] = files[name][:1]
        if not shown and self.problem is None:
            listed = ", ".join(files)[:SHOWN_NAME]
            self.problem = BadRowError(
                f"several {kind}s",
                f"{listed}: number those of the prompt, as 000.0.png and 000.1.png",
            )

    def _fill_in_parts(
        self, kind: str, files: dict[str, bytes], in_parts: Sequence["_Place"]
    ) -> None:
        """Put images or videos into the parts of turns that name them; others of the sample are unread.

        A name is never one of a file on this disk.
        """
        by_leaf = {PurePosixPath(name).name: name for name in files}
        by_ending = {_ending(name): name for name in files}
        unread = dict(files)
        for holder, key in in_parts:
            leaf = PurePosixPath(holder[key]).name
            name = by_leaf.get(leaf) or by_ending.get(leaf)
            if name is None:
                detail = f"the sample has no file {holder[key][:SHOWN_NAME]}"
                self.problem = self.problem or BadRowError(f"missing {kind}", detail)
                continue
            holder[key] = files[name]
            unread.pop(name, None)
        for name, content in unread.items():
            self._add_unread(_ending(name), content)


_Place = tuple[Any, Any]
"""An object or a list in a row, and the key or the index in it of a file's name."""


def _places_of_names(row: Mapping[str, Any], kind: str) -> Iterator[_Place]:
    """Where turns and parts name images or videos, below the columns of a row."""
    for column in row.values():
        yield from _named_below(column, kind, of_media=False)


def _named_below(value: Any, kind: str, of_media: bool) -> Iterator[_Place]:
    """The same below a value, which is that of a key for images or videos or not."""
    keys = (kind, f"{kind}s", f"{kind}_url", "path", "url")
    is_list = isinstance(value, list)
    if not is_list and not isinstance(value, dict):
        return
    for key, item in enumerate(value) if is_list else value.items():
        is_media = of_media if is_list else key in keys
        is_text = isinstance(item, str)
        if is_media and is_text and kind_of(item) == kind and "://" not in item:
            yield value, key
        else:
            yield from _named_below(item, kind, is_media)


def _shown(member: tarfile.TarInfo) -> str:
    return member.name[:SHOWN_NAME]


def _bad_member(member: tarfile.TarInfo, reason: str) -> BadRowError:
    return BadRowError("not a file of a sample", f"{_shown(member)}: {reason}")


def _text(member: tarfile.TarInfo, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"{_shown(member)}: {error.reason}") from None


def _json_object(member: tarfile.TarInfo, content: bytes) -> dict[str, Any]:
    value, problem = parse(_text(member, content))
    if problem:
        raise problem
    if not isinstance(value, dict):
        raise BadRowError("not an object", _shown(member))
    return value


def _shown_files(files: Collection[str], named: Any) -> list[str]:
    """The images of a sample that its prompt shows, in order; none if that cannot be told.

    All if the row names as many, else those without a second ending or with a number in it: `000.seg.png`
    may be a mask, and so may `000.seg_1.png` beside `000.png`.
    """
    names = named if isinstance(named, list) else [named]
    leaves = [PurePosixPath(name).name for name in names if isinstance(name, str)]
    by_leaf = {PurePosixPath(file).name: file for file in files}
    by_ending = {_ending(file): file for file in files}
    for by_name in (by_leaf, by_ending):
        is_same = set(leaves) == set(by_name)
        if is_same and len(leaves) == len(by_name) == len(files):
            return [by_name[leaf] for leaf in leaves]
    second_ending = {file: _ending(file).rpartition(".")[0] for file in files}
    by_stem = numbers_of([*second_ending.values()])
    numbers = {file: by_stem[second_ending[file]] for file in files}
    shown = sorted(files, key=lambda file: numbers[file])
    if len(files) > 1 and len(names) != len(files):
        has_plain = not all(second_ending.values())
        shown = [
            file
            for file in shown
            if not second_ending[file]
            or second_ending[file].isdecimal()
            or (numbers[file] and not has_plain)
        ]
    has_order = all(numbers[file] != numbers[after] for file, after in pairwise(shown))
    return shown if has_order else []
