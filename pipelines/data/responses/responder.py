"""Stage 2: workers sample responses to the prompts, in batches, into Parquet files.

Only the driver writes, and it decides which responses are missing. So after a kill, a rerun generates the
missing ones, and every prompt has one response.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.cluster.engine_environment import (
    EngineName,
    check_environment,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions, opened, weight_bytes
from vlmdistill.pipelines.cluster.queue import scattered
from vlmdistill.pipelines.cluster.shared import Shared, some_media
from vlmdistill.pipelines.data.prompts.prompt_table import (
    Prompt,
    facts_of,
    require_listed,
)
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import ResponseRow, SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters, repetition
from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.workspace.workspace import absolute_model, only_writer
from vlmdistill.stores.backends.local import left_over
from vlmdistill.stores.errors import DataError, PromptError, TargetError, one_line
from vlmdistill.stores.manifest import Commit
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.views.text_stats import words_of

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.encode import EncodedPrompt, EncodedResponse
    from vlmdistill.pipelines.targets.target_model import TargetModel
    from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget

GPU_TASK, CPU_TASK = 1024, 64
"""Prompts of one task: a minute or two of work with a 7B target on a GPU."""
ENGINE_TOKENS = 8192  # in one forward pass of an engine
HELD_BYTES = (
    1 << 30
)  # of encoded prompts in memory at once: a task of long videos would not fit


@dataclass(frozen=True)
class ResponseTask:
    """Prompts of similar length for one worker. The name and the seed follow from the prompts."""

    prompts: tuple[Prompt, ...]
    name: str
    seed: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt], seed: int) -> "ResponseTask":
        """The task of these prompts."""
        name = content_hash(sorted(prompt.key for prompt in prompts))
        return cls(tuple(prompts), name, int(content_hash([seed, name]), 16) % 2**31)

    @property
    def keys(self) -> list[str]:
        """The keys of the prompts."""
        return [prompt.key for prompt in self.prompts]

    def only(self, keys: Collection[str]) -> "ResponseTask":
        """The task of these prompts only."""
        return ResponseTask.of(
            [prompt for prompt in self.prompts if prompt.key in keys], self.seed
        )


@dataclass(frozen=True, kw_only=True)
class ResponseSummary:
    """What a run did, and what the folder holds after it."""

    out: Path
    prompts: int
    generated: int  # by this run
    kept: int
    dropped: Counter[str]  # by the filters: reason -> count
    failed: dict[str, str]  # key -> error, in this run
    mean_tokens: float  # of the kept responses
    tokens_per_second: float  # of this run, all workers together
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "out": str(self.out), "failed": len(self.failed)}


@dataclass
class ResponseResult:
    """What a worker returns for one task."""

    rows: list[ResponseRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key -> error on this machine
    shards: list[Commit] = field(
        default_factory=list
    )  # of the kept ones, where they were captured as well


class Responder:
    """The worker: loads the target once and generates responses, task after task."""

    def __init__(
        self,
        model: str,
        sampling: SamplingSettings,
        filters: Filters,
        batch: int | None,
        load_options: Options | None = None,
        engine: EngineName = "transformers",
    ) -> None:
        how: Options = {**(load_options or Options()), "thinking": sampling.thinking}
        self.target, self.engine = self._load(model, how, engine)
        self.sampling = sampling
        self.filters = filters
        self.batch = batch
        self.limit = min(
            self.filters.max_length or 2**31, self.target.info.max_position
        )

    def _load(
        self, model: str, how: Options, engine: EngineName
    ) -> "tuple[TargetModel, EngineTarget | None]":
        from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget, loaded

        target = loaded(model, how, engine)
        return target, EngineTarget(
            target, (), ENGINE_TOKENS
        ) if engine == "vllm" else None

    def facts(self) -> dict[str, Any]:
        """The fingerprint of the target, the dtype in which it runs, and what runs it."""
        return {
            "target": str(self.target.fingerprint),
            "target_dtype": self.target.dtype_name,
            "engine": self.engine.name if self.engine else "transformers",
        }

    def work(self, task: ResponseTask) -> ResponseResult:
        """Generate a response to every prompt of a task, in batches of similar length."""
        result, seed = ResponseResult(), task.seed
        encoded: list[tuple[Prompt, Any]] = []
        for prompt in task.prompts:
            try:
                one = self.target.encode(prompt.messages)
                if one.length >= self.limit:
                    result.rows.append(
                        self._row(prompt, reason="over length", **_tokens(one))
                    )
                else:
                    encoded.append((prompt, one))
            except (
                MediaError
            ) as error:  # the file may be readable later, or on another machine
                result.failed[prompt.key] = one_line(error)
            except DataError as error:
                result.rows.append(
                    self._row(prompt, reason="refused", detail=one_line(error))
                )
            if sum(one.nbytes for _, one in encoded) > HELD_BYTES:
                seed = self._generate_all(encoded, seed, result)
                encoded = []
        self._generate_all(encoded, seed, result)
        return result

    def _generate_all(
        self, encoded: Sequence[tuple[Prompt, Any]], seed: int, result: ResponseResult
    ) -> int:
        """Generate prompts of similar length together, each such run with its own seed; returns the next."""
        from vlmdistill.pipelines.targets.batching import alike

        for batch in alike(
            encoded, lambda item: item[1].length + self.sampling.max_new_tokens
        ):
            left = list(batch)
            while left:
                try:
                    self._generate(left, seed, result)
                    break
                except PromptError as error:  # without it, the others are generated
                    key = left.pop(error.at)[0].key
                    result.failed[key] = f"prompt {key}: {one_line(error)}"
            seed += len(batch)
        return seed

    def _generate(
        self, batch: Sequence[tuple[Prompt, Any]], seed: int, result: ResponseResult
    ) -> None:
        prompts = [encoded for _, encoded in batch]
        generate: Callable[..., list[EncodedResponse]] = (
            self.engine.generate  # it makes its own batches
            if self.engine
            else partial(self.target.generate, batch_size=self.batch)
        )
        responses = generate(
            prompts,
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
        )
        for (prompt, encoded), response in zip(batch, responses, strict=True):
            result.rows.append(self._response(prompt, encoded, response, seed))

    def _response(
        self,
        prompt: Prompt,
        encoded: "EncodedPrompt",
        response: "EncodedResponse",
        seed: int,
    ) -> ResponseRow:
        ids = [int(i) for i in response.ids]
        words, repeated, length = (
            len(words_of(response.text)),
            repetition(ids),
            encoded.length + len(ids),
        )
        return self._row(
            prompt,
            ids=ids,
            text=response.text,
            finish=response.finish,
            **_tokens(encoded),
            words=words,
            repetition=repeated,
            reason=self.filters.reason(words, repeated, length, self.limit),
            seed=seed,
        )

    def _row(self, prompt: Prompt, *, reason: str, **values: Any) -> ResponseRow:
        settings = {
            **dataclasses.asdict(self.sampling),
            "target": str(self.target.fingerprint),
            "seed": 0,
        }
        del settings["thinking"]  # of all rows of a folder
        return ResponseRow(
            key=prompt.key, keep=not reason, reason=reason, **{**settings, **values}
        )


def _tokens(encoded: "EncodedPrompt") -> dict[str, int]:
    visual = sum(span.length for span in encoded.spans)
    return {"prompt_tokens": encoded.length, "visual_tokens": visual}


def respond(
    prompts: Sequence[Prompt],
    out: Path,
    model: str,
    sampling: SamplingSettings | None = None,
    filters: Filters | None = None,
    options: WorkerOptions | None = None,
    *,
    batch: int | None = None,
    task_size: int | None = None,
    report: Progress = silent,
    worker: Callable[..., Responder] = Responder,
    shared: Callable[..., Shared] = Shared,
    on_result: Callable[[ResponseResult], None] = lambda _: None,
) -> ResponseSummary:
    """Generate the responses to `prompts` that `out` lacks. Stopped at any time, it keeps what is done.

    A worker generates `batch` responses at a time, by default as many as its GPU's memory holds, without one
    32. A task has `task_size` prompts, by default a few batches. `on_result` is called with each
    result when its responses are on the disk. DataError if `out` was made
    by another target or with other settings. TargetError if the target cannot be loaded, or if a machine of
    the cluster has another one.
    """
    sampling, filters = sampling or SamplingSettings(), filters or Filters()
    options = options or WorkerOptions()
    sampling.check()
    filters.check()
    check_environment(options.engine)  # before Ray starts
    if batch is not None and batch < 1:
        raise DataError(f"--batch-size {batch}: give a number above 0")
    with only_writer(out) as part:
        require_listed(prompts)
        for left in left_over(out):
            left.unlink()
        fingerprint = checkpoint(model)  # before Ray starts
        settings = {
            "checkpoint": str(fingerprint),
            "sampling": dataclasses.asdict(sampling),
            "filters": dataclasses.asdict(filters),
        }
        dataset.check_settings(out, settings)
        dataset.pack(out)
        missing = dataset.without_response(prompts, out)
        start, done, tokens, failed = (
            time.monotonic(),
            len(prompts) - len(missing),
            0,
            dict[str, str](),
        )
        written = 0
        if missing:
            report(done, len(prompts), "starting")
            make = partial(
                worker,
                absolute_model(model),
                sampling,
                filters,
                batch,
                options.load,
                options.engine,
            )
            check = shared(absolute_model(model), fingerprint, some_media(missing))
            weights = weight_bytes(model, options.load)
            with (
                options.session(),
                opened(make, check, options, weights=weights) as workers,
            ):
                dataset.write_settings(out, {**workers.facts(), **settings})
                start = time.monotonic()
                size = task_size or _task_size(batch, workers.on_gpus)
                for ended in workers.run(plan(missing, size, sampling.seed)):
                    rows = ended.result.rows if ended.result else []
                    written += dataset.write_part(out, ended.task.name, rows)
                    if written % dataset.PACKED == 0:
                        dataset.pack(out)
                    part.save()
                    if ended.result:
                        on_result(ended.result)
                    done += len(rows) + len(ended.failed)
                    tokens += sum(len(row.ids) for row in rows)
                    failed |= ended.failed
                    report(
                        done,
                        len(prompts),
                        f"{tokens / (time.monotonic() - start):.0f} tokens/s",
                    )
        seconds = time.monotonic() - start
        dataset.write_failed(out, failed)
        if failed and len(failed) == len(prompts):
            key, why = next(iter(failed.items()))
            raise TargetError(f"all {len(failed)} prompts failed; {key}: {why}")
        return _summary(
            out, prompts, len(missing) - len(failed), failed, tokens, seconds
        )


def _task_size(batch: int | None, on_gpus: bool) -> int:
    """Prompts of a task: enough to refill the slots of ended responses, few enough to lose with a worker."""
    if batch is not None:
        return 2 * batch
    return GPU_TASK if on_gpus else CPU_TASK


def plan(prompts: Sequence[Prompt], size: int, seed: int) -> Iterator[ResponseTask]:
    """Tasks of `size` prompts of similar length, `scattered`: a run that is stopped has all lengths."""
    facts = facts_of(prompts).select("key", "chars").with_row_index("at")
    order = facts.sort("chars", "key", descending=[True, False])["at"].to_numpy()
    for start in (size * number for number in scattered(-(-len(order) // size))):
        yield ResponseTask.of(
            [prompts[int(at)] for at in order[start : start + size]], seed
        )


def _summary(
    out: Path,
    prompts: Sequence[Prompt],
    new: int,
    failed: dict[str, str],
    tokens: int,
    seconds: float,
) -> ResponseSummary:
    facts = dataset.facts(out)
    kept = facts.filter("keep")
    return ResponseSummary(
        out=out,
        prompts=len(prompts),
        generated=new,
        kept=len(kept),
        dropped=dataset.counted(facts["reason"]),
        failed=failed,
        mean_tokens=float(kept["tokens"].to_numpy().sum()) / max(1, len(kept)),
        tokens_per_second=tokens / seconds if tokens else 0.0,
        seconds=seconds,
    )
