"""Stage 2: workers sample responses to the prompts, in batches, into Parquet files.

Only the driver writes, and it decides which responses are missing. So after a kill, a rerun generates the
missing ones, and every prompt has one response. A worker hands over what has ended twice a minute: a kill
loses that, and the responses that are under way.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.cluster.engine_environment import (
    EngineName,
    check_environment,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions, opened, weight_bytes
from vlmdistill.pipelines.cluster.queue import PART_SECONDS, scattered
from vlmdistill.pipelines.cluster.reporting import StageTally
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
from vlmdistill.pipelines.targets.checkpoints.fingerprint import Fingerprint, checkpoint
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.workspace.parts import Publishing
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
HELD_BYTES = 1 << 30
"""Of encoded prompts in memory at once: a task of long videos would not fit."""


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
        own_seed = int(content_hash([seed, name]), 16) % 2**31
        return cls(tuple(prompts), name, own_seed)

    @property
    def keys(self) -> list[str]:
        """The keys of the prompts."""
        return [prompt.key for prompt in self.prompts]

    def only(self, keys: Collection[str]) -> "ResponseTask":
        """The task of these prompts only."""
        chosen = [prompt for prompt in self.prompts if prompt.key in keys]
        return ResponseTask.of(chosen, self.seed)


@dataclass(frozen=True, kw_only=True)
class ResponseSummary:
    """The work of a run, and the contents of the folder after it."""

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
    """The result of a worker for one task."""

    rows: list[ResponseRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key -> error on this machine
    left: Collection[str] = ()  # the keys whose responses are still under way
    shards: list[Commit] = field(default_factory=list)
    """Of the kept responses, where they were captured as well."""


@dataclass
class _TaskUnderWay:
    """A task whose responses a worker generates, part after part."""

    steps: Iterator[None]  # each adds to `part`
    left: set[str]  # keys
    part: ResponseResult  # what has ended since the last part was taken

    def take(self) -> ResponseResult:
        """What has ended since the last call."""
        rows, failed = list(self.part.rows), dict(self.part.failed)
        self.part.rows.clear()
        self.part.failed.clear()
        self.left -= {*failed, *(row.key for row in rows)}
        return ResponseResult(rows, failed, set(self.left))


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
        self._under_way: _TaskUnderWay | None = None
        # An engine gives all responses of a batch at once.
        self._part_seconds = math.inf if self.engine else PART_SECONDS

    def _load(
        self, model: str, how: Options, engine: EngineName
    ) -> "tuple[TargetModel, EngineTarget | None]":
        from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget, loaded

        target = loaded(model, how, engine)
        if engine != "vllm":
            return target, None
        return target, EngineTarget(target, (), ENGINE_TOKENS)

    def facts(self) -> dict[str, Any]:
        """The fingerprint of the target, the dtype in which it runs, and what runs it."""
        return {
            "target": str(self.target.fingerprint),
            "target_dtype": self.target.dtype_name,
            "engine": self.engine.name if self.engine else "transformers",
        }

    def work(self, task: ResponseTask) -> ResponseResult:
        """Generate responses to the prompts of a task for half a minute, or until the first one ends.

        With the prompts that are left, the next call goes on where this one stopped.
        """
        under_way = self._under_way
        if under_way is None or under_way.left != set(task.keys):
            part = ResponseResult()
            under_way = _TaskUnderWay(self._respond(task, part), set(task.keys), part)
        self._under_way = None  # an error ends it
        until = time.monotonic() + self._part_seconds
        for _ in under_way.steps:
            if time.monotonic() >= until:
                break
        done = under_way.take()
        if done.left:
            self._under_way = under_way
        return done

    def _respond(self, task: ResponseTask, result: ResponseResult) -> Iterator[None]:
        """Add a response to every prompt of a task to `result`, in batches of similar length."""
        seed = task.seed
        waiting = list[tuple[Prompt, Any]]()  # encoded prompts
        waiting_bytes = 0
        for prompt in task.prompts:
            encoded = self._encode(prompt, result)
            if encoded is None:
                continue
            waiting.append((prompt, encoded))
            waiting_bytes += encoded.nbytes
            if waiting_bytes > HELD_BYTES:
                seed = yield from self._generate_all(waiting, seed, result)
                waiting = []
                waiting_bytes = 0
        yield from self._generate_all(waiting, seed, result)

    def _encode(self, prompt: Prompt, result: ResponseResult) -> "EncodedPrompt | None":
        """The encoded prompt; None if it gets no response, and then the result says why."""
        try:
            encoded = self.target.encode(prompt.messages)
        except MediaError as error:
            # The file may be readable later, or on another machine.
            result.failed[prompt.key] = one_line(error)
            return None
        except DataError as error:
            row = self._row(prompt, reason="refused", detail=one_line(error))
            result.rows.append(row)
            return None
        if encoded.length >= self.limit:
            row = self._row(prompt, reason="over length", **_tokens(encoded))
            result.rows.append(row)
            return None
        return encoded

    def _generate_all(
        self, encoded: Sequence[tuple[Prompt, Any]], seed: int, result: ResponseResult
    ) -> Generator[None, None, int]:
        """Respond to prompts of similar length together. Each run has its own seed; returns the next seed."""
        from vlmdistill.pipelines.targets.batching import alike

        for batch in alike(
            encoded, lambda item: item[1].length + self.sampling.max_new_tokens
        ):
            pending = {prompt.key: (prompt, encoded) for prompt, encoded in batch}
            while pending:
                unanswered = list(pending.values())
                try:
                    for row in self._generate(unanswered, seed):
                        result.rows.append(row)
                        del pending[row.key]
                        yield
                    break
                except PromptError as error:  # the others are generated without it
                    prompt, _ = unanswered[error.at]
                    del pending[prompt.key]
                    result.failed[prompt.key] = (
                        f"prompt {prompt.key}: {one_line(error)}"
                    )
            seed += len(batch)
        return seed

    def _generate(
        self, batch: Sequence[tuple[Prompt, Any]], seed: int
    ) -> Iterator[ResponseRow]:
        """The rows of some prompts, as their responses end."""
        respond: Callable[..., Iterable[tuple[int, EncodedResponse]]]
        if self.engine:
            respond = self._engine_responses  # it makes its own batches
        else:
            respond = partial(self.target.responses, batch_size=self.batch)
        responses = respond(
            [encoded for _, encoded in batch],
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
        )
        for number, response in responses:
            prompt, encoded = batch[number]
            yield self._response(prompt, encoded, response, seed)

    def _engine_responses(
        self, prompts: Sequence["EncodedPrompt"], **sampling: Any
    ) -> Iterable[tuple[int, "EncodedResponse"]]:
        assert self.engine is not None
        return enumerate(self.engine.generate(prompts, **sampling))

    def _response(
        self,
        prompt: Prompt,
        encoded: "EncodedPrompt",
        response: "EncodedResponse",
        seed: int,
    ) -> ResponseRow:
        """The row of a generated response, kept or dropped."""
        ids = [int(token) for token in response.ids]
        words = len(words_of(response.text))
        repeated = repetition(ids)
        length = encoded.length + len(ids)
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
        columns = {
            **dataclasses.asdict(self.sampling),
            "target": str(self.target.fingerprint),
            "seed": 0,
        }
        del columns["thinking"]  # it is the same for all rows of a folder
        columns |= values
        return ResponseRow(
            key=prompt.key,
            keep=not reason,
            reason=reason,
            time=prompt.time,
            **columns,
        )


def _tokens(encoded: "EncodedPrompt") -> dict[str, int]:
    visual = sum(span.length for span in encoded.spans)
    return {"prompt_tokens": encoded.length, "visual_tokens": visual}


@dataclass(frozen=True)
class ResponseWork:
    """The worker of `respond`, the check of its machine, and a second use of its results."""

    worker: Callable[..., Responder] = Responder
    shared: Callable[..., Shared] = Shared
    """Of the model, its fingerprint and some media: the check that a machine sees the same files."""
    on_result: Callable[[ResponseResult], None] = lambda _: None
    """Is called with each result when its responses are on the disk."""


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
    work: ResponseWork | None = None,
) -> ResponseSummary:
    """Generate the responses to `prompts` that `out` lacks. Stopped at any time, it keeps what is done.

    A worker generates `batch` responses at a time, by default as many as the memory of its GPU holds, on a
    CPU 32. A task has `task_size` prompts, by default a few batches. DataError if `out` has responses of
    another target or with other settings. TargetError if the target cannot be loaded, or if a machine of the
    cluster has another target.
    """
    run = _ResponseRun(
        out=out,
        model=model,
        sampling=sampling or SamplingSettings(),
        filters=filters or Filters(),
        options=options or WorkerOptions(),
        batch=batch,
        task_size=task_size,
        work=work or ResponseWork(),
    )
    run.check()
    with only_writer(out) as publishing:
        require_listed(prompts)
        for file in left_over(out):
            file.unlink()
        fingerprint = checkpoint(model)  # before Ray starts
        dataset.check_settings(out, run.settings(fingerprint))
        dataset.pack(out)
        missing = dataset.without_response(prompts, out)
        tally = StageTally(report, len(prompts) - len(missing), len(prompts))
        if missing:
            tally.starting()
            run.generate(missing, fingerprint, publishing, tally)
        seconds = tally.seconds
        failed = tally.failed
        dataset.write_failed(out, failed)
        if failed and len(failed) == len(prompts):
            key, error = next(iter(failed.items()))
            raise TargetError(f"all {len(failed)} prompts failed; {key}: {error}")
        generated = len(missing) - len(failed)
        return _summary(out, prompts, generated, tally, seconds)


@dataclass(frozen=True, kw_only=True)
class _ResponseRun:
    """The arguments of `respond`, with defaults."""

    out: Path
    model: str
    sampling: SamplingSettings
    filters: Filters
    options: WorkerOptions
    batch: int | None
    task_size: int | None
    work: ResponseWork

    def check(self) -> None:
        """DataError or TargetError about what can be known before Ray starts."""
        self.sampling.check()
        self.filters.check()
        check_environment(self.options.engine)
        if self.batch is not None and self.batch < 1:
            raise DataError(f"--batch-size {self.batch}: give a number above 0")

    def settings(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """The settings that all responses of a folder share."""
        return {
            "checkpoint": str(fingerprint),
            "sampling": dataclasses.asdict(self.sampling),
            "filters": dataclasses.asdict(self.filters),
        }

    def generate(
        self,
        missing: Sequence[Prompt],
        fingerprint: Fingerprint,
        publishing: Publishing,
        tally: StageTally,
    ) -> None:
        """Let workers generate responses; write and count their results."""
        model = absolute_model(self.model)
        options = self.options
        worker = partial(
            self.work.worker,
            model,
            self.sampling,
            self.filters,
            self.batch,
            options.load,
            options.engine,
        )
        check = self.work.shared(model, fingerprint, some_media(missing))
        weights = weight_bytes(self.model, options.load)
        files = 0
        with (
            options.session(),
            opened(worker, check, options, weights=weights) as workers,
        ):
            facts = workers.facts()
            dataset.write_settings(self.out, facts | self.settings(fingerprint))
            tally.started()
            size = self.task_size or _task_size(self.batch, workers.on_gpus)
            for done in workers.run(plan(missing, size, self.sampling.seed)):
                rows = done.result.rows if done.result else []
                files += dataset.write_part(self.out, done.task.name, rows)
                if files % dataset.PACKED == 0:
                    dataset.pack(self.out)
                publishing.save()
                if done.result:
                    self.work.on_result(done.result)
                tokens = sum(len(row.ids) for row in rows)
                tally.add(len(rows), tokens, done.failed)


def _task_size(batch: int | None, on_gpus: bool) -> int:
    """Prompts of a task: enough to refill the slots of ended responses, few enough to lose with a worker."""
    if batch is not None:
        return 2 * batch
    return GPU_TASK if on_gpus else CPU_TASK


def plan(prompts: Sequence[Prompt], size: int, seed: int) -> Iterator[ResponseTask]:
    """Tasks of `size` prompts of similar length.

    They come in `scattered` order, so that an interrupted run has prompts of every length.
    """
    facts = facts_of(prompts).select("key", "chars").with_row_index("at")
    order = facts.sort("chars", "key", descending=[True, False])["at"].to_numpy()
    count = -(-len(order) // size)
    for number in scattered(count):
        start = size * number
        chosen = [prompts[int(row)] for row in order[start : start + size]]
        yield ResponseTask.of(chosen, seed)


def _summary(
    out: Path,
    prompts: Sequence[Prompt],
    generated: int,
    tally: StageTally,
    seconds: float,
) -> ResponseSummary:
    facts = dataset.facts(out)
    kept = facts.filter("keep")
    kept_tokens = float(kept["tokens"].to_numpy().sum())
    mean_tokens = kept_tokens / max(1, len(kept))
    rate = tally.tokens / seconds if tally.tokens else 0.0
    return ResponseSummary(
        out=out,
        prompts=len(prompts),
        generated=generated,
        kept=len(kept),
        dropped=dataset.counted(facts["reason"]),
        failed=tally.failed,
        mean_tokens=mean_tokens,
        tokens_per_second=rate,
        seconds=seconds,
    )
