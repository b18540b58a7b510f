"""The responses of a target on disk: a folder of Parquet files, and the settings that all of them share.

    settings.json        target, sampling and filters; a run with other settings is refused
    part-<task>.parquet  the responses to the prompts of one task, written atomically
    pack-<hash>.parquet  the rows of many parts
    failed.jsonl         prompts that failed in the last run

Responses that a filter dropped stay here with the reason, so that they are not generated again. A prompt has
one response. If several files have one, because machines without a common lock generated it twice, or because
a run was killed while it packed, the first file by name counts.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, Prompts
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.spool import Spool
from vlmdistill.pipelines.targets.checkpoints.template import Thinking, check_thinking
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.schema import Array, agree, content_hash

if TYPE_CHECKING:
    import polars as pl

SETTINGS = "settings.json"
FAILED = "failed.jsonl"
PART = "part-{}.parquet"
PACK = "pack-{}.parquet"
PACKED = 256  # parts that are packed
BATCH_ROWS = 1 << 12  # in memory
COUNTS = ("prompt_tokens", "visual_tokens")
FINGERPRINTS = ("checkpoint", "target")  # of these settings
DEFAULTS = {"engine": "transformers", "thinking": ""}
"""Values of settings that the file of a folder may lack."""
T = TypeVar("T")


class GoneError(DataError):
    """A file was packed or removed after it was listed."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled. The defaults sample the target's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0
    thinking: Thinking = ""  # whether the target reasons before it answers

    def check(self) -> None:
        """DataError if a value is out of range."""
        if not 0 <= self.temperature < math.inf:
            raise DataError(
                f"--temperature {self.temperature}: give 0 for greedy decoding, or a number above 0"
            )
        if not 0 < self.top_p <= 1:
            raise DataError(f"--top-p {self.top_p}: give a share above 0, at most 1")
        if self.max_new_tokens < 1:
            raise DataError(
                f"--max-new-tokens {self.max_new_tokens}: give a number above 0"
            )
        check_thinking(self.thinking)

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True, kw_only=True)
class ResponseRow:
    """One row: the response to one prompt. The field order is the column order."""

    key: str
    ids: Array | Sequence[int] = ()  # int32, EOS included
    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0  # visual tokens included
    visual_tokens: int = 0
    words: int = 0
    repetition: float = 0.0
    keep: bool
    reason: str = ""  # why it is not kept
    detail: str = ""
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int = 0  # of its batch
    target: str  # fingerprint
    time: int | None = None
    """When its prompt was asked, in seconds since 1970; None: it is no traffic."""


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """DataError that names the first setting in which `out` differs."""
    path = out / SETTINGS
    if not path.is_file():
        return
    stored = DEFAULTS | _flat(json.loads(path.read_text()))
    for name, value in _flat(settings).items():
        if name not in stored:
            continue
        is_hash = name in FINGERPRINTS
        if not (agree(stored[name], value) if is_hash else stored[name] == value):
            expected = _shown(stored[name])
            raise DataError(
                f"{out} was made with {name} {expected}, not {_shown(value)}: use "
                f"{expected}, or another folder (--out; in `vlmdistill run`: --runs)"
            )


