"""Let the target answer the prompts: sampled, batched, by Ray actors, into Parquet parts.

    responses/settings.json        target and sampling; another setting is refused, not mixed in
              part-<unit>.parquet  the answers of one unit of prompts, written whole or not at all
              failed.jsonl         prompts that could not be asked; the next run tries them again

Only the driver writes, and it alone decides what is missing: whatever is killed whenever, a rerun
answers the missing prompts and every prompt is there once. Answers that a filter drops stay in the
file with their reason, so that they are not generated again.
"""

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.filters import Filters, repetition
from vlmdistill.pipelines.prompts import Prompt
from vlmdistill.pipelines.workers import Crew, session
from vlmdistill.pipelines.workspace import absolute, only_writer, written_aside
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import Array, content_hash

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
FAILED = "failed.jsonl"
PART = "part-{}.parquet"
IMAGE_LETTERS = 2000  # what an image counts for where prompts are sorted by length

Report = Callable[[int, int, str], None]  # done, total, remark


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn. The defaults are the target's own distribution, unlike most checkpoints'."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0

    def check(self) -> None:
        """DataError on a value that makes no sense."""
        if self.temperature < 0:
            raise DataError(f"--temperature {self.temperature}: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise DataError(f"--top-p {self.top_p}: give a share above 0, at most 1")
        if self.max_new_tokens < 1:
            raise DataError(f"--max-new-tokens {self.max_new_tokens}: give a number above 0")

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Unit:
    """Prompts of similar length that one worker answers; its name and its seed follow from them."""

    prompts: tuple[Prompt, ...]
    name: str
    seed: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt], seed: int) -> "Unit":
        """The unit of these prompts."""
        name = content_hash(sorted(prompt.key for prompt in prompts))
        return cls(tuple(prompts), name, int(content_hash([seed, name]), 16) % 2**31)


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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did, and what the folder holds after it."""

    out: Path
    prompts: int
    answered: int  # by this run
    kept: int
    dropped: Counter[str]
    failed: int
    mean_tokens: float  # of the kept answers
    tokens_per_second: float  # of this run, all workers together
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {**vars(self), "out": str(self.out), "dropped": dict(self.dropped)}


@dataclass
class Result:
    """What a worker returns for one unit."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key -> why it could not be asked


class Responder:
    """The worker: loads the target once and answers unit after unit."""

    def __init__(self, model: str, sampling: Sampling, filters: Filters, batch: int) -> None:
        from vlmdistill.pipelines.targets.loading import load

        self.target = load(model)
        self.sampling = sampling
        self.filters = filters
        self.batch = batch
        self.limit = min(self.filters.max_length or 2**31, self.target.info.max_position)

    def facts(self) -> dict[str, Any]:
        """What identifies the target."""
        return {"target": str(self.target.fingerprint)}

    def work(self, unit: Unit) -> Result:
        """Answer every prompt of a unit, the shortest first."""
        result = Result()
        encoded: list[tuple[Prompt, Any]] = []
        for prompt in unit.prompts:
            try:
                encoded.append((prompt, self.target.encode(prompt.messages)))
            except DataError as error:
                why = " ".join(str(error).split())
                if all(Path(path).is_file() for path in prompt.files):
                    result.rows.append(self._row(prompt, reason="refused", detail=why))
                else:  # what is missing now may be there again
                    result.failed[prompt.key] = why
        encoded.sort(key=lambda item: item[1].length)
        for start in range(0, len(encoded), self.batch):
            self._answer(encoded[start : start + self.batch], unit.seed + start, result)
        return result

    def _answer(self, batch: Sequence[tuple[Prompt, Any]], seed: int, result: Result) -> None:
        responses = self.target.generate(
            [encoded for _, encoded in batch],
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
        )
        for (prompt, encoded), response in zip(batch, responses, strict=True):
            ids = [int(i) for i in response.ids]
            result.rows.append(
                self._row(
                    prompt,
                    ids=ids,
                    text=response.text,
                    finish=response.finish,
                    prompt_tokens=encoded.length,
                    visual_tokens=sum(span.length for span in encoded.spans),
                    words=len(response.text.split()),
                    repetition=repetition(ids),
                    reason=self.filters.verdict(response.text, ids, encoded.length, self.limit),
                    seed=seed,
                )
            )

    def _row(self, prompt: Prompt, **values: Any) -> dict[str, Any]:
        """A row of the parts; what is not given is nought."""
        settings = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        return {
            "key": prompt.key,
            **dict.fromkeys(("text", "finish", "reason", "detail"), ""),
            **dict.fromkeys(("prompt_tokens", "visual_tokens", "words", "repetition", "seed"), 0),
            "ids": [],
            **settings,
            "max_new_tokens": self.sampling.max_new_tokens,
            "target": str(self.target.fingerprint),
            **values,
            "keep": not values["reason"],
        }


