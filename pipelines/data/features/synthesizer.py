"""Stages 2 and 3 in one pass: an engine keeps the hidden states of responses while it generates them.

A worker publishes the shards of a task and returns the responses. The driver writes those, and then lets the
shards count: every sample of the store has its response. A run that is stopped in between leaves responses
whose features `capture` adds.
"""

import dataclasses
from collections.abc import Callable, Sequence
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
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.responder import (
    Responder,
    ResponseResult,
    ResponseTask,
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
        part: CaptureStore,
        settings: CaptureSettings,
        model: str,
        sampling: SamplingSettings,
        *more: Any,
    ) -> None:
        self._part, self._settings, self._sampling = part, settings, str(sampling)
        super().__init__(model, sampling, *more)

    def _load(
        self, model: str, how: Options, engine: EngineName
    ) -> "tuple[TargetModel, EngineTarget | None]":
        self._capturer = Capturer(
            model, self._part, self._sampling, self._settings, how, engine
        )
        self._planned = self._capturer.facts()
        return self._capturer.target, self._capturer.engine

    def work(self, task: ResponseTask) -> ResponseResult:
        """The responses to the prompts of a task, and the kept ones' shards, which do not count yet."""
        self._shard, self._opened, self._held = task.name, 0, list[Commit]()
        self._writer: Writer | None = None
        self._size = self._samples = 0  # of the open shard
        with ExitStack() as self._open:
            result = super().work(task)
            self._publish()
        result.shards = self._held
        return result

    def _add(self, sample: "Sample", size: int) -> None:
        """Write a sample into the open shard, or into a new one where that is full."""
        full = (
            self._size + size > self._settings.shard_bytes
            or self._samples >= SHARD_SAMPLES
        )
        if self._writer is None or full:
            self._publish()
            writer = self._capturer.store.writer(
                f"{self._shard}-{self._opened}", hold=True
            )
            self._writer = self._open.enter_context(writer)
            self._opened, self._size, self._samples = self._opened + 1, 0, 0
        self._writer.add(sample)
        self._size, self._samples = self._size + size, self._samples + 1

    def _publish(self) -> None:
        """End the open shard, if there is one."""
        self._open.close()
        if self._writer and self._writer.held:
            self._held.append(self._writer.held)

    def _generate(
        self, batch: Sequence[tuple[Prompt, Any]], seed: int, result: ResponseResult
    ) -> None:
        by_key = {prompt.key: (prompt, encoded) for prompt, encoded in batch}

        def keep(key: str, response: "EncodedResponse", sample: "Sample") -> None:
            prompt, encoded = by_key[key]
            row = self._response(prompt, encoded, response, seed)
            result.rows.append(row)
            if row.keep:
                meta = {
                    **CaptureItem(prompt, row).meta,
                    **media_columns(prompt, encoded.samplings),
                }
                size = self._planned.sample_bytes(
                    row.prompt_tokens + len(row.ids), row.visual_tokens
                )
                self._add(dataclasses.replace(sample, meta=meta), size)

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


def one_pass(
    part: CaptureStore, settings: CaptureSettings
) -> tuple[Callable[..., Synthesizer], Callable[[ResponseResult], None]]:
    """The `worker` of `respond` that captures what it generates, and what to do `on_result`.

    The store must be of this target, without samples of these prompts.
    """

    def count(result: ResponseResult) -> None:
        for shard in result.shards:
            part.made.count(shard)

    return partial(Synthesizer, part, settings), count