def write_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new folder; of an existing one, `check_settings`."""
    check_settings(out, settings)
    if not (out / SETTINGS).is_file():
        with atomic_write(out / SETTINGS) as file:
            file.write_text(json.dumps(settings, indent=2) + "\n")


def read_settings(out: Path) -> tuple[SamplingSettings, Filters]:
    """The settings of the responses in `out`; the defaults if there are none."""
    path = out / SETTINGS
    if not path.is_file():
        return SamplingSettings(), Filters()
    settings = json.loads(path.read_text())
    return SamplingSettings(**settings["sampling"]), Filters(**settings["filters"])


def sampling(
    out: Path, max_new_tokens: int | None = None, seed: int = 0
) -> SamplingSettings:
    """How more responses in `out` are sampled: as those that exist, else with `seed`."""
    settings = read_settings(out)[0]
    if not (out / SETTINGS).is_file():
        settings = dataclasses.replace(settings, seed=seed)
    if max_new_tokens:
        settings = dataclasses.replace(settings, max_new_tokens=max_new_tokens)
    return settings


def _shown(value: Any) -> str:
    return "of the template" if value == "" else str(value)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def schema() -> Any:
    """The Arrow schema of the Parquet files."""
    import pyarrow as pa

    by_type: dict[Any, Any] = {
        str: pa.string(),
        int: pa.int32(),
        float: pa.float64(),
        bool: pa.bool_(),
    }
    by_name = {
        "ids": pa.list_(pa.int32()),
        "repetition": pa.float32(),
        "seed": pa.int64(),
        "time": pa.int64(),
    }
    columns = list[tuple[str, Any]]()
    for column in dataclasses.fields(ResponseRow):
        arrow_type = by_name.get(column.name) or by_type[column.type]
        columns.append((column.name, arrow_type))
    return pa.schema(columns)


def write_part(out: Path, name: str, rows: Sequence[ResponseRow]) -> bool:
    """Write the rows of one task atomically; false, and nothing written, if there are none."""
    import pyarrow as pa

    if not rows:
        return False
    table = pa.Table.from_pylist([vars(row) for row in rows], schema())
    _write(out / PART.format(name), table)
    return True


def _write(path: Path, rows: Any) -> None:
    import pyarrow.parquet as pq

    with atomic_write(path) as file:
        pq.write_table(rows, file, compression="zstd")


def pack(out: Path) -> None:
    """Merge the parts into one file, if they are many. If it is killed, rows may be in both."""
    import pyarrow as pa

    parts = sorted(out.glob(PART.format("*")))
    if len(parts) < PACKED:
        return
    rows = pa.concat_tables([_read(path, schema().names) for path in parts])
    name = content_hash([path.name for path in parts])
    _write(out / PACK.format(name), rows)
    for path in parts:
        path.unlink()


def remove(
    out: Path,
    keys: Collection[str],
    before: float = -math.inf,
    *,
    dry_run: bool = False,
) -> int:
    """Remove the responses to the prompts with these keys, and their failures; the number of responses.

    Removed are also those to traffic that was asked `before` a time, whose prompts may be anywhere.

    Only one run writes to a folder at a time; see `only_writer`.
    """
    count = 0
    for path in files_in(out):
        count += remove_rows(path, keys, before, dry_run=dry_run)
    failed = _failed(out)
    if not dry_run and not failed.keys().isdisjoint(keys):
        for key in failed.keys() & {*keys}:
            del failed[key]
        write_failed(out, failed)
    return count


def remove_rows(
    path: Path, keys: Collection[str], before: float, *, dry_run: bool
) -> int:
    """The same with one file, of responses or prompts, which goes if no row is left."""
    import pyarrow as pa

    remains = [
        key not in keys and (time is None or time >= before)
        for key, time in _keys_and_times(path)
    ]
    removed = remains.count(False)
    if removed and not dry_run:
        if any(remains):
            _write(path, _read(path).filter(pa.array(remains)))
        else:
            path.unlink()
    return removed


def times_in(path: Path) -> list[int]:
    """The times in one file, of responses or prompts, in seconds since 1970.

    DataError if they are no numbers.
    """
    return [time for _, time in _keys_and_times(path) if time is not None]


def _keys_and_times(path: Path) -> list[tuple[str, int | None]]:
    import pyarrow as pa

    table = _read(path, ["key", "time"])
    kind = table["time"].type
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_null)
    if not any(is_number(kind) for is_number in tests):
        raise DataError(
            f"{path}: its times are {kind}, not seconds since 1970: write them so, or remove it"
        )
    return [*zip(table["key"].to_pylist(), table["time"].to_pylist(), strict=True)]


def is_responses(path: Path) -> bool:
    """Whether a Parquet file has responses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(regular(path)).names
    except (OSError, pa.ArrowInvalid):
        return False
    return {*schema().names} - {"time"} <= {*names}


def _damaged(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return GoneError(
            f"{path} is not there any more: another run has packed it, or it was removed"
        )
    cause = str(error).splitlines()[0]
    return DataError(f"{path} is damaged ({cause}): remove it, and run again")


def files_in(out: Path) -> list[Path]:
    """The files of a folder, by name."""
    # The packs are listed after the parts: a part that vanishes in between is in one of them.
    parts = sorted(out.glob(PART.format("*")))
    packs = sorted(out.glob(PACK.format("*")))
    return packs + parts


def _consistent(out: Path, read_all: Callable[[list[Path]], T]) -> T:
    """The result of reading all files; they are read again if some were packed meanwhile."""
    try:
        return read_all(files_in(out))
    except GoneError:
        return read_all(files_in(out))


def _read(path: Path, columns: Sequence[str] | None = None) -> Any:
    """The columns of a file, by default all; DataError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(regular(path)) as file:
            if columns is None:
                return file.read()
            return _with_time(file.read(list(columns)), columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """The columns of a file, some rows at a time: of a pack, the tokens of all rows take much memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(regular(path)) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(columns)):
                yield _with_time(batch, columns).replace_schema_metadata()
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _with_time(rows: Any, columns: Sequence[str]) -> Any:
    """These columns of rows; files of earlier versions lack the time."""
    import pyarrow as pa

    if "time" in columns and "time" not in rows.schema.names:
        rows = rows.append_column("time", pa.nulls(len(rows), pa.int64()))
    return rows.select(list(columns))


def _first(rows: Any, seen: set[str]) -> Any:
    """The rows whose keys are not in `seen`; their keys are added to it."""
    import pyarrow as pa

    is_new = []
    for key in rows["key"].to_pylist():
        is_new.append(key not in seen)
        seen.add(key)
    return rows if all(is_new) else rows.filter(pa.array(is_new))


