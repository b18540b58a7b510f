"""Stage 3: workers run the target over prompts and responses and write its hidden states into the store.

The target runs teacher-forced, in batches of similar length, once for all features that the chosen drafters
need. The worker that computes a shard writes it and returns counts; a rerun captures only what is missing. A
shard has half a minute of work at most, which a kill loses.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import polars as pl

from vlmdistill.pipelines.cluster.engine_environment import (
    EngineName,
    check_environment,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions, opened, weight_bytes
from vlmdistill.pipelines.cluster.queue import PART_SECONDS
from vlmdistill.pipelines.cluster.reporting import StageTally
from vlmdistill.pipelines.cluster.session import MIB
from vlmdistill.pipelines.cluster.shared import LOOKED_AT, Shared, some_media
from vlmdistill.pipelines.data.features.capture_store import (
    CaptureStore,
    check_captured,
)
from vlmdistill.pipelines.data.features.shard_plan import (
    CaptureFacts,
    CaptureItem,
    CaptureTask,
    has_key,
    missing_of,
    tasks,
)
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, facts_of
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import LENIENT
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import DEFAULT, Thinking
from vlmdistill.pipelines.workspace.workspace import Workspace, absolute_model
from vlmdistill.stores.errors import (
    DataError,
    PromptError,
    StoreError,
    TargetError,
    one_line,
)
from vlmdistill.stores.loader.tensors import as_numpy
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import FrozenTables, Sample
from vlmdistill.stores.store import Store
from vlmdistill.stores.writer import Writer


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Which features are captured, and how they are stored."""

    drafters: Sequence[str] | None = None
    """The drafters whose needs are captured; None: all."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of a new store; None: bfloat16."""
    encoding: Mapping[str, str] = field(default_factory=dict)
    """Feature -> raw (default) or int8."""
    batch_tokens: int = 8192  # of one forward pass, padding included
    shard_bytes: int = 512 * MIB


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """The responses to some prompts and their features: where they are, and how missing ones are made."""

    workspace: Workspace  # of the target
    prompts: Sequence[Prompt]
    responses: Path
    store: CaptureStore
    settings: CaptureSettings = field(default_factory=CaptureSettings)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    sampling: SamplingSettings | None = None
    """Of missing responses; None: none is generated."""
    batch: int | None = None  # prompts of one batch of responses

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        *,
        prompts: Path | None = None,
        split: Literal["train", "eval", "all"] = "train",
        limit: int | None = None,
        responses: Path | None = None,
        store: str | Path | None = None,
        settings: CaptureSettings | None = None,
        workers: WorkerOptions | None = None,
        sampling: SamplingSettings | None = None,
        batch: int | None = None,
    ) -> "CaptureJob":
        """The job for the first `limit` prompts of a split.

        The file of `prompts`, the folder of `responses` and the `store` are the workspace's by default.
        DataError if there are no prompts.
        """
        file = prompts or workspace.prompts
        return cls(
            workspace=workspace,
            prompts=prompt_table.load(file, workspace.model, split, limit),
            responses=responses or workspace.responses,
            store=CaptureStore(store or workspace.features),
            settings=settings or CaptureSettings(),
            workers=workers or WorkerOptions(),
            sampling=sampling,
            batch=batch,
        )

    def missing(self) -> Sequence[Prompt]:
        """The prompts whose responses are to be generated."""
        if self.sampling is None:
            return ()
        return dataset.without_response(self.prompts, self.responses)

    def captures_while_generating(self, missing_keys: Collection[str]) -> bool:
        """Whether the engine captures the features of these responses while it generates them.

        vLLM keeps the states of what it generates, but one pass adds no prompt that the store has already.
        """
        is_vllm = self.workers.engine != "transformers"
        return (
            is_vllm
            and bool(missing_keys)
            and self.store.keys().isdisjoint(missing_keys)
        )

    def generated(self) -> pl.DataFrame:
        """The facts of the responses that exist; see `dataset.facts`."""
        facts = dataset.facts(self.responses)
        return facts.filter(
            pl.col("key").is_in(facts_of(self.prompts)["key"].implode())
        )

    def waiting(
        self, generated: pl.DataFrame
    ) -> list[tuple[CaptureStore, pl.DataFrame]]:
        """The store and its annexes, each with the kept responses among `generated` that it lacks."""
        kept = generated.filter("keep")
        stores = (self.store, *self.store.annexes(self.settings.drafters))
        return [(store, kept.filter(~has_key(kept, store.keys()))) for store in stores]


