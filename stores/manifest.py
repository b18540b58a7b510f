"""Records: small sealed JSON files that make other files count. All of them are read here.

A shard, a view, a table of statistics, a frozen head: each is a set of files that do not
count until a record names them with their sizes and blake3. A record seals itself: its bytes are the
canonical JSON of its content and of the hash of that content, so that any change shows.

A record may come from an untrusted source, which can seal anything. So its size and nesting are bounded
before it is parsed, types and bounds are declared below, and `wrong` compares the names in it with the name
of its file. A record that passes is as `docs/store-format.md` allows: its names lead nowhere but into the
store.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import blake3
import msgspec
from msgspec import Meta, Struct

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError, VersionError, one_line
from vlmdistill.stores.input_files import decode
from vlmdistill.stores.schema import (
    CHUNK_FILE,
    SCHEMA_VERSION,
    Provenance,
    Rows,
    TargetInfo,
)

STORE = "store.json"
COMMITS = "commits"
SHARDS = "shards"
HEADS = "heads"
VIEWS = "views"
CACHE = "cache"
STATS = "stats"
ANNEXES = "annexes"
HEAD_FILE = "head.safetensors"
INDEX = "index.arrow"
GROUP = "zarr.json"  # describes a shard, and each of its arrays
FORMAT = "vlmdistill-store"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")
RECORD = re.compile(
    rf"{STORE}|({COMMITS}|{VIEWS}|{STATS}|{CACHE})/{NAME.pattern}\.json"
)
ARRAY = r"(?:tokens|(?:hidden|embed|layer[0-9]{1,5})\.(?:text|visual|span)(?:\.(?:token|channel)_scale)?)"
FILE = re.compile(rf"{INDEX}|{GROUP}|{ARRAY}/(?:{GROUP}|{CHUNK_FILE})")
SEAL = re.compile(rb'"blake3":"([0-9a-f]{64})",?')
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
KINDS: tuple[Rows, ...] = get_args(Rows)
DEPTH = 32  # brackets within brackets

Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
Short = Annotated[str, Meta(max_length=300)]
Text = Annotated[str, Meta(max_length=1 << 14)]
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
# Bytes and blake3 of a file.
Entry = tuple[Count, Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]]
# Hashes that are only compared: a pattern would take longer.
Files = Mapping[Short, tuple[Count, Annotated[str, Meta(min_length=64, max_length=64)]]]
Square = Annotated[float, Meta(ge=0)]
R = TypeVar("R", bound="Record")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sealed record."""

    schema: Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]

    MOST: ClassVar[int] = 1 << 20  # bytes

    def wrong(self, name: str) -> str | None:
        """Why this cannot be the record in the file `name`; None when it can."""
        raise NotImplementedError


class HeadRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of the frozen embedding and LM head."""

    file: Short
    entry: Entry
    dtype: Annotated[str, Meta(pattern=r"\A(bfloat16|float16|float32)\Z")]
    tied: bool
    generation: Mapping[str, Any]  # the target's generation configuration: informative


class StoreRecord(Record, frozen=True, kw_only=True):
    """The target and the features of a store."""

    format: Annotated[str, Meta(pattern=rf"\A{FORMAT}\Z")]
    provenance: Provenance
    info: TargetInfo
    encoding: Mapping[Short, Short]
    """Feature name -> raw | int8, checked by `Layout.of`."""
    head: HeadRecord

    def wrong(self, name: str) -> str | None:
        """Its head lies in a folder named by its content."""
        file = f"{HEADS}/{self.head.entry[1][:16]}/{HEAD_FILE}"
        return None if self.head.file == file else f"its head must be in {file}"


class Commit(Record, frozen=True, kw_only=True):
    """A shard that counts."""

    shard: Name
    folder: Short  # below `shards/`: the name, and a hash of the files
    origin: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]  # hash of the provenance
    rows: Mapping[Rows, Count]
    meta: tuple[Text, ...]
    files: Files
    losses: Mapping[Short, tuple[Square, Square]]
    """Of int8 features: summed squared error, summed squares."""

    @property
    def path(self) -> str:
        """The folder that counts by this record, below the store."""
        return f"{SHARDS}/{self.folder}"

    def size(self, file: str) -> int:
        """Bytes of a file of the shard; 0 when it has none of that name."""
        return self.files[file][0] if file in self.files else 0

    def wrong(self, name: str) -> str | None:
        """It has the name of its shard and names files of a shard, and its folder is named by them."""
        if name != commit_name(self.shard):
            return f"it is the record of {self.shard}"
        for file in self.files:
            if not FILE.fullmatch(file):
                return f"a shard has no file {file!r}"
        if not {INDEX, GROUP} <= self.files.keys():
            return f"a shard has the files {INDEX} and {GROUP}"
        if len(self.rows) < len(KINDS):
            return "it lacks the rows of each kind: text, visual, span, sample"
        folder = shard_folder(self.shard, self.files)
        return (
            None if self.folder == folder else f"the folder of these files is {folder}"
        )


class TableRecord(Record, frozen=True, kw_only=True):
    """An Arrow table that counts; see `tables.write_table`."""

    file: Short = ""
    entry: Entry = (0, "")

    FOLDER: ClassVar[str]

    @property
    def name(self) -> str:
        """The name of the table in its folder."""
        return "index"

    @property
    def path(self) -> str:
        """The file that counts by this record, below the store."""
        return self.file

    def file_of(self, entry: Entry) -> str:
        """The file for a table: named by its content."""
        return f"{self.FOLDER}/{self.name}-{entry[1][:16]}.arrow"

    def wrong(self, name: str) -> str | None:
        """It is of its name, and its table named by that and by the content."""
        if name != f"{self.FOLDER}/{self.name}.json":
            return f"it is the record of {self.name}"
        file = self.file_of(self.entry)
        if self.file != file or not self.entry[1]:
            return f"its table must be {file}"
        return None


class ViewRecord(TableRecord, frozen=True, kw_only=True):
    """The samples that some filters keep."""

    name: Name = msgspec.field(name="view")
    base: Name | None
    filters: tuple[Text, ...]
    rows: Count
    kept: Count
    dropped: Mapping[Text, Count]

    FOLDER = VIEWS

    def wrong(self, name: str) -> str | None:
        """Its numbers add up."""
        if self.rows != self.kept + sum(self.dropped.values()):
            return f"{self.kept} samples that it keeps and those that it drops are not {self.rows}"
        return super().wrong(name)


class RunRecord(TableRecord, frozen=True, kw_only=True):
    """Statistics of samples from a training run."""

    name: Name = msgspec.field(name="run")
    order: Count

    FOLDER = STATS


class CacheRecord(TableRecord, frozen=True, kw_only=True):
    """The merged index of these shards, by name, with their folders."""

    shards: Mapping[Name, Short]

    FOLDER = CACHE
    MOST = 1 << 24


TABLES: Mapping[str, type[TableRecord]] = {
    kind.FOLDER: kind for kind in (ViewRecord, RunRecord, CacheRecord)
}


def kind_of(name: str) -> type[Commit | TableRecord]:
    """The type of the record in a file, by its folder."""
    return TABLES.get(name.split("/")[0], Commit)


def damaged(where: str, why: str = "its checksum does not match") -> StoreError:
    """The error for damaged data."""
    return StoreError(
        f"{where} is damaged: {why}. `vlmdistill store verify` lists all damage"
    )


def digest(data: bytes | memoryview) -> str:
    """The blake3 of some bytes, as 64 hex digits."""
    return blake3.blake3(data).hexdigest()


_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False
).encode


def seal(record: Record | Mapping[str, Any]) -> bytes:
    """The bytes of a record; StoreError when it could not be read back."""
    content = msgspec.to_builtins(record)
    try:
        bare = _canonical(content).encode()
        if isinstance(record, Record):
            _require_size(bare, type(record))
            decode(bare, type(record))
    except ValueError as error:
        raise StoreError(
            f"this {type(record).__name__} cannot be written: {one_line(error)}"
        ) from error
    return _canonical({**content, "blake3": digest(bare)}).encode()


def unseal(data: bytes, kind: type[R], name: str) -> R:
    """Read the record in the file `name` back; ValueError or VersionError says what is wrong."""
    _require_size(data, kind)
    if _deep(data):
        raise ValueError(f"its brackets do not match, or are more than {DEPTH} deep")
    # The first is its own: keys are sorted, and nothing that comes before it can hold another.
    match = SEAL.search(data)
    if not match:
        raise ValueError("its checksum does not match")
    content = data[: match.start()] + data[match.end() :]
    if digest(content) != match[1].decode():
        raise ValueError("its checksum does not match")
    try:
        record = decode(content, kind)
    except msgspec.ValidationError:
        _require_known(content)
        raise
    if why := record.wrong(name):
        raise ValueError(why)
    return record


def _require_size(data: bytes, kind: type[Record]) -> None:
    if len(data) > kind.MOST:
        raise ValueError(f"it has more than {kind.MOST} bytes")


def _deep(data: bytes) -> bool:
    """Whether brackets outside of strings are nested too deeply, or do not match."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    brackets = b"".join(bare).translate(None, NO_BRACKETS)
    for _ in range(DEPTH):
        if not brackets:
            break
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


