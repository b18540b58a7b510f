"""The speculator that feeds exported drafters as they were trained, on vLLM's V2 runner.

V2 gives a drafter true positions and the next token of an unfinished prompt, so here only entries change.
Shapes: B requests of a batch, N rows of a step, K rows that are kept, D hidden, S as in `served_model`.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vlmdistill.pipelines.vllm.plugin.feeder import Feed, Feeder, Reading
from vlmdistill.pipelines.vllm.plugin.limits import feeding_of
from vlmdistill.pipelines.vllm.plugin.served_model import (
    BesideAnyTarget,
    with_last_state,
)


def feed_batch(
    feeder: Feeder, batch: InputBatch, state: Any, hidden_ND: Tensor, block: Any
) -> Feed | None:
    """The rows of a batch that the drafter has entries for; see `Feeder.feed`.

    `state` is the runner's state of the target, and `block` the drafter's model.
    """
    cache = state.encoder_cache
    return feeder.feed(
        _reading(batch, cache.mm_features),
        row_starts(batch),
        batch.positions[: batch.num_tokens],
        hidden_ND,
        block,
        cache.encoder_outputs,
        cache.mm_features,
    )


def _reading(batch: InputBatch, media: Mapping[str, Any]) -> dict[str, Reading]:
    """The requests of a batch, in the order of their rows; after a prompt, any first row does.

    `media` has their images and videos by request.
    """
    requests = {}
    for name, prompt, first in zip(
        batch.req_ids,
        batch.prefill_len_np,
        batch.num_computed_prefill_tokens_np,
        strict=True,
    ):
        requests[name] = Reading(media.get(name, ()), int(prompt), int(first))
    return requests


def row_starts(batch: InputBatch) -> list[int]:
    """The first row of each request, and the number of all rows."""
    starts: list[int] = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
    return starts


def without_dropped(batch: InputBatch, feed: Feed) -> InputBatch:
    """The batch as if the dropped tokens had never been read, but for their ids."""
    count = len(feed.kept_K)
    starts = feed.starts
    lengths_B = batch.seq_lens[: batch.num_reqs]
    upper_B = batch.seq_lens_cpu_upper_bound[: batch.num_reqs]
    dropped_cpu_B = feed.dropped_B.cpu().to(upper_B.dtype)
    return replace(
        batch,
        num_scheduled_tokens=feed.lengths_B.astype(np.int32),
        num_tokens=count,
        num_tokens_after_padding=count,
        num_reqs_after_padding=batch.num_reqs,
        query_start_loc=starts.to(feed.kept_K.device),
        query_start_loc_np=starts.numpy(),
        seq_lens=(lengths_B - feed.dropped_B).to(batch.seq_lens.dtype),
        seq_lens_cpu_upper_bound=upper_B - dropped_cpu_B,
        positions=feed.index_K,
    )


class WithoutGraphs:
    """Runs a drafter of vLLM without CUDA graphs; among base classes, it comes before vLLM's class."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graphs."""
        super().init_cudagraph_manager(CUDAGraphMode.NONE)  # type: ignore[misc]


class ChosenSpeculator(BesideAnyTarget, EagleSpeculator):
    """vLLM's speculator for its own drafters, and `ServedSpeculator` for exported ones."""

    def __new__(cls, vllm_config: VllmConfig, *_: object) -> "ChosenSpeculator":
        """Choose by the drafter's folder; EAGLE-3 needs only its class."""
        feeding = feeding_of(vllm_config)
        ours = feeding is not None and feeding.built is not None
        return object.__new__(ServedSpeculator if ours else cls)


