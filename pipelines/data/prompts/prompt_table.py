"""The prompts of a workspace: the Parquet file, read whole or so that a million of them fit into memory."""

import dataclasses
import os
import posixpath
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.parquet_rows import reading_parquet
from vlmdistill.pipelines.data.spool import Spool
from vlmdistill.pipelines.media.urls import address, is_url
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Array

if TYPE_CHECKING:
    import polars as pl

Split = Literal["train", "eval"]
LENGTHS = {"image": 2000, "video": 20000}
"""Of media, in characters of text, to sort prompts by length."""
BATCH = 1 << 13  # prompts in memory at once
LATER = ("time",)  # columns that files of earlier versions lack
TRAFFIC = "traffic-"  # begins the dataset of harvested prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt. The order of the attributes is the column order of the file."""

    key: str
    dataset: str
    split: Split
    messages: list[Message]
    """Parts are {"type": "text", "text"} or {"type": "image"|"video", "path", "digest"}."""
    augmentation: str
    augmentation_text: str
    reference: str | None  # the dataset's own response
    source: str
    row: int
    turn: int  # which user turn of the row it ends with, from 1
    time: int | None = None
    """When it was asked, in seconds since 1970; None: it is no traffic."""

    @property
    def files(self) -> list[str]:
        """The paths of its images and videos."""
        return [part["path"] for part in self.media]

    @property
    def media(self) -> list[dict[str, Any]]:
        """Their parts."""
        return [*media_parts(self.messages)]