class _Version(Struct):
    schema: int


def _require_known(content: bytes) -> None:
    """VersionError when a record, which is not as it should be, is of another version of the format."""
    try:
        version = decode(content, _Version).schema
    except msgspec.ValidationError:
        return
    if version == SCHEMA_VERSION or version < 1:  # the version is not the fault
        return
    cure = "a development version wrote it, write it again"
    if version > SCHEMA_VERSION:
        cure = "update vlmdistill"
    raise VersionError(
        f"has schema {version}, this vlmdistill reads {SCHEMA_VERSION}: {cure}"
    )


def read_record(backend: Backend, name: str, kind: type[R], below: str = "") -> R:
    """Read and check a record: StoreError if damaged or of another version, FileNotFoundError if missing.

    Its copy is `below` another folder.
    """
    path = f"{backend.url}/{below}{name}"
    if not RECORD.fullmatch(name):
        raise damaged(path, "no record can have that name")
    try:
        return unseal(backend.read(below + name, kind.MOST + 1), kind, name)
    except (ValueError, IsADirectoryError, NotADirectoryError) as error:
        raise damaged(path, one_line(error)) from error
    except VersionError as error:
        raise VersionError(f"{path} {error}") from None


def find_record(
    backend: Backend, name: str, kind: type[R], below: str = ""
) -> R | None:
    """Read and check a record, None when it is missing; StoreError when damaged or of another version."""
    try:
        return read_record(backend, name, kind, below)
    except FileNotFoundError:
        return None


def check_name(name: str, kind: str) -> str:
    """Refuse names that cannot be file names everywhere."""
    if not NAME.fullmatch(name):
        raise StoreError(
            f"'{name}' cannot name a {kind}: use at most 200 letters, digits and . _ = + -, starting with a "
            "letter or digit"
        )
    return name


def shard_folder(shard: str, files: Files) -> str:
    """The folder of a shard: its name and a hash of its files, so that equal samples make equal folders."""
    return f"{shard}-{digest(msgspec.json.encode(files, order='sorted'))[:16]}"


def record_names(backend: Backend, folder: str) -> list[str]:
    """The names of the records in a folder, sorted."""
    return [
        name.removesuffix(".json")
        for name in names_in(backend, folder)
        if name.endswith(".json")
    ]


def names_in(backend: Backend, folder: str) -> list[str]:
    """The sorted names in a folder of the store; StoreError when it is a file."""
    try:
        return backend.list_names(folder)
    except NotADirectoryError as error:
        raise damaged(f"{backend.url}/{folder}", "it is no folder") from error


def committed_shards(backend: Backend) -> list[str]:
    """The names of the committed shards, sorted."""
    return record_names(backend, COMMITS)


def commit_name(shard: str) -> str:
    """Where the record of a shard lies."""
    return f"{COMMITS}/{shard}.json"
