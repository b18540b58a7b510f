"""The responses of a target on disk: a folder of Parquet files, and the settings that all of them share.

    settings.json        target, sampling and filters; a run with other settings is refused
    part-<task>.parquet  the responses to the prompts of one task, written atomically
    pack-<hash>.parquet  the rows of many parts
    failed.jsonl         prompts that failed in the last run

Responses that a filter dropped stay here with the reason, so that they are not generated again. A prompt has
one response: of several, which machines without a common lock have made or which a pack and its parts both
hold, the first file by name counts.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, Prompts
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.spool import Spool
from vlmdistill.pipelines.targets.checkpoints.template import Thinking, check_thinking
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.schema import Array, content_hash

if TYPE_CHECKING:
    import polars as pl

SETTINGS = "settings.json"
FAILED = "failed.jsonl"
PART = "part-{}.parquet"
PACK = "pack-{}.parquet"
PACKED = 256  # parts that are packed
AT_ONCE = 1 << 12  # rows in memory
COUNTS = ("prompt_tokens", "visual_tokens")
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


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """DataError that names the first setting in which `out` differs."""
    path = out / SETTINGS
    if not path.is_file():
        return
    there = {
        "engine": "transformers",
        "thinking": "",
        **_flat(json.loads(path.read_text())),
    }
    for name, value in _flat(settings).items():
        if name in there and there[name] != value:
            raise DataError(
                f"{out} was made with {name} {_shown(there[name])}, not {_shown(value)}: use "
                f"{_shown(there[name])}, or another folder (--out; in `vlmdistill run`: --runs)"
            )


def write_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new folder; see `check_settings` for one that has settings."""
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
    known = read_settings(out)[0]
    if not (out / SETTINGS).is_file():
        known = dataclasses.replace(known, seed=seed)
    return dataclasses.replace(
        known, max_new_tokens=max_new_tokens or known.max_new_tokens
    )


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

    types: dict[Any, Any] = {
        str: pa.string(),
        int: pa.int32(),
        float: pa.float64(),
        bool: pa.bool_(),
    }
    special = {
        "ids": pa.list_(pa.int32()),
        "repetition": pa.float32(),
        "seed": pa.int64(),
    }
    columns = dataclasses.fields(ResponseRow)
    return pa.schema(
        [(one.name, special.get(one.name) or types[one.type]) for one in columns]
    )


def write_part(out: Path, name: str, rows: Sequence[ResponseRow]) -> bool:
    """Write the rows of one task atomically; false, and nothing written, if there are none."""
    import pyarrow as pa

    if rows:
        _write(
            out / PART.format(name),
            pa.Table.from_pylist([vars(row) for row in rows], schema()),
        )
    return bool(rows)


def _write(path: Path, rows: Any) -> None:
    import pyarrow.parquet as pq

    with atomic_write(path) as file:
        pq.write_table(rows, file, compression="zstd")


def pack(out: Path) -> None:
    """Make one file of the parts, if they are many. Killed in between, it leaves rows in both."""
    import pyarrow as pa

    parts = sorted(out.glob(PART.format("*")))
    if len(parts) < PACKED:
        return
    rows = pa.concat_tables([_read(path, schema().names) for path in parts])
    _write(out / PACK.format(content_hash([path.name for path in parts])), rows)
    for path in parts:
        path.unlink()


def remove(out: Path, keys: Collection[str], *, dry_run: bool = False) -> int:
    """Remove the responses to some prompts, and that others failed; how many responses there were.

    Only one run writes to a folder at a time; see `only_writer`.
    """
    import pyarrow as pa

    count = 0
    for path in _paths(out):
        rows = _read(path, schema().names)
        mine = [key in keys for key in rows["key"].to_pylist()]
        count += sum(mine)
        if dry_run or not any(mine):
            continue
        if all(mine):
            path.unlink()
        else:
            _write(path, rows.filter(pa.array([not one for one in mine])))
    failed = _failed(out)
    if not dry_run and not failed.keys().isdisjoint(keys):
        write_failed(out, {key: why for key, why in failed.items() if key not in keys})
    return count