def table(out: Path, columns: Sequence[str] | None = None) -> Any:
    """All responses as one Arrow table; DataError names a file that cannot be read."""
    import pyarrow as pa

    names = list(columns or schema().names)
    empty = pa.schema([schema().field(name) for name in names]).empty_table()

    def read_all(paths: list[Path]) -> Any:
        return pa.concat_tables([empty, *(_read(path, names) for path in paths)])

    return _consistent(out, read_all)


def facts(out: Path) -> "pl.DataFrame":
    """One row per response: `key`, `keep`, `reason`, and numbers of tokens."""
    names = ("key", "keep", "reason", *COUNTS)

    def read_all(paths: list[Path]) -> "pl.DataFrame":
        files = (_batches(path, (*names, "ids")) for path in paths)
        return _frame(chain.from_iterable(files), names)

    responses = _consistent(out, read_all)
    return responses.unique("key", keep="first", maintain_order=True)


def _frame(batches: Iterable[Any], names: Sequence[str]) -> "pl.DataFrame":
    """These columns of the batches, and the number of `tokens`."""
    import polars as pl

    types: dict[str, Any] = {
        "key": pl.String,
        "keep": pl.Boolean,
        "reason": pl.String,
        **dict.fromkeys(COUNTS, pl.Int32),
    }
    column_types = {name: types[name] for name in names} | {"tokens": pl.Int32}
    frames = [pl.DataFrame(schema=column_types)]
    for batch in batches:
        values = {name: batch[name] for name in names}
        values["tokens"] = batch["ids"].value_lengths()
        columns = [
            pl.Series(name, values[name], dtype=dtype)
            for name, dtype in column_types.items()
        ]
        frames.append(pl.DataFrame(columns))
    return pl.concat(frames)


def counted(reasons: "pl.Series") -> Counter[str]:
    """The number of responses for each reason to drop one."""
    counts = reasons.value_counts()
    return Counter({reason: count for reason, count in counts.iter_rows() if reason})


def keys(out: Path) -> set[str]:
    """The keys of all prompts that have a response, kept or not."""
    return set(table(out, ["key"])["key"].to_pylist())


def without_response(prompts: Sequence[Prompt], out: Path) -> Sequence[Prompt]:
    """The prompts that have no response in `out`."""
    import polars as pl

    if isinstance(prompts, Prompts):
        return prompts.without(pl.Series(table(out, ["key"])["key"], dtype=pl.String))
    answered = keys(out)
    return [prompt for prompt in prompts if prompt.key not in answered]


def read(out: Path, kept: bool = True) -> Iterator[ResponseRow]:
    """The responses in a folder; with `kept`, only those that passed the filters."""
    seen = set[str]()
    for path in files_in(out):
        for rows in _batches(path, schema().names):
            batch = _first(rows, seen)
            batch = batch.filter(batch["keep"]) if kept else batch
            ids = batch.column("ids")
            flat_ids = ids.flatten().to_numpy()
            lengths = ids.value_lengths().to_numpy()
            rest = batch.drop_columns(["ids"]).to_pylist()
            start = 0
            for columns, length in zip(rest, lengths, strict=True):
                yield ResponseRow(ids=flat_ids[start : start + length], **columns)
                start += length


class Responses:
    """The kept responses in a folder. In memory are their `facts` alone: `row`, `key`, numbers of tokens."""

    def __init__(self, out: Path) -> None:
        self.facts, self._spool = _consistent(out, partial(self._read_all, out))

    @staticmethod
    def _read_all(out: Path, paths: Sequence[Path]) -> tuple["pl.DataFrame", Spool]:
        """The facts, in which `row` is the number of a response in the spool, and the spool."""
        import polars as pl

        names = ("key", *COUNTS)
        facts = [_frame([], names)]

        def kept() -> Iterator[Any]:
            """The kept responses on their way to the spool; their facts are noted."""
            seen = set[str]()
            for path in paths:
                for batch in _batches(path, schema().names):
                    rows = _first(batch, seen)
                    rows = rows.filter(rows["keep"])
                    facts.append(_frame([rows], names))
                    yield rows

        spool = Spool(out.parent, schema(), kept())
        return pl.concat(facts).with_row_index("row"), spool

    def row(self, number: int) -> ResponseRow:
        """The response with this number in `facts`."""
        return ResponseRow(**self._spool.row(number))


def _failed(out: Path) -> dict[str, str]:
    """The failed prompts that are listed: key -> error."""
    path = out / FAILED
    if not path.is_file():
        return {}
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["key"]: entry["reason"] for entry in entries}


def write_failed(out: Path, failed: Mapping[str, str]) -> None:
    """List the failed prompts with their errors; remove the list if there are none."""
    path = out / FAILED
    if not failed:
        path.unlink(missing_ok=True)
        return
    lines = [
        json.dumps({"key": key, "reason": error}) + "\n"
        for key, error in failed.items()
    ]
    with atomic_write(path) as file:
        file.write_text("".join(lines))
