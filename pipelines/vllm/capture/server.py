"""Runs in the engine environment: load a target with vLLM, and run sequences as they come on a socket."""

import os
import queue
import socket
import sys
import threading
from functools import partial
from typing import Any

import torch
import vllm
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from vlmdistill.pipelines.vllm.capture.extensions import (
    UndraftedScheduler,
    register_models,
)
from vlmdistill.pipelines.vllm.capture.positions import (
    identifier,
    set_positions,
    take_positions,
)
from vlmdistill.pipelines.vllm.capture.wire import (
    PROTOCOL,
    ROPE,
    Channel,
    Chosen,
    Failed,
    Finished,
    Medium,
    Message,
    Ready,
    RunAll,
    Start,
    Submit,
    through_stop,
)

Received = tuple[Message, dict[str, torch.Tensor]]


class VllmEngine:
    """vLLM with the target, driven step by step in this process."""

    def __init__(self, start: Start) -> None:
        register_models()
        arguments = EngineArgs(
            model=start.folder,
            dtype=start.dtype,
            max_model_len=-1,  # what fits
            max_num_batched_tokens=start.batch_tokens,
            tensor_parallel_size=start.tensor_parallel,
            enable_prefix_caching=False,  # states of cached tokens would be missing
            async_scheduling=False,
            mm_processor_cache_gb=0,
            mm_device_do_normalize=False,  # our processor has done it
            generation_config="vllm",
            enforce_eager=not torch.cuda.is_available(),
            **(capturing(start) if start.layers else {}),
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._engine.apply_model(take_positions)
        self._captures = bool(start.layers)
        # Of the sequences that were submitted.
        self._positions = dict[str, torch.Tensor]()
        self._drawn = dict[str, Drawn]()
        self._processor = MULTIMODAL_REGISTRY.create_processor(
            self._engine.model_config
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits, one generated token included."""
        return int(self._engine.model_config.max_model_len)

    def submit(self, sequence: Submit, visual: dict[str, torch.Tensor]) -> None:
        """Queue a sequence as our processor prepared it; vLLM's own processor is not used."""
        self._positions[sequence.key] = visual.pop(ROPE)
        self._drawn[sequence.key] = Drawn(frozenset(sequence.draw.stop_ids))
        prompt = self._input(sequence, visual)
        self._engine.add_request(sequence.key, prompt, self._sampling(sequence))

    def _sampling(self, sequence: Submit) -> SamplingParams:
        """The parameters of vLLM for a sequence, and what our connector is to keep of it."""
        draw = sequence.draw
        logprobs = 0 if draw.logprobs else None
        if self._captures:
            logprobs = 1
        for_connector = {
            "key": sequence.key,
            "rows": sequence.rows,
            "grown": sequence.grown,
            "stop_ids": draw.stop_ids,
        }
        return SamplingParams(
            temperature=draw.temperature,
            top_p=draw.top_p,
            # vLLM 0.32 rewinds a sequence's generator after a chunk, which those of a CPU cannot.
            seed=draw.seed if torch.cuda.is_available() else None,
            max_tokens=draw.max_tokens + self._captures,
            ignore_eos=True,
            stop_token_ids=[] if self._captures else list(draw.stop_ids),
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": for_connector},
        )

    def run(self) -> dict[str, Chosen]:
        """Run all that was submitted; what follows each sequence, by key."""
        self._engine.apply_model(partial(set_positions, positions=self._positions))
        self._positions = {}
        core = self._engine.engine_core.engine_core
        # The connector gets its last sequences in a step after they finished.
        while self._engine.has_unfinished_requests() or core.scheduler.has_requests():
            for output in self._engine.step():
                drawn = self._drawn[output.request_id]
                drawn.add(output.outputs[0])
                if self._captures and drawn.stopped and not output.finished:
                    self._engine.abort_request([output.request_id])
        chosen = {
            key: drawn.chosen(self._captures) for key, drawn in self._drawn.items()
        }
        self._drawn = {}
        return chosen

    def _input(self, sequence: Submit, visual: dict[str, Any]) -> Any:
        if not sequence.media:
            return tokens_input(sequence.ids)
        frames = visual.pop("video_frames", None)
        if frames is not None:  # LLaVA-OneVision: of each video
            pixels = visual["pixel_values_videos"]
            visual["pixel_values_videos"] = pixels.split(frames.tolist())
        inputs = BatchFeature(visual)
        fields = self._processor._get_mm_fields_config(inputs, {})
        ranges: dict[str, list[PlaceholderRange]] = {}
        hashes: dict[str, list[str]] = {}
        for number, medium in enumerate(sequence.media):
            ranges.setdefault(medium.kind, []).append(_range(medium))
            hashes.setdefault(medium.kind, []).append(identifier(sequence.key, number))
        return mm_input(
            sequence.ids,
            MultiModalKwargsItems.from_hf_inputs(inputs, fields),
            hashes,
            ranges,
        )


def capturing(start: Start) -> dict[str, Any]:
    """Arguments that make vLLM capture the inputs of layers and hand them to our connector."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(start.layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "RowConnector",
        "kv_connector_module_path": "vlmdistill.pipelines.vllm.capture.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"states": start.states},
    }
    return {
        "scheduler_cls": UndraftedScheduler,
        "speculative_config": speculative,
        "kv_transfer_config": transfer,
    }


class Drawn:
    """The tokens that were drawn after a sequence so far."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        # Of each token, and of the most likely one.
        self._logprobs: list[dict[int, Any]] = []
        self.stopped = False
        """The token that ends the response was run: its state is kept."""

    def add(self, output: Any) -> None:
        """Add the tokens of one step."""
        inputs = max(0, len(self._ids) - 1)  # tokens that earlier steps have run
        self._ids += output.token_ids
        self._logprobs += output.logprobs or ()
        self.stopped |= not self._stop_ids.isdisjoint(self._ids[inputs:-1])

    def chosen(self, captured: bool) -> Chosen:
        """The response, and if it was captured, the most likely token after it."""
        # An engine that captures has drawn one token more, see `Draw`.
        ids = through_stop(self._ids[:-1] if captured else self._ids, self._stop_ids)
        logprobs = [
            candidates[token].logprob
            for candidates, token in zip(self._logprobs, ids, strict=False)
        ]
        greedy = -1
        if captured:
            greedy = _most_likely(self._logprobs[len(ids)])
        return Chosen(ids, logprobs, greedy)


def _most_likely(candidates: dict[int, Any]) -> int:
    return max(candidates, key=lambda token: candidates[token].logprob, default=-1)


def _range(medium: Medium) -> PlaceholderRange:
    mask = None
    if medium.mask:
        mask = torch.frombuffer(bytearray(medium.mask), dtype=torch.bool)
    return PlaceholderRange(medium.start, medium.length, mask)


def serve(channel: Channel) -> None:
    """Load what the first message says, then run what comes; return when the socket is closed."""
    inbox = queue.Queue[Received](1)
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    start, _ = inbox.get()
    assert isinstance(start, Start)
    engine = VllmEngine(start)
    channel.send(
        Ready(protocol=PROTOCOL, version=vllm.__version__, max_length=engine.max_length)
    )
    while True:
        message, tensors = inbox.get()
        if isinstance(message, Submit):
            engine.submit(message, tensors)
        elif isinstance(message, RunAll):
            channel.send(Finished(engine.run()))


def _listen(channel: Channel, inbox: "queue.Queue[Received]") -> None:
    """Hand messages on; end this process when ours has ended, even within a forward pass."""
    try:
        while True:
            inbox.put(channel.receive())
    except (EOFError, OSError):
        os._exit(0)


def main() -> None:
    """Serve on the socket whose descriptor is the argument; any error is sent before this process ends."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(channel)
    except Exception as error:
        channel.send(Failed(" ".join(f"{type(error).__name__}: {error}".split())))
        raise


if __name__ == "__main__":
    main()
