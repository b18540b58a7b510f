"""Stage 3: workers run the target over prompts and responses and write its hidden states into the store.

The target runs teacher-forced, in batches of similar length, once for all features that the chosen drafters
need. The worker that computes a shard writes it and returns counts; a rerun captures only what is missing.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import polars as pl

from vlmdistill.pipelines.cluster.engine_environment import (
    EngineName,
    check_environment,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions, opened, weight_bytes
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
    missing_of,
    tasks,
)
from vlmdistill.pipelines.data.prompts.prompt_table import (
    Prompt,
    facts_of,
    require_listed,
)
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import LENIENT
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.checkpoints.registry import Options
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
    """What is captured, and in which shape."""

    drafters: Sequence[str] | None = (
        None  # whose needs are captured; None: all drafters
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = (
        None  # of a new store; None: bfloat16
    )
    encoding: Mapping[str, str] = field(
        default_factory=dict
    )  # feature -> raw (default) or int8
    batch_tokens: int = 8192  # of one forward pass, padding included
    shard_bytes: int = 512 * MIB


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """The responses to some prompts and their features: what is there, what is to be made, and how."""

    workspace: Workspace  # of the target
    prompts: Sequence[Prompt]
    responses: Path
    part: CaptureStore
    settings: CaptureSettings = field(default_factory=CaptureSettings)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    sampling: SamplingSettings | None = (
        None  # of missing responses; None: none is generated
    )
    batch: int | None = None  # prompts of one batch of responses

    def missing(self) -> Sequence[Prompt]:
        """The prompts whose responses are to be generated."""
        return (
            dataset.without_response(self.prompts, self.responses)
            if self.sampling
            else ()
        )

    def generated(self) -> pl.DataFrame:
        """The facts of the responses that exist; see `dataset.facts`."""
        keys = facts_of(self.prompts)["key"]
        return dataset.facts(self.responses).filter(pl.col("key").is_in(keys.implode()))

    def waiting(
        self, generated: pl.DataFrame
    ) -> list[tuple[CaptureStore, pl.DataFrame]]:
        """The store and its annexes, each with the kept ones of some responses that it lacks."""
        kept = generated.filter("keep")
        parts = (self.part, *self.part.annexes(self.settings.drafters))
        return [(part, kept.filter(~_named(kept, part.keys()))) for part in parts]


@dataclass
class CaptureResult:
    """What a worker returns for one task: counts, never tensors."""

    samples: int = 0
    tokens: int = 0  # text and visual
    failed: dict[str, str] = field(default_factory=dict)  # key -> error on this machine


@dataclass(frozen=True, kw_only=True)
class CaptureSummary:
    """What a run did, and what the store holds after it."""

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

    def after(self, seconds: float, held: int, tokens: int) -> "CaptureSummary":
        """With the samples captured in `seconds` before this run, which began with `held` in the store."""
        total, captured = seconds + self.seconds, self.samples - held
        return dataclasses.replace(
            self,
            captured=captured,
            samples_per_second=captured / total,
            tokens_per_second=(tokens + self.tokens_per_second * self.seconds) / total,
            seconds=total,
        )


class Capturer:
    """The worker: loads the target once and captures task after task, each into one shard."""

    def __init__(
        self,
        model: str,
        part: CaptureStore,
        sampling: str,
        settings: CaptureSettings,
        load_options: Options | None = None,
        engine: EngineName = "transformers",
    ) -> None:
        from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget, loaded

        self.target = loaded(model, load_options or Options(), engine)
        there = part.store
        part.check_target_dtype(self.target.dtype_name)
        part.check_engine(engine)
        self.features = part.select(settings.drafters, self.target.info)
        self.target.encode(
            [{"role": "user", "content": ""}]
        )  # it sets up the tokenizer; threads must not
        self.settings = settings
        self.dtype = settings.dtype or (there.provenance.dtype if there else "bfloat16")
        self.engine = None
        provenance = self.target.provenance(self.features, self.dtype, sampling)
        if engine == "vllm":
            self.engine = EngineTarget(
                self.target, self.features, settings.batch_tokens
            )
            provenance = msgspec.structs.replace(provenance, engine=self.engine.name)
        names = {feature.name for feature in self.features}
        for name, how in settings.encoding.items() if there is None else ():
            check_captured(name, how, names)
        encoding = {
            name: how
            for name, how in settings.encoding.items()
            if name in names and how != "raw"
        }
        self.store = part.create(
            provenance, self.target.info, stored_head(self.target), encoding
        )
        self.completes = (
            there if part.annex else None
        )  # the store whose samples get further features

    def facts(self) -> CaptureFacts:
        """What the driver plans shards with."""
        row_bytes = {"text": 0, "visual": 0, "span": 0}
        for feature in self.features:
            eight = self.store.layout.encoding.get(feature.name) == "int8"
            number = 1 if eight else 4 if self.dtype == "float32" else 2
            row_bytes[feature.where] += number * self.target.info.hidden_size
        return CaptureFacts(
            str(self.target.fingerprint),
            tuple(sorted(feature.name for feature in self.features)),
            row_bytes["text"],
            row_bytes["visual"],
        )

    def work(self, task: CaptureTask) -> CaptureResult:
        """Capture a task and commit it as one shard, without the samples whose prompt has changed."""
        failed = dict[str, str]()
        while task.items:
            try:
                return dataclasses.replace(self._capture(task), failed=failed)
            except (
                PromptError
            ) as error:  # among the longest, which are run first: little is run again
                key = task.keys[error.at]
                failed[key] = f"sample {key}: {one_line(error)}"
            except DataError:
                wrong = {
                    item.prompt.key: why
                    for item in task.items
                    if (why := self._problem(item))
                }
                if not wrong:
                    raise
                failed |= wrong
            task = task.only([key for key in task.keys if key not in failed])
        return CaptureResult(failed=failed)

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
        encoded = one_ahead(
            batches, self._encode, torch.get_num_threads()
        )  # the worker's cores
        with (
            large_images(),
            self.store.writer(task.name) as writer,
            ThreadPoolExecutor(1, "vlmdistill-store") as thread,
            closing(encoded),
        ):
            written: Future[list[Sample]] | None = None
            for batch, prompts in encoded:
                try:
                    captured = self._run(batch, prompts)
                except PromptError as error:
                    at = task.keys.index(batch[error.at].prompt.key)
                    raise PromptError(str(error), at) from None
                if written:
                    written.result()
                samplings = [
                    prompt.samplings for prompt in prompts
                ]  # the pixels are not kept for it
                written = thread.submit(self._write, writer, batch, samplings, captured)
            assert written is not None  # a task has samples
            samples = written.result()
            if (
                self.engine
            ):  # before the shard is committed: one sample of its last batch
                responses = [[int(i) for i in item.response.ids] for item in batch]
                self.engine.check(prompts, responses, samples, self.dtype)
        return CaptureResult(len(task.items), sum(item.tokens for item in task.items))

    def _run(
        self, batch: Sequence[CaptureItem], prompts: Sequence[Any]
    ) -> Callable[[], list[Sample]]:
        """Run a batch through the target; the call waits for its samples."""
        responses = [[int(i) for i in item.response.ids] for item in batch]
        keys, dtype = [item.prompt.key for item in batch], self.dtype
        if self.engine:
            captured = self.engine.capture(prompts, responses, dtype, keys)
            return lambda: captured
        leaving = self.target.begin_capture(
            prompts, responses, self.features, dtype, keys
        )
        return lambda: [sample for one in leaving for sample in one.samples()]

    def _write(
        self,
        writer: Writer,
        batch: Sequence[CaptureItem],
        samplings: Sequence[Sequence[Any]],
        captured: Callable[[], list[Sample]],
    ) -> list[Sample]:
        samples = captured()
        for item, shown, sample in zip(batch, samplings, samples, strict=True):
            meta = {**item.meta, **media_columns(item.prompt, shown)}
            writer.add(dataclasses.replace(sample, meta=meta))
        return samples

    def _encode(self, item: CaptureItem) -> Any:
        """The prompt as the target read it for the response; DataError if it has changed since."""
        prompt = self.target.encode(item.prompt.messages)
        if prompt.length != item.response.prompt_tokens:
            raise DataError(
                f"the prompt has {prompt.length} tokens, but had {item.response.prompt_tokens} when the "
                "response was generated: check if its image or video has changed"
            )
        if self.completes is not None:
            stored = self.completes.read(item.prompt.key, ())
            ids = [
                *prompt.ids_L[~prompt.visual_L].tolist(),
                *map(int, item.response.ids),
            ]
            if (stored.ids_T.tolist(), stored.spans) != (ids, prompt.spans):
                raise DataError(
                    f"the store {self.completes.path} has other tokens of it: give the prompts and responses "
                    "that the store was made of"
                )
        return prompt

    def _problem(self, item: CaptureItem) -> str:
        """Why a prompt cannot be captured; empty if it can."""
        try:
            self._encode(item)
        except DataError as error:
            return one_line(error)
        return ""


def media_columns(prompt: Prompt, samplings: Sequence[Any]) -> dict[str, str | int]:
    """Columns of the index: the number of images, videos and frames; and each of them, with frame times."""
    videos, media = iter(samplings), list[dict[str, Any]]()
    for part in prompt.media:
        fact: dict[str, Any] = {part["type"]: part["path"]}
        if part["type"] == "video":
            sampling = next(videos)
            fact |= {"of": sampling.total, "fps": sampling.fps}
            fact["seconds"] = [round(second, 3) for second in sampling.seconds]
        media.append(fact)
    return {
        "images": sum(part["type"] == "image" for part in prompt.media),
        "videos": len(samplings),
        "frames": sum(len(sampling.indices) for sampling in samplings),
        "media": json.dumps(media),
    }


def stored_head(target: Any) -> FrozenTables:
    """The target's embedding table and LM head, in the dtype in which the target runs."""
    embed = as_numpy(target.head.embed_VD)
    tied = target.head.lm_head_VD is target.head.embed_VD
    config = target.folder / "generation_config.json"
    return FrozenTables(
        embed_VD=embed,
        lm_head_VD=embed if tied else as_numpy(target.head.lm_head_VD),
        dtype=target.dtype_name,
        generation=json.loads(config.read_text()) if config.is_file() else {},
    )