def respond(
    prompts: Sequence[Prompt],
    out: Path,
    model: str,
    sampling: Sampling | None = None,
    filters: Filters | None = None,
    *,
    workers: int | None = None,
    batch: int = 16,
    unit: int = 64,
    report: Report = lambda done, total, remark: None,
) -> Summary:
    """Have `model` answer those of `prompts` that `out` holds no answer for.

    DataError when `out` was made by another target or with other settings. TargetError when the
    target cannot be loaded. Interrupted, it leaves what is done.
    """
    sampling, filters = sampling or Sampling(), filters or Filters()
    sampling.check()
    filters.check()
    if batch < 1 or unit < 1:
        raise DataError("--batch-size and the size of a unit must be above 0")
    with only_writer(out):
        for left in out.glob(".*.tmp"):  # by a killed run
            left.unlink()
        missing = unanswered(prompts, out)
        settings = {
            "checkpoint": str(checkpoint(model)),  # a wrong name or another model shall not wait for Ray
            "sampling": dataclasses.asdict(sampling),
            "filters": dataclasses.asdict(filters),
        }
        check_settings(out, settings)
        start, tokens, failed = time.monotonic(), 0, dict[str, str]()
        if missing:
            worker = partial(Responder, absolute(model), sampling, filters, batch)
            report(len(prompts) - len(missing), len(prompts), "starting")
            with session(workers) as size, Crew[Unit, Result](worker, size) as crew:
                facts = crew.facts()
                check_settings(out, {**facts, **settings})
                start, done = time.monotonic(), len(prompts) - len(missing)
                for outcome in crew.run(plan(missing, unit, sampling.seed)):
                    write_part(out, outcome.unit.name, outcome.result.rows)
                    done += len(outcome.unit.prompts)
                    tokens += sum(len(row["ids"]) for row in outcome.result.rows)
                    failed |= outcome.result.failed
                    rate = tokens / (time.monotonic() - start)
                    report(done, len(prompts), f"{rate:.0f} tokens/s")
        seconds = time.monotonic() - start
        _write_failed(out, failed)
        if failed and len(failed) == len(missing):
            key, why = next(iter(failed.items()))
            raise TargetError(f"none of the {len(failed)} prompts could be asked; {key}: {why}")
        return _summary(out, prompts, len(missing) - len(failed), len(failed), tokens, seconds)


def checkpoint(model: str) -> "Fingerprint":
    """Hashes over a checkpoint's files, without loading it; TargetError when it cannot be found.

    Its template is that of the files, not the one in use: compare with the like only.
    """
    from vlmdistill.pipelines.targets.fingerprint import fingerprint
    from vlmdistill.pipelines.targets.folder import resolve

    folder = resolve(model)
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return fingerprint(folder, [(folder / name).read_text() for name in names if (folder / name).is_file()])


def plan(prompts: Sequence[Prompt], unit: int, seed: int) -> list[Unit]:
    """Units of prompts of similar length, the longest first: the last units to end are short."""

    def length(prompt: Prompt) -> int:
        parts = [part for message in prompt.messages for part in message["content"]]
        return sum(len(part["text"]) if part["type"] == "text" else IMAGE_LETTERS for part in parts)

    ordered = sorted(prompts, key=lambda prompt: (-length(prompt), prompt.key))
    return [Unit.of(ordered[at : at + unit], seed) for at in range(0, len(ordered), unit)]


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


def _write_failed(out: Path, failed: Mapping[str, str]) -> None:
    path = out / FAILED
    if not failed:
        path.unlink(missing_ok=True)
        return
    with written_aside(path) as aside:
        aside.write_text("".join(json.dumps({"key": k, "reason": why}) + "\n" for k, why in failed.items()))


def _summary(
    out: Path, prompts: Sequence[Prompt], new: int, failed: int, tokens: int, seconds: float
) -> Summary:
    import pyarrow.compute as pc

    answers = table(out, ["ids", "keep", "reason"])
    kept = answers.filter(pc.field("keep"))
    return Summary(
        out=out,
        prompts=len(prompts),
        answered=new,
        kept=kept.num_rows,
        dropped=Counter(reason for reason in answers["reason"].to_pylist() if reason),
        failed=failed,
        mean_tokens=pc.mean(pc.list_value_length(kept["ids"])).as_py() or 0.0,
        tokens_per_second=tokens / seconds if tokens else 0.0,
        seconds=seconds,
    )