@dataclass
class CaptureResult:
    """The result of a worker for one task: counts, never tensors."""

    samples: int = 0
    tokens: int = 0  # text and visual
    failed: dict[str, str] = field(default_factory=dict)  # key -> error on this machine
    left: Collection[str] = ()  # the keys of samples for further shards


@dataclass(frozen=True, kw_only=True)
class CaptureSummary:
    """The work of a run, and the contents of the store after it."""

    store: str
    features: tuple[str, ...]
    samples: int  # in the store
    captured: int  # by this run
    no_response: int  # prompts that have none
    dropped: Counter[str]  # responses that the filters dropped: reason -> count
    failed: dict[str, str]  # key -> error, in this run
    samples_per_second: float
    tokens_per_second: float
    seconds: float

    def with_one_pass(
        self, seconds: float, tokens: int, stored: int
    ) -> "CaptureSummary":
        """The summary of this run and of the generation before it, which captured `tokens` in `seconds`.

        `stored` samples were in the store before that.
        """
        total_seconds = seconds + self.seconds
        total_tokens = tokens + self.tokens_per_second * self.seconds
        captured = self.samples - stored
        return dataclasses.replace(
            self,
            captured=captured,
            samples_per_second=captured / total_seconds,
            tokens_per_second=total_tokens / total_seconds,
            seconds=total_seconds,
        )