@dataclass
class _Pass:
    """What one part of a store, itself or an annex of it, got."""

    missing: set[str]  # the keys of samples that were to be captured
    failed: dict[str, str]
    tokens: int
    seconds: float


def capture(
    prompts: Sequence[Prompt],
    responses: Path,
    part: CaptureStore,
    model: str,
    settings: CaptureSettings | None = None,
    options: WorkerOptions | None = None,
    report: Progress = silent,
) -> CaptureSummary:
    """Capture the features of all kept responses to `prompts` that the store lacks.

    What drafters of the settings need beyond the features of a store that is there goes into an annex, for
    the samples that the store has. Stopped at any time, it keeps what is done. DataError if there are no
    responses, or if another target generated them. StoreError if the store is of another target, keeps a
    feature in another encoding, or is not the same on all machines.
    """
    settings, options = settings or CaptureSettings(), options or WorkerOptions()
    check_environment(options.engine)  # before Ray starts
    fingerprint = checkpoint(model)
    dataset.check_settings(responses, {"checkpoint": str(fingerprint)})
    part.check_origin(fingerprint)
    generated = dataset.Responses(responses)
    items = missing_of(prompts, generated, set())
    reasons = (
        facts_of(prompts)
        .select("key")
        .join(dataset.facts(responses), on="key", how="inner")["reason"]
    )
    if not len(items):
        why = ", ".join(
            f"{reason} {count}" for reason, count in dataset.counted(reasons).items()
        )
        less = "".join(
            f" {option}" for reason, option in LENIENT.items() if reason in {*reasons}
        )
        other = (
            f"{less} --out DIR` and give --responses DIR; dropped were: {why}"
            if why
            else "`"
        )
        raise DataError(
            f"{responses} holds no kept response to any of the {len(prompts)} prompts: generate some with "
            f"`vlmdistill responses -m {model}{other}"
        )
    with part.writing():
        require_listed(prompts)
        keys_in(part, settings, options.engine)
        sampling = dataset.read_settings(responses)[0]
        options = dataclasses.replace(
            options, load={**options.load, "thinking": sampling.thinking}
        )
        one = partial(
            _capture,
            prompts,
            generated,
            str(sampling),
            model,
            settings,
            options,
            report,
        )
        passes = [one(part, items)]
        if annexes := part.annexes(settings.drafters):
            held = _named(items, part.keys())
            passes += [one(annex, items.filter(held)) for annex in annexes]
        failed = {
            key: why for one in reversed(passes) for key, why in one.failed.items()
        }
        if failed and len(failed) == len(items):
            key, why = next(iter(failed.items()))
            raise TargetError(f"all {len(failed)} samples failed; {key}: {why}")
        captured = len(
            set().union(*(one.missing - one.failed.keys() for one in passes))
        )
        seconds = sum(one.seconds for one in passes)
        return CaptureSummary(
            store=part.path,
            features=tuple(
                feature.name for feature in Store.open(part.backend).features
            ),
            samples=len(part.keys()),
            captured=captured,
            no_response=len(prompts) - len(reasons),
            dropped=dataset.counted(reasons),
            failed=failed,
            samples_per_second=captured / seconds if captured else 0.0,
            tokens_per_second=sum(one.tokens for one in passes) / seconds
            if captured
            else 0.0,
            seconds=seconds,
        )