def _damaged(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return GoneError(
            f"{path} is not there any more: another run has packed it, or it was removed"
        )
    return DataError(
        f"{path} is damaged ({str(error).splitlines()[0]}): remove it, and run again"
    )


def _paths(out: Path) -> list[Path]:
    """The files by name. Packs are listed last: they hold the parts that vanish meanwhile."""
    parts = sorted(out.glob(PART.format("*")))
    return sorted(out.glob(PACK.format("*"))) + parts


def _whole(out: Path, make: Callable[[list[Path]], T]) -> T:
    """What `make` makes of the files; once more if some were packed meanwhile."""
    try:
        return make(_paths(out))
    except GoneError:
        return make(_paths(out))


def _read(path: Path, columns: Sequence[str]) -> Any:
    """The columns of a file; DataError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(regular(path), columns=list(columns))
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """The columns of a file, some rows at a time: of a pack, the tokens of all rows take much memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(regular(path)) as file:
            for batch in file.iter_batches(AT_ONCE, columns=list(columns)):
                yield batch.select(list(columns)).replace_schema_metadata()
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _first(rows: Any, seen: set[str]) -> Any:
    """The rows whose keys were not seen before, which are added to those."""
    import pyarrow as pa

    new = []
    for key in rows["key"].to_pylist():
        new.append(key not in seen)
        seen.add(key)
    return rows if all(new) else rows.filter(pa.array(new))


def table(out: Path, columns: Sequence[str] | None = None) -> Any:
    """All responses as one Arrow table; DataError names a file that cannot be read."""
    import pyarrow as pa

    wanted = list(columns or schema().names)
    empty = pa.schema([schema().field(name) for name in wanted]).empty_table()
    return _whole(
        out,
        lambda paths: pa.concat_tables(
            [empty, *(_read(path, wanted) for path in paths)]
        ),
    )


def facts(out: Path) -> "pl.DataFrame":
    """Of each response: `key`, `keep`, `reason`, and its numbers of tokens."""
    names = ("key", "keep", "reason", *COUNTS)
    found = _whole(
        out,
        lambda paths: _frame(
            (one for path in paths for one in _batches(path, (*names, "ids"))), names
        ),
    )
    return found.unique("key", keep="first", maintain_order=True)


def _frame(batches: Iterable[Any], names: Sequence[str]) -> "pl.DataFrame":
    """These columns of the batches, and the number of `tokens`."""
    import polars as pl

    def one(rows: Any) -> pl.DataFrame:
        columns = {name: pl.Series(rows[name], dtype=kinds[name]) for name in names}
        return pl.DataFrame(
            {
                **columns,
                "tokens": pl.Series(rows["ids"].value_lengths(), dtype=pl.Int32),
            }
        )

    kinds = {
        "key": pl.String,
        "keep": pl.Boolean,
        "reason": pl.String,
        **dict.fromkeys(COUNTS, pl.Int32),
    }
    empty = pl.DataFrame(
        schema={**{name: kinds[name] for name in names}, "tokens": pl.Int32}
    )
    return pl.concat([empty, *map(one, batches)])


def counted(reasons: "pl.Series") -> Counter[str]:
    """How often each reason to drop a response is there."""
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
    there = keys(out)
    return [prompt for prompt in prompts if prompt.key not in there]


def read(out: Path, kept: bool = True) -> Iterator[ResponseRow]:
    """The responses in a folder; with `kept`, only those that passed the filters."""
    seen = set[str]()
    for path in _paths(out):
        for rows in _batches(path, schema().names):
            batch = _first(rows, seen)
            batch = batch.filter(batch["keep"]) if kept else batch
            ids = batch.column("ids")
            flat, lengths = ids.flatten().to_numpy(), ids.value_lengths().to_numpy()
            start = 0
            for row, length in zip(
                batch.drop_columns(["ids"]).to_pylist(), lengths, strict=True
            ):
                yield ResponseRow(ids=flat[start : start + length], **row)
                start += length


class Responses:
    """The kept responses in a folder. In memory are their `facts` alone: `row`, `key`, numbers of tokens."""

    def __init__(self, out: Path) -> None:
        self.facts, self._spool = _whole(out, partial(self._reading, out))

    @staticmethod
    def _reading(out: Path, paths: Sequence[Path]) -> tuple["pl.DataFrame", Spool]:
        """Facts and rows of one reading: `row` numbers these rows."""
        import polars as pl

        names = ("key", *COUNTS)
        found = [_frame([], names)]  # and of each batch, on its way to the spool

        def kept() -> Iterator[Any]:
            seen = set[str]()
            for path in paths:
                for batch in _batches(path, schema().names):
                    rows = _first(batch, seen)
                    rows = rows.filter(rows["keep"])
                    found.append(_frame([rows], names))
                    yield rows

        spool = Spool(out.parent, schema(), kept())
        return pl.concat(found).with_row_index("row"), spool

    def row(self, at: int) -> ResponseRow:
        """One of them."""
        return ResponseRow(**self._spool.row(at))


def _failed(out: Path) -> dict[str, str]:
    """The failed prompts that are listed, with the reason."""
    lines = (out / FAILED).read_text().splitlines() if (out / FAILED).is_file() else []
    return {one["key"]: one["reason"] for one in map(json.loads, lines)}


def write_failed(out: Path, failed: Mapping[str, str]) -> None:
    """List the failed prompts with the reason; remove the list if there are none."""
    path = out / FAILED
    if not failed:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path) as file:
        file.write_text(
            "".join(
                json.dumps({"key": k, "reason": why}) + "\n"
                for k, why in failed.items()
            )
        )