class Capturer:
    """The worker: loads the target once and captures task after task, each into one shard or a few."""

    def __init__(
        self,
        model: str,
        store: CaptureStore,
        sampling: str,
        settings: CaptureSettings,
        load_options: Options | None = None,
        engine: EngineName = "transformers",
    ) -> None:
        from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget, loaded

        self.target = loaded(model, load_options or Options(), engine)
        base = store.base
        store.check_target_dtype(self.target.dtype_name)
        store.check_engine(engine)
        self.features = store.select(settings.drafters, self.target.info)
        # This sets up the tokenizer, which threads must not.
        self.target.encode([{"role": "user", "content": ""}])
        self.settings = settings
        self._tokens_per_second = 0.0  # of the last shard
        stored_dtype = base.provenance.dtype if base else "bfloat16"
        self.dtype = settings.dtype or stored_dtype
        provenance = self.target.provenance(self.features, self.dtype, sampling)
        self.engine = None
        if engine == "vllm":
            self.engine = EngineTarget(
                self.target, self.features, settings.batch_tokens
            )
            provenance = msgspec.structs.replace(provenance, engine=self.engine.name)
        self.store = store.create(
            provenance,
            self.target.info,
            stored_head(self.target),
            self._encoding(checked=base is None),
        )
        # The store whose samples get further features.
        self.completes = base if store.annex else None

    def _encoding(self, *, checked: bool) -> dict[str, str]:
        """The encoding of captured features that are not stored raw.

        If `checked`, StoreError if the settings name a feature that is not captured.
        """
        captured = {feature.name for feature in self.features}
        encoding = dict[str, str]()
        for name, how in self.settings.encoding.items():
            if checked:
                check_captured(name, how, captured)
            if name in captured and how != "raw":
                encoding[name] = how
        return encoding

    def facts(self) -> CaptureFacts:
        """Facts by which the driver plans shards."""
        float_bytes = 4 if self.dtype == "float32" else 2
        row_bytes = {"text": 0, "visual": 0, "span": 0}
        for feature in self.features:
            is_int8 = self.store.layout.encoding.get(feature.name) == "int8"
            number_bytes = 1 if is_int8 else float_bytes
            row_bytes[feature.where] += number_bytes * self.target.info.hidden_size
        return CaptureFacts(
            target=str(self.target.fingerprint),
            features=tuple(sorted(feature.name for feature in self.features)),
            text_bytes=row_bytes["text"],
            visual_bytes=row_bytes["visual"],
        )

    def work(self, task: CaptureTask) -> CaptureResult:
        """Capture the part of a task that takes half a minute, and commit it as one shard.

        Samples whose prompt has changed are left out.
        """
        whole = set(task.keys)
        task = self._part(task)
        rest_keys = whole.difference(task.keys)
        failed = dict[str, str]()
        while task.items:
            try:
                began = time.monotonic()
                captured = self._capture(task)
                self._tokens_per_second = captured.tokens / (time.monotonic() - began)
                return dataclasses.replace(captured, failed=failed, left=rest_keys)
            except PromptError as error:
                # It is one of the longest, which run first: little is run again.
                key = task.keys[error.at]
                failed[key] = f"sample {key}: {one_line(error)}"
            except DataError:
                problems = self._problems(task)
                if not problems:
                    raise
                failed |= problems
            task = task.only([key for key in task.keys if key not in failed])
        return CaptureResult(failed=failed, left=rest_keys)

    def _part(self, task: CaptureTask) -> CaptureTask:
        """The first samples of a task: half a minute at the speed of the last shard.

        Before there is one, a GPU takes the whole task, and a CPU what fits into one pass.
        """
        budget = self._tokens_per_second * PART_SECONDS
        if not budget:
            if self.target.device.type != "cpu":
                return task
            budget = self.settings.batch_tokens
        ends = accumulate(item.tokens for item in task.items)
        count = sum(end <= budget for end in ends)
        return CaptureTask.of(task.items[: max(1, count)])

    def _capture(self, task: CaptureTask) -> CaptureResult:
        """Batch by batch: while one runs, threads encode the next, and another writes the one before.

        In memory are the media of two batches at most, and the samples of two: a shard would not fit.
        """
        import torch

        from vlmdistill.pipelines.media.images import large_images
        from vlmdistill.pipelines.targets.batching import one_ahead, packed

        batches = packed(
            task.items, lambda item: item.tokens, self.settings.batch_tokens
        )
        cores = torch.get_num_threads()
        encoded = one_ahead(batches, self._encode, cores)
        with (
            large_images(),
            self.store.writer(task.name) as writer,
            ThreadPoolExecutor(1, "vlmdistill-store") as thread,
            closing(encoded),
        ):
            written: Future[list[Sample]] | None = None
            for batch, prompts in encoded:
                with _numbered_in(task, batch):
                    captured = self._run(batch, prompts)
                if written:
                    written.result()
                # The samplings alone: with the prompts, their pixels would be kept.
                samplings = [prompt.samplings for prompt in prompts]
                written = thread.submit(self._write, writer, batch, samplings, captured)
            assert written is not None  # a task has samples
            samples = written.result()
            if self.engine:
                # Before the shard is committed: one sample of the last batch.
                responses = [item.response_ids for item in batch]
                with _numbered_in(task, batch):
                    self.engine.check(prompts, responses, samples, self.dtype)
        return CaptureResult(len(task.items), sum(item.tokens for item in task.items))

    def _run(
        self, batch: Sequence[CaptureItem], prompts: Sequence[Any]
    ) -> Callable[[], list[Sample]]:
        """Run a batch through the target; the call waits for its samples."""
        responses = [item.response_ids for item in batch]
        keys = [item.prompt.key for item in batch]
        if self.engine:
            captured = self.engine.capture(prompts, responses, self.dtype, keys)
            return lambda: captured
        pending = self.target.begin_capture(
            prompts, responses, self.features, self.dtype, keys
        )
        return lambda: [sample for states in pending for sample in states.samples()]

    def _write(
        self,
        writer: Writer,
        batch: Sequence[CaptureItem],
        samplings: Sequence[Sequence[Any]],
        captured: Callable[[], list[Sample]],
    ) -> list[Sample]:
        """Wait for the samples of a batch and write them; the samples."""
        samples = captured()
        for item, sampled, sample in zip(batch, samplings, samples, strict=True):
            meta = {**item.meta, **media_columns(item.prompt, sampled)}
            writer.add(dataclasses.replace(sample, meta=meta))
        return samples

    def _encode(self, item: CaptureItem) -> Any:
        """The prompt as the target read it for the response; DataError if it has changed since."""
        prompt = self.target.encode(item.prompt.messages)
        if prompt.length != item.response.prompt_tokens:
            raise DataError(
                f"the prompt has {prompt.length} tokens, but had {item.response.prompt_tokens} when the "
                f"response was generated: {self._change(item)}"
            )
        if self.completes is not None:
            stored = self.completes.read(item.prompt.key, ())
            text_ids = prompt.ids_L[~prompt.visual_L].tolist() + item.response_ids
            if stored.ids_T.tolist() != text_ids or stored.spans != prompt.spans:
                raise DataError(
                    f"the store {self.completes.path} has other tokens of it: give the prompts and responses "
                    "that the store was made of"
                )
        return prompt

    def _change(self, item: CaptureItem) -> str:
        """What has made a prompt longer or shorter since its response, as far as that is known."""
        own = self.target.thinking or DEFAULT
        modes: tuple[Thinking, ...] = ("on", "off")
        for mode in modes:
            other = self.target.encode(item.prompt.messages, mode)
            if other.length == item.response.prompt_tokens:
                return (
                    f"that was with thinking {mode}, and the responses of this folder are with thinking "
                    f"{own}: remove those that were harvested so"
                )
        return "check if its image or video has changed"

    def _problems(self, task: CaptureTask) -> dict[str, str]:
        """Why prompts of a task cannot be captured: key -> error."""
        problems = dict[str, str]()
        for item in task.items:
            try:
                self._encode(item)
            except DataError as error:
                problems[item.prompt.key] = one_line(error)
        return problems


