"""Stages 2 and 3 in one pass: an engine keeps the hidden states of responses while it generates them.

A worker writes the shards of a task, which do not count yet, and returns the responses. The driver writes
those, and then lets the shards count: every sample of the store has its response. A run that is stopped in
between leaves responses whose features `capture` adds.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.cluster.engine_environment import EngineName
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import (
    Capturer,
    CaptureSettings,
    media_columns,
)
from vlmdistill.pipelines.data.features.shard_plan import SHARD_SAMPLES, CaptureItem
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses.dataset import ResponseRow, SamplingSettings
from vlmdistill.pipelines.data.responses.responder import (
    Responder,
    ResponseResult,
    ResponseTask,
    ResponseWork,
)
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.stores.manifest import Commit
from vlmdistill.stores.writer import Writer

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.encode import EncodedResponse
    from vlmdistill.pipelines.targets.target_model import TargetModel
    from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget
    from vlmdistill.stores.schema import Sample


class Synthesizer(Responder):
    """The worker: generates the responses of a task, and writes the kept ones' features as shards."""

    def __init__(
        self,
        store: CaptureStore,
        settings: CaptureSettings,
        model: str,
        sampling: SamplingSettings,
        *responder_arguments: Any,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sampling = str(sampling)
        super().__init__(model, sampling, *responder_arguments)

    def _load(
        self, model: str, how: Options, engine: EngineName
    ) -> "tuple[TargetModel, EngineTarget | None]":
        self._capturer = Capturer(
            model, self._store, self._sampling, self._settings, how, engine
        )
        self._facts = self._capturer.facts()
        return self._capturer.target, self._capturer.engine

    def work(self, task: ResponseTask) -> ResponseResult:
        """The responses to the prompts of a task, and the kept ones' shards, which do not count yet."""
        with ExitStack() as open_writer:
            self._shards = _TaskShards(
                self._capturer, task.name, self._settings.shard_bytes, open_writer
            )
            result = super().work(task)
            self._shards.close_shard()
        result.shards = self._shards.written
        return result

    def _generate(
        self, batch: Sequence[tuple[Prompt, Any]], seed: int
    ) -> Iterator[ResponseRow]:
        by_key = {prompt.key: (prompt, encoded) for prompt, encoded in batch}
        rows = list[ResponseRow]()

        def keep(key: str, response: "EncodedResponse", sample: "Sample") -> None:
            prompt, encoded = by_key[key]
            row = self._response(prompt, encoded, response, seed)
            rows.append(row)
            if not row.keep:
                return
            item = CaptureItem(prompt, row)
            meta = {**item.meta, **media_columns(prompt, encoded.samplings)}
            size = self._facts.sample_bytes(item.tokens, row.visual_tokens)
            self._shards.add(dataclasses.replace(sample, meta=meta), size)

        assert self.engine is not None
        self.engine.respond(
            [encoded for _, encoded in batch],
            self._capturer.dtype,
            list(by_key),
            keep,
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
        )
        return iter(rows)


class _TaskShards:
    """The shards of one task, of which one at a time is open."""

    def __init__(
        self, capturer: Capturer, task: str, shard_bytes: int, open_writer: ExitStack
    ) -> None:
        self.written = list[Commit]()
        self._capturer = capturer
        self._task = task
        self._shard_bytes = shard_bytes
        self._open_writer = open_writer
        self._writer: Writer | None = None
        self._opened = 0  # shards of the task, to name them
        self._size = 0  # bytes of the open shard
        self._samples = 0  # in the open shard

    def add(self, sample: "Sample", size: int) -> None:
        """Write a sample of `size` bytes into the open shard, or into a new one where that is full."""
        too_large = self._size + size > self._shard_bytes
        full = too_large or self._samples >= SHARD_SAMPLES
        if self._writer is None or full:
            self.close_shard()
            self._writer = self._new_shard()
        self._writer.add(sample)
        self._size += size
        self._samples += 1

    def _new_shard(self) -> Writer:
        name = f"{self._task}-{self._opened}"
        writer = self._capturer.store.writer(name, hold=True)
        self._opened += 1
        self._size = 0
        self._samples = 0
        return self._open_writer.enter_context(writer)

    def close_shard(self) -> None:
        """End the open shard, if there is one."""
        self._open_writer.close()
        if self._writer and self._writer.held:
            self.written.append(self._writer.held)


def one_pass(store: CaptureStore, settings: CaptureSettings) -> ResponseWork:
    """How `respond` captures what it generates.

    The store must be of this target, without samples of these prompts.
    """

    def count(result: ResponseResult) -> None:
        for shard in result.shards:
            store.open().count(shard)

    return ResponseWork(partial(Synthesizer, store, settings), on_result=count)
