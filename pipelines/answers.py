"""The answers of a target: a folder of Parquet parts, and the settings that all of them share.

    settings.json        target and sampling; other settings are refused, never mixed in
    part-<unit>.parquet  the answers of one unit of prompts, written whole or not at all
    failed.jsonl         prompts that the last run could not ask

Answers that a filter dropped stay here with their reason, so that they are not generated again.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.filters import Filters
from vlmdistill.pipelines.prompts import Prompt
from vlmdistill.pipelines.workspace import written_aside
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Array

SETTINGS = "settings.json"
FAILED = "failed.jsonl"
PART = "part-{}.parquet"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn. The defaults are the target's own distribution, unlike most checkpoints'."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0

    def check(self) -> None:
        """DataError on a value that makes no sense."""
        if not 0 <= self.temperature < math.inf:
            raise DataError(
                f"--temperature {self.temperature}: give 0 for greedy decoding, or a number above it"
            )
        if not 0 < self.top_p <= 1:
            raise DataError(f"--top-p {self.top_p}: give a share above 0, at most 1")
        if self.max_new_tokens < 1:
            raise DataError(f"--max-new-tokens {self.max_new_tokens}: give a number above 0")

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Answer:
    """One row of the parts: what the target said to one prompt."""

    key: str
    ids: Array  # int32, EOS included
    text: str
    finish: str
    prompt_tokens: int  # of the expanded prompt, visual tokens included
    visual_tokens: int
    words: int
    repetition: float
    keep: bool
    reason: str  # why it is not kept
    detail: str
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int  # of its unit
    target: str  # fingerprint


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of `out`, or DataError naming the first in which it was made otherwise."""
    path = out / SETTINGS
    if path.is_file():
        there = _flat(json.loads(path.read_text()))
        for name, value in _flat(settings).items():
            if name in there and there[name] != value:
                raise DataError(
                    f"{out} was made with {name} {there[name]}, not {value}: keep to that, or answer into "
                    "another folder with --out"
                )
    elif "target" in settings:
        with written_aside(path) as aside:
            aside.write_text(json.dumps(settings, indent=2) + "\n")


def made_with(out: Path) -> tuple[Sampling, Filters]:
    """The settings that the answers of `out` were made with; the defaults when there are none yet."""
    path = out / SETTINGS
    if not path.is_file():
        return Sampling(), Filters()
    settings = json.loads(path.read_text())
    return Sampling(**settings["sampling"]), Filters(**settings["filters"])


def unanswered(prompts: Sequence[Prompt], out: Path) -> list[Prompt]:
    """The prompts that `out` holds no answer for."""
    there = answered(out)
    return [prompt for prompt in prompts if prompt.key not in there]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def schema() -> Any:
    """The Arrow schema of the parts."""
    import pyarrow as pa

    return pa.schema(
        [
            ("key", pa.string()),
            ("ids", pa.list_(pa.int32())),
            ("text", pa.string()),
            ("finish", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("visual_tokens", pa.int32()),
            ("words", pa.int32()),
            ("repetition", pa.float32()),
            ("keep", pa.bool_()),
            ("reason", pa.string()),
            ("detail", pa.string()),
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("max_new_tokens", pa.int32()),
            ("seed", pa.int64()),
            ("target", pa.string()),
        ]
    )


def write_part(out: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the answers of one unit, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rows:
        with written_aside(out / PART.format(name)) as aside:
            pq.write_table(pa.Table.from_pylist(list(rows), schema()), aside, compression="zstd")


def table(out: Path, columns: Sequence[str] | None = None) -> Any:
    """All answers as one Arrow table; DataError names a part that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = list(columns or schema().names)
    tables = []
    for path in sorted(out.glob(PART.format("*"))):
        try:
            tables.append(pq.read_table(path, columns=wanted))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"{path} is damaged: remove it and run again ({str(error).splitlines()[0]})"
            ) from None
    empty = pa.schema([schema().field(name) for name in wanted]).empty_table()
    return pa.concat_tables([empty, *tables])


def answered(out: Path) -> set[str]:
    """The keys of all prompts that have an answer, kept or not."""
    return set(table(out, ["key"])["key"].to_pylist())


def read(out: Path, kept: bool = True) -> Iterator[Answer]:
    """The answers of a folder; with `kept`, only those that passed the filters."""
    import pyarrow.compute as pc

    answers = table(out)
    if kept:
        answers = answers.filter(pc.field("keep"))
    for batch in answers.to_batches(max_chunksize=1024):
        ids = batch.column("ids")
        flat, lengths = ids.flatten().to_numpy(), ids.value_lengths().to_numpy()
        start = 0
        for row, length in zip(batch.drop_columns(["ids"]).to_pylist(), lengths, strict=True):
            yield Answer(ids=flat[start : start + length], **row)
            start += length


def write_failed(out: Path, failed: Mapping[str, str]) -> None:
    """List the prompts that could not be asked, with the reason; remove the list when there are none."""
    path = out / FAILED
    if not failed:
        path.unlink(missing_ok=True)
        return
    with written_aside(path) as aside:
        aside.write_text("".join(json.dumps({"key": k, "reason": why}) + "\n" for k, why in failed.items()))