@contextmanager
def _numbered_in(task: CaptureTask, batch: Sequence[CaptureItem]) -> Iterator[None]:
    """Let a PromptError number its prompt in the task, instead of in the batch."""
    try:
        yield
    except PromptError as error:
        failed_key = batch[error.at].prompt.key
        number = task.keys.index(failed_key)
        raise PromptError(str(error), number) from None


def media_columns(prompt: Prompt, samplings: Sequence[Any]) -> dict[str, str | int]:
    """Columns of the index: the number of images, videos and frames; and each of them, with frame times."""
    video_samplings = iter(samplings)
    media = list[dict[str, Any]]()
    images = 0
    for part in prompt.media:
        images += part["type"] == "image"
        medium: dict[str, Any] = {part["type"]: part["path"]}
        if part["type"] == "video":
            sampling = next(video_samplings)
            medium |= {"of": sampling.total, "fps": sampling.fps}
            medium["seconds"] = [round(second, 3) for second in sampling.seconds]
        media.append(medium)
    frames = sum(len(sampling.indices) for sampling in samplings)
    return {
        "images": images,
        "videos": len(samplings),
        "frames": frames,
        "media": json.dumps(media),
    }


def stored_head(target: Any) -> FrozenTables:
    """The target's embedding table and LM head, in the dtype in which the target runs."""
    head = target.head
    embed = lm_head = as_numpy(head.embed_VD)
    if head.lm_head_VD is not head.embed_VD:
        lm_head = as_numpy(head.lm_head_VD)
    config = target.folder / "generation_config.json"
    generation = json.loads(config.read_text()) if config.is_file() else {}
    return FrozenTables(
        embed_VD=embed,
        lm_head_VD=lm_head,
        dtype=target.dtype_name,
        generation=generation,
    )


@dataclass
class _Pass:
    """The samples that were captured into the store, or into one annex of it."""

    missing: set[str]  # the keys of samples that were to be captured
    failed: dict[str, str]
    tokens: int
    seconds: float


def capture(
    prompts: Sequence[Prompt],
    responses: Path,
    store: CaptureStore,
    model: str,
    settings: CaptureSettings | None = None,
    options: WorkerOptions | None = None,
    report: Progress = silent,
) -> CaptureSummary:
    """Capture the features of all kept responses to `prompts` that the store lacks.

    If the store exists but lacks features that the drafters need, they are captured into an annex, for the
    samples already stored. Stopped at any time, it keeps what is done. DataError if there are no
    responses, or if another target generated them. StoreError if the store is of another target, keeps a
    feature in another encoding, or is not the same on all machines.
    """
    settings = settings or CaptureSettings()
    options = options or WorkerOptions()
    check_environment(options.engine)  # before Ray starts
    fingerprint = checkpoint(model)
    dataset.check_settings(responses, {"checkpoint": str(fingerprint)})
    sampling = dataset.read_settings(responses)[0]
    store.check_origin(fingerprint, sampling.thinking)
    generated = dataset.Responses(responses)
    items = missing_of(prompts, generated, set())
    reasons = _reasons(prompts, responses)
    if not len(items):
        raise _no_response(prompts, responses, model, dataset.counted(reasons))
    with store.writing(prompts):
        keys_in(store, settings, options.engine)
        load = options.load | Options(thinking=sampling.thinking)
        run = _CaptureRun(
            prompts=prompts,
            generated=generated,
            sampling=str(sampling),
            model=model,
            settings=settings,
            options=dataclasses.replace(options, load=load),
            report=report,
        )
        passes = [run.into(store, items)]
        annexes = store.annexes(settings.drafters)
        if annexes:
            stored_items = items.filter(has_key(items, store.keys()))
            passes += [run.into(annex, stored_items) for annex in annexes]
        failed = dict[str, str]()
        for finished in reversed(passes):
            failed |= finished.failed
        if failed and len(failed) == len(items):
            key, error = next(iter(failed.items()))
            raise TargetError(f"all {len(failed)} samples failed; {key}: {error}")
        no_response = len(prompts) - len(reasons)
        dropped = dataset.counted(reasons)
        return _summary(store, passes, failed, no_response, dropped)


