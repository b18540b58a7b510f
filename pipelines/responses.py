"""Let the target answer the prompts: sampled, batched, by Ray actors, into Parquet parts.

Only the driver writes, and it alone decides what is missing: whatever is killed whenever, a rerun
answers the missing prompts and every prompt is there once.
"""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines import answers
from vlmdistill.pipelines.answers import Sampling
from vlmdistill.pipelines.filters import Filters, repetition
from vlmdistill.pipelines.pictures import MediaError
from vlmdistill.pipelines.prompts import Prompt
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.pipelines.workers import Crew, session
from vlmdistill.pipelines.workspace import absolute, only_writer
from vlmdistill.stores.errors import DataError, TargetError, one_line
from vlmdistill.stores.schema import content_hash

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

IMAGE_LETTERS, VIDEO_LETTERS = 2000, 20000  # what they count for where prompts are sorted by length
BATCH_TOKENS = 65536  # of the prompts that are answered together, padded
HELD_BYTES = (
    1 << 30
)  # of prompts that are read before they are answered: long videos are not all held at once

Report = Callable[[int, int, str], None]  # done, total, remark


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

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        filters: Filters,
        batch: int,
        how: Options | None = None,
    ) -> None:
        from vlmdistill.pipelines.targets.loading import load

        self.target = load(model, **(how or Options()))
        self.sampling = sampling
        self.filters = filters
        self.batch = batch
        self.limit = min(self.filters.max_length or 2**31, self.target.info.max_position)

    def facts(self) -> dict[str, Any]:
        """What identifies the target, and what it runs in."""
        return {"target": str(self.target.fingerprint), "target_dtype": self.target.dtype_name}

    def work(self, unit: Unit) -> Result:
        """Answer every prompt of a unit, those of similar length together."""
        result, seed = Result(), unit.seed
        encoded: list[tuple[Prompt, Any]] = []
        for prompt in unit.prompts:
            try:
                encoded.append((prompt, self.target.encode(prompt.messages)))
            except MediaError as error:  # what cannot be read now may be whole another time
                result.failed[prompt.key] = one_line(error)
            except DataError as error:
                result.rows.append(self._row(prompt, reason="refused", detail=one_line(error)))
            if sum(one.nbytes for _, one in encoded) > HELD_BYTES:
                seed = self._answer_all(encoded, seed, result)
                encoded = []
        self._answer_all(encoded, seed, result)
        return result

    def _answer_all(self, encoded: Sequence[tuple[Prompt, Any]], seed: int, result: Result) -> int:
        """Answer in batches, each with a seed of its own; the next one is returned."""
        from vlmdistill.pipelines.targets.batching import packed

        for batch in packed(encoded, lambda item: item[1].length, BATCH_TOKENS, self.batch):
            self._answer(batch, seed, result)
            seed += len(batch)
        return seed

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
    how: Options | None = None,
) -> Summary:
    """Have `model`, loaded as `how` says, answer those of `prompts` that `out` holds no answer for.

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
        missing = answers.unanswered(prompts, out)
        settings = {
            "checkpoint": str(checkpoint(model)),  # a wrong name or another model shall not wait for Ray
            "sampling": dataclasses.asdict(sampling),
            "filters": dataclasses.asdict(filters),
        }
        answers.check_settings(out, settings)
        start, tokens, failed = time.monotonic(), 0, dict[str, str]()
        if missing:
            worker = partial(Responder, absolute(model), sampling, filters, batch, how)
            report(len(prompts) - len(missing), len(prompts), "starting")
            weights = weights_of(model, how)
            with session(workers, weights) as size, Crew[Unit, Result](worker, size, weights) as crew:
                facts = crew.facts()
                answers.check_settings(out, {**facts, **settings})
                start, done = time.monotonic(), len(prompts) - len(missing)
                for outcome in crew.run(plan(missing, unit, sampling.seed)):
                    answers.write_part(out, outcome.unit.name, outcome.result.rows)
                    done += len(outcome.unit.prompts)
                    tokens += sum(len(row["ids"]) for row in outcome.result.rows)
                    failed |= outcome.result.failed
                    rate = tokens / (time.monotonic() - start)
                    report(done, len(prompts), f"{rate:.0f} tokens/s")
        seconds = time.monotonic() - start
        answers.write_failed(out, failed)
        if failed and len(failed) == len(prompts):  # else there is something to go on with
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


def weights_of(model: str, how: Options | None = None) -> int:
    """Bytes that a checkpoint's weights take when they are loaded so."""
    from vlmdistill.pipelines.targets.folder import parameters_in, resolve, weight_files

    dtype = (how or Options()).get("dtype", "auto")
    if dtype == "auto":
        return sum(path.stat().st_size for path in weight_files(resolve(model)))
    return parameters_in(resolve(model)) * (4 if dtype == "float32" else 2)


def plan(prompts: Sequence[Prompt], unit: int, seed: int) -> list[Unit]:
    """Units of prompts of similar length, the longest first: the last units to end are short."""

    letters = {"image": IMAGE_LETTERS, "video": VIDEO_LETTERS}

    def length(prompt: Prompt) -> int:
        parts = [part for message in prompt.messages for part in message["content"]]
        return sum(letters.get(part["type"]) or len(part["text"]) for part in parts)

    ordered = sorted(prompts, key=lambda prompt: (-length(prompt), prompt.key))
    return [Unit.of(ordered[at : at + unit], seed) for at in range(0, len(ordered), unit)]


def _summary(
    out: Path, prompts: Sequence[Prompt], new: int, failed: int, tokens: int, seconds: float
) -> Summary:
    import pyarrow.compute as pc

    everything = answers.table(out, ["ids", "keep", "reason"])
    kept = everything.filter(pc.field("keep"))
    return Summary(
        out=out,
        prompts=len(prompts),
        answered=new,
        kept=kept.num_rows,
        dropped=Counter(reason for reason in everything["reason"].to_pylist() if reason),
        failed=failed,
        mean_tokens=pc.mean(pc.list_value_length(kept["ids"])).as_py() or 0.0,
        tokens_per_second=tokens / seconds if tokens else 0.0,
        seconds=seconds,
    )