def _named(items: pl.DataFrame, keys: Collection[str]) -> pl.Series:
    return items["key"].is_in(pl.Series(list(keys), dtype=pl.String).implode())


def _capture(
    prompts: Sequence[Prompt],
    generated: dataset.Responses,
    sampling: str,
    model: str,
    settings: CaptureSettings,
    options: WorkerOptions,
    report: Progress,
    part: CaptureStore,
    items: pl.DataFrame,
) -> _Pass:
    """Capture what a store, or an annex of it, lacks of `items`."""
    missing = items.filter(~_named(items, part.keys()))
    start, done, tokens, failed = (
        time.monotonic(),
        len(items) - len(missing),
        0,
        dict[str, str](),
    )
    if len(missing):
        report(done, len(items), "starting")
        worker = partial(
            Capturer,
            absolute_model(model),
            part,
            sampling,
            settings,
            options.load,
            options.engine,
        )
        media = some_media(
            [prompts[at] for at in missing["prompt"][:: len(missing) // LOOKED_AT or 1]]
        )
        weights = weight_bytes(model, options.load)
        with options.session(), part.marked() as mark:
            shared = Shared(
                absolute_model(model), checkpoint(model), media, part.backend, mark
            )
            with opened(worker, shared, options, weights=weights) as workers:
                work = tasks(
                    prompts, generated, missing, workers.facts(), settings.shard_bytes
                )
                start = time.monotonic()
                for ended in workers.run(work):
                    done += (ended.result.samples if ended.result else 0) + len(
                        ended.failed
                    )
                    tokens += ended.result.tokens if ended.result else 0
                    failed |= ended.failed
                    report(
                        done,
                        len(items),
                        f"{tokens / (time.monotonic() - start):.0f} tokens/s",
                    )
    seconds = time.monotonic() - start
    stored = part.made.keys()  # this counts, not what workers return
    unseen = f"it is not in {part.path} after capture: check that all machines see this store"
    wanted = set(missing["key"])
    return _Pass(
        wanted,
        {key: failed.get(key, unseen) for key in wanted - stored},
        tokens,
        seconds,
    )


def keys_in(
    part: CaptureStore, settings: CaptureSettings, engine: EngineName
) -> set[str]:
    """The keys of the samples in a store, if any; StoreError if the run cannot add to it."""
    if (there := part.store) is None:
        return set()
    part.check_engine(engine)
    if settings.dtype and settings.dtype != (theirs := there.provenance.dtype):
        raise StoreError(
            f"{part.path} keeps features in {theirs}, not {settings.dtype}: give another --store"
        )
    part.check_encoding(settings.drafters, settings.encoding)
    return there.keys()