def _reasons(prompts: Sequence[Prompt], responses: Path) -> pl.Series:
    """Of each response to the prompts, why it was dropped; empty if it was kept."""
    asked = facts_of(prompts).select("key")
    return asked.join(dataset.facts(responses), on="key", how="inner")["reason"]


def _no_response(
    prompts: Sequence[Prompt], responses: Path, model: str, dropped: Counter[str]
) -> DataError:
    """There is no kept response to any of the prompts, and how to generate some."""
    advice = f"`vlmdistill responses -m {model}"
    if dropped:
        counts = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        lenient = [option for reason, option in LENIENT.items() if reason in dropped]
        advice = " ".join([advice, *lenient, "--out DIR`"])
        advice += f" and give --responses DIR; dropped were: {counts}"
    else:
        advice += "`"
    return DataError(
        f"{responses} holds no kept response to any of the {len(prompts)} prompts: generate some with "
        f"{advice}"
    )


def _summary(
    store: CaptureStore,
    passes: Sequence[_Pass],
    failed: dict[str, str],
    no_response: int,
    dropped: Counter[str],
) -> CaptureSummary:
    """The summary of a run that captured in these passes."""
    captured_keys = set[str]()
    for finished in passes:
        captured_keys |= finished.missing - finished.failed.keys()
    captured = len(captured_keys)
    seconds = sum(finished.seconds for finished in passes)
    tokens = sum(finished.tokens for finished in passes)
    features = [feature.name for feature in Store.open(store.backend).features]
    samples_per_second = tokens_per_second = 0.0
    if captured:
        samples_per_second = captured / seconds
        tokens_per_second = tokens / seconds
    return CaptureSummary(
        store=store.path,
        features=tuple(features),
        samples=len(store.keys()),
        captured=captured,
        no_response=no_response,
        dropped=dropped,
        failed=failed,
        samples_per_second=samples_per_second,
        tokens_per_second=tokens_per_second,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _CaptureRun:
    """The arguments that the passes of one run share."""

    prompts: Sequence[Prompt]
    generated: dataset.Responses
    sampling: str
    model: str
    settings: CaptureSettings
    options: WorkerOptions
    report: Progress

    def into(self, store: CaptureStore, items: pl.DataFrame) -> _Pass:
        """Capture those of `items` that the store, or an annex of it, lacks."""
        missing = items.filter(~has_key(items, store.keys()))
        tally = StageTally(self.report, len(items) - len(missing), len(items))
        if len(missing):
            tally.starting()
            self._capture(store, missing, tally)
        seconds = tally.seconds
        missing_keys = set(missing["key"])
        # The store decides what was captured, not what workers return.
        unseen = f"it is not in {store.path} after capture: check that all machines see this store"
        failed = {
            key: tally.failed.get(key, unseen)
            for key in missing_keys - store.open().keys()
        }
        return _Pass(missing_keys, failed, tally.tokens, seconds)

    def _capture(
        self, store: CaptureStore, missing: pl.DataFrame, tally: StageTally
    ) -> None:
        """Let workers capture samples, and count their results."""
        model = absolute_model(self.model)
        options = self.options
        worker = partial(
            Capturer,
            model,
            store,
            self.sampling,
            self.settings,
            options.load,
            options.engine,
        )
        step = len(missing) // LOOKED_AT or 1
        media = some_media([self.prompts[row] for row in missing["prompt"][::step]])
        weights = weight_bytes(self.model, options.load)
        with options.session(), store.marked() as mark:
            shared = Shared(model, checkpoint(self.model), media, store.backend, mark)
            with opened(worker, shared, options, weights=weights) as workers:
                planned = tasks(
                    self.prompts,
                    self.generated,
                    missing,
                    workers.facts(),
                    self.settings.shard_bytes,
                )
                tally.started()
                for done in workers.run(planned):
                    result = done.result or CaptureResult()
                    tally.add(result.samples, result.tokens, done.failed)


def keys_in(
    store: CaptureStore, settings: CaptureSettings, engine: EngineName
) -> set[str]:
    """The keys of the samples in a store, if any; StoreError if the run cannot add to it."""
    if store.base is None:
        return set()
    store.check_engine(engine)
    stored_dtype = store.base.provenance.dtype
    if settings.dtype and settings.dtype != stored_dtype:
        raise StoreError(
            f"{store.path} keeps features in {stored_dtype}, not {settings.dtype}: give another --store"
        )
    store.check_encoding(settings.drafters, settings.encoding)
    return store.base.keys()