def media_parts(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """The parts that are images or videos, in order."""
    for message in messages:
        yield from (part for part in message["content"] if part["type"] != "text")


def schema() -> Any:
    """The Arrow schema of the prompts file."""
    import pyarrow as pa

    text = pa.string()
    part = {"type": text, "text": text, "path": text, "digest": text}
    # The sampling of a video; both are null for the target's own.
    part |= {"fps": pa.float64(), "frames": pa.int32()}
    message = {"role": text, "content": pa.list_(pa.struct(part))}
    columns = dict.fromkeys((field.name for field in dataclasses.fields(Prompt)), text)
    columns |= {
        "messages": pa.list_(pa.struct(message)),
        "row": pa.int64(),
        "turn": pa.int32(),
        "time": pa.int64(),
    }
    return pa.schema(columns, metadata={"vlmdistill.prompts": "1"})


def read(path: Path, model: str = "M") -> list[Prompt]:
    """The prompts of a file, in its order; DataError if it is missing or not a prompts file.

    `model` is the target that the error message names.
    """
    _require_there(path, model)
    base = address(path.parent)
    with reading_parquet(path):
        file = _file(path)
        return [_prompt(row, base) for row in file.read(_columns(file)).to_pylist()]


def keys(path: Path) -> set[str]:
    """The keys of the prompts of a file; none if there is no file. DataError if it is not a prompts file."""
    if not path.is_file():
        return set()
    with reading_parquet(path):
        return set(_file(path).read(["key"])["key"].to_pylist())


def deleted(prompts: Sequence[Prompt]) -> set[str]:
    """The keys of prompts that are no longer in the file that they were read from: `forget` deletes some."""
    if not isinstance(prompts, Prompts) or not os.access(prompts.file.parent, os.W_OK):
        return set()
    with only_writer(prompts.file, wait=True):
        return {*prompts.facts["key"]} - keys(prompts.file)


def require_listed(prompts: Sequence[Prompt]) -> None:
    """DataError if prompts are `deleted`.

    Call it under the lock of what is written about them: `forget` takes that lock, too, after the prompts'.
    """
    if deleted_keys := deleted(prompts):
        raise DataError(
            f"{len(deleted_keys)} prompts were deleted after this run had read them: run the same command "
            "again"
        )


def _require_there(path: Path, model: str) -> None:
    if not path.is_file():
        raise DataError(
            f"no prompts in {path}: import yours with `vlmdistill prompts FILE... -m {model}`, "
            f"or the demo's with `vlmdistill prompts demo -m {model}`"
        )


def _file(path: Path) -> Any:
    """The open Parquet file; DataError if it is not a prompts file."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    required = [name for name in schema().names if name not in LATER]
    missing = [name for name in required if name not in file.schema_arrow.names]
    if missing:
        raise DataError(
            f"{path} is not a prompts file: it lacks the columns {', '.join(missing)}"
        )
    return file


def is_prompts(path: Path) -> bool:
    """Whether a Parquet file is a prompts file."""
    try:
        with reading_parquet(path):
            _file(path)
    except DataError:
        return False
    return True


def _columns(file: Any) -> list[str]:
    """The columns of prompts that a file has."""
    return [name for name in schema().names if name in file.schema_arrow.names]


def _prompt(row: dict[str, Any], base: str) -> Prompt:
    """The prompt of a row; its paths may be relative to `base`, a folder or URL."""
    for message in row["messages"]:
        message["content"] = [_without_nulls(part) for part in message["content"]]
    for part in media_parts(row["messages"]):
        if not is_url(part["path"]):
            # An absolute path stays as it is.
            part["path"] = posixpath.join(base, part["path"])
    return Prompt(**row)


def _without_nulls(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if value is not None}


class Prompts(Sequence[Prompt]):
    """Prompts of a file. In memory are their `facts` (`key`, `chars`) alone: a million take 50 MB."""

    def __init__(self, spool: Spool, file: Path, facts: "pl.DataFrame") -> None:
        self._spool, self.file = spool, file
        self._base = address(file.parent)
        self.facts = facts  # `row` in the spool

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, at: int) -> Prompt: ...
    @overload
    def __getitem__(self, at: slice) -> "Prompts": ...
    def __getitem__(self, at: int | slice) -> "Prompt | Prompts":
        if isinstance(at, slice):
            return Prompts(self._spool, self.file, self.facts[at])
        return _prompt(self._spool.row(self.facts["row"][at]), self._base)

    def without(self, keys: "pl.Series") -> "Prompts":
        """Those of other keys."""
        import polars as pl

        is_left = ~pl.col("key").is_in(keys.implode())
        return Prompts(self._spool, self.file, self.facts.filter(is_left))


def facts_of(prompts: Sequence[Prompt]) -> "pl.DataFrame":
    """The `key` of each prompt and its length in characters, `chars`, each medium counted as text."""
    import polars as pl

    if isinstance(prompts, Prompts):
        return prompts.facts
    keys = [prompt.key for prompt in prompts]
    chars = [_chars(prompt.messages) for prompt in prompts]
    schema = {"key": pl.String, "chars": pl.Int64}
    return pl.DataFrame({"key": keys, "chars": chars}, schema)


def _chars(messages: Iterable[Message]) -> int:
    """The length of a conversation in characters, each medium counted as text."""
    parts = (part for message in messages for part in message["content"])
    return sum(LENGTHS.get(part["type"]) or len(part["text"]) for part in parts)


def _chars_of(messages: Any) -> Array:
    """`_chars` of an Arrow column of messages."""
    import pyarrow.compute as pc

    contents = messages.flatten().field("content")
    parts = contents.flatten()
    chars = pc.coalesce(pc.utf8_length(parts.field("text")), 0)
    for kind, length in LENGTHS.items():
        chars = pc.if_else(pc.equal(parts.field("type"), kind), length, chars)
    # Sums over lists of lists are differences of running totals at their ends.
    totals = _running_totals(chars)
    for lists in (contents, messages):
        totals = totals[_running_totals(lists.value_lengths())]
    return np.diff(totals)


def _running_totals(numbers: Any) -> Array:
    """The sums of the first 0, 1, 2, ... numbers of an Arrow column."""
    values = numbers.to_numpy(zero_copy_only=False)
    return np.insert(np.cumsum(values, dtype=np.int64), 0, 0)


def load(
    path: Path, model: str = "M", split: str = "all", limit: int | None = None
) -> Prompts:
    """The first `limit` prompts of a split (train, eval or all).

    DataError as from `read`, or if there are none.
    """
    import polars as pl
    import pyarrow as pa
    import pyarrow.compute as pc

    _require_there(path, model)
    facts: list[pl.DataFrame] = []

    def batches() -> Iterator[Any]:
        room = limit
        with reading_parquet(path):
            for batch in file.iter_batches(BATCH, columns=columns):
                batch = batch.select(columns)
                if split != "all":
                    batch = batch.filter(pc.equal(batch["split"], split))
                batch = batch.slice(0, room)
                facts.append(_facts_of_batch(batch))
                yield batch
                if room is not None:
                    room -= len(batch)
                if room == 0:
                    return

    with reading_parquet(path):
        file = _file(path)
    columns = _columns(file)
    batch_schema = pa.schema([file.schema_arrow.field(name) for name in columns])
    try:
        spool = Spool(path.parent, batch_schema, batches())
    except OSError as error:
        where = f"{path.parent} or {tempfile.gettempdir()}"
        raise DataError(
            f"the prompts of {path} cannot be copied to {where}: {error.strerror}"
        ) from None
    all_facts = pl.concat(facts) if facts else facts_of([])
    if not len(all_facts):
        total = file.metadata.num_rows
        raise DataError(
            f"the split '{split}' has none of the {total} prompts: import some with --split {split}"
        )
    return Prompts(spool, path, all_facts.with_row_index("row"))


def _facts_of_batch(batch: Any) -> "pl.DataFrame":
    """The `facts_of` the prompts in an Arrow batch."""
    import polars as pl

    keys = pl.Series(batch["key"], dtype=pl.String)
    return pl.DataFrame({"key": keys, "chars": _chars_of(batch["messages"])})


def write(out: Path, prompts: Iterable[Prompt]) -> None:
    """Replace the file atomically.

    The paths of media below its folder are written relative to it, so that it can be copied with them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    base = f"{address(out.parent)}/"
    table = pa.Table.from_pylist([_row(prompt, base) for prompt in prompts], schema())
    with atomic_write(out) as file:
        pq.write_table(table, file, compression="zstd")


def _row(prompt: Prompt, base: str) -> dict[str, Any]:
    """The row of a prompt, with paths relative to `base` where they are below it."""
    messages = []
    for turn in prompt.messages:
        parts = [dict(part) for part in turn["content"]]
        messages.append({**turn, "content": parts})
    for part in media_parts(messages):
        part["path"] = part["path"].removeprefix(base)
    return {**vars(prompt), "messages": messages}