class ServedSpeculator(WithoutGraphs, ChosenSpeculator):
    """Drops entries before vLLM drafts: the arguments of `propose` are all that it drafts from.

    The positions that vLLM counts are those of the drafter's KV cache; the model adds the offset of the
    rotary ones. The drafter runs without CUDA graphs, which would hold the target's slots.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        feeding = feeding_of(vllm_config)
        assert feeding is not None
        self.feeding = feeding
        self._ahead_B: Tensor | None = None
        """Added to the positions of guesses."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which reads the number of guesses where vLLM counts it."""
        super().load_model(target_model)
        self.model.model.guess_1 = self.current_draft_step.view(1)
        drafter = self.model.model.drafter
        self._feeder = Feeder(drafter, self.device)
        if drafter.taps:
            target_model.register_forward_hook(with_last_state)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        *args: Any,
        dummy_run: bool = False,
        mm_inputs: tuple[list[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft from the entries that the drafter has."""
        block = self.model.model
        block.ahead_N = None
        self._ahead_B = None
        if self.feeding.visual == "raw" and mm_inputs is not None:
            _, is_visual_N = mm_inputs
            block.raw_N = is_visual_N.to(self.device)
        if aux_hidden_states:
            states_NS = torch.cat(aux_hidden_states, dim=-1)
            last_hidden_states = self.model.combine_hidden_states(states_NS)
            aux_hidden_states = None
        drops = self.feeding.visual == "dropped" and self.model_state.supports_mm_inputs
        if drops and not dummy_run:
            hidden_ND = last_hidden_states[: input_batch.num_tokens].clone()
            feed = feed_batch(
                self._feeder, input_batch, self.model_state, hidden_ND, block
            )
            if feed is not None:
                next_prefill_tokens = next_prefill_tokens.clone()
                input_batch = self._drop(feed, input_batch, next_prefill_tokens)
                last_hidden_states = hidden_ND[feed.kept_K]
                attn_metadata, slot_mappings = self._attention(input_batch)
                block.ahead_N = feed.rotary_shift_K
                if self._feeder.drafter.config.positions == "expanded":
                    self._ahead_B = feed.dropped_B
        drafted: Tensor = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            *args,
            dummy_run=dummy_run,
            mm_inputs=mm_inputs,
            **kwargs,
        )
        return drafted

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        """One row for each request from here on."""
        block = self.model.model
        block.ahead_N = self._ahead_B
        if self._feeder.drafter.joins:
            last_B = self.last_token_indices[:num_reqs]
            block.joined_ND[:num_reqs] = block.joined_ND[last_B]

    def _drop(
        self, feed: Feed, batch: InputBatch, next_prefill_tokens: Tensor
    ) -> InputBatch:
        """The batch as if the dropped tokens had never been read.

        If the last rows of an unfinished prompt are dropped, its entry of `next_prefill_tokens` is replaced.
        """
        # vLLM shifts the ids by one row: the id of each kept row goes into the row after it.
        source_K = np.zeros(len(feed.kept_K), dtype=np.int64)
        for request, ((start, end), first, step) in enumerate(
            zip(
                pairwise(row_starts(batch)),
                feed.starts.tolist(),
                feed.steps,
                strict=False,
            )
        ):
            kept_rows = start + np.flatnonzero(step.kept_N)
            source_K[first] = start
            source_K[first + 1 : first + len(kept_rows)] = kept_rows[:-1] + 1
            next_row = int(kept_rows[-1]) + 1
            if next_row < end:
                state = int(batch.idx_mapping_np[request])
                next_prefill_tokens[0, state] = batch.input_ids[next_row]
        input_ids = batch.input_ids[self._feeder.tensor(source_K)]
        return replace(without_dropped(batch, feed), input_ids=input_ids)

    def _attention(self, batch: InputBatch) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and slots of the drafter's own entries."""
        requests = batch.num_reqs
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping[:requests],
            batch.query_start_loc,
            batch.positions,
            batch.num_tokens,
        )
        tables = self.block_tables.input_block_tables
        metadata = self.model_state.prepare_attn(
            batch,
            CUDAGraphMode.NONE,
            tuple(table[:requests] for table in tables),
            slots,
            self.attn_groups,
            self.kv_cache_config,
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)
