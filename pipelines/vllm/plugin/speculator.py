"""The speculator that feeds exported drafters as they were trained, on vLLM's V2 runner.

V2 gives a drafter true positions and the next token of an unfinished prompt, so here only entries change.
Shapes: B requests of a batch, N rows of a step, K rows that are kept, D hidden, S as in `served_model`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vlmdistill.pipelines.vllm.plugin.feeder import Feed, Feeder, KeptRows, Reading
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
    read = Reading(
        names=batch.req_ids,
        media=cache.mm_features,
        prompt_B=batch.prefill_len_np,
        first_B=batch.num_computed_prefill_tokens_np,
        starts=batch.query_start_loc_np[: batch.num_reqs + 1].tolist(),
        alive=cache.mm_features,
    )
    return feeder.feed(
        read,
        batch.positions[: batch.num_tokens],
        hidden_ND[: batch.num_tokens],
        block,
        cache.encoder_outputs,
    )


def without_dropped(batch: InputBatch, feed: Feed) -> InputBatch:
    """The batch as if the dropped tokens had never been read, but for their ids."""
    lengths_B = batch.seq_lens[: batch.num_reqs]
    upper_B = batch.seq_lens_cpu_upper_bound[: batch.num_reqs]
    count = len(feed.index_K)
    batch = replace(
        batch,
        num_tokens=count,
        num_tokens_after_padding=count,
        num_reqs_after_padding=batch.num_reqs,
        seq_lens=(lengths_B - feed.dropped_B).to(batch.seq_lens.dtype),
        seq_lens_cpu_upper_bound=upper_B - feed.cpu_dropped_B.to(upper_B.dtype),
        positions=feed.index_K,
    )
    if feed.kept is None:
        return batch
    return replace(
        batch,
        num_scheduled_tokens=feed.kept.lengths_B.astype(np.int32),
        query_start_loc=feed.kept.starts,
        query_start_loc_np=feed.kept.cpu_starts.numpy(),
    )


class ChosenSpeculator(BesideAnyTarget, EagleSpeculator):
    """vLLM's speculator for its own drafters, and `ServedSpeculator` for exported ones."""

    def __new__(cls, vllm_config: VllmConfig, *_: object) -> "ChosenSpeculator":
        """Choose by the drafter's folder; EAGLE-3 needs only its class."""
        feeding = feeding_of(vllm_config)
        ours = feeding is not None and feeding.built is not None
        return object.__new__(ServedSpeculator if ours else cls)


class ServedSpeculator(ChosenSpeculator):
    """Drops entries before vLLM drafts: the arguments of `propose` are all that it drafts from.

    The positions that vLLM counts are those of the drafter's KV cache; the model adds the offset of the
    rotary ones, from a buffer.
    """

    prefill_cudagraph_manager: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        feeding = feeding_of(vllm_config)
        assert feeding is not None
        self.feeding = feeding
        self._guess_shift_B: Tensor | None = None
        """Added to the positions of guesses."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which reads the number of guesses where vLLM counts it."""
        super().load_model(target_model)
        self.model.model.guess_1 = self.current_draft_step.view(1)
        drafter = self.model.model.drafter
        self._feeder = Feeder(drafter, self.device)
        if drafter.taps:
            target_model.register_forward_hook(with_last_state)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Capture guesses as for vLLM's drafters, and the first pass where its rows are the target's.

        A graph of that pass holds the target's sequence lengths and slots: not those of a drafter that drops
        entries. None is piecewise, because the drafter's class is not compiled.
        """
        super().init_cudagraph_manager(CUDAGraphMode.NONE)
        without_graphs = self.prefill_cudagraph_manager
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            super().init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        if self.feeding.visual == "dropped":
            self.prefill_cudagraph_manager = without_graphs

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
        if self.feeding.visual == "raw" and mm_inputs is not None:
            _, is_visual_N = mm_inputs
            block.mark_raw(is_visual_N)
        if aux_hidden_states:
            states_NS = torch.cat(aux_hidden_states, dim=-1)
            last_hidden_states = self.model.combine_hidden_states(states_NS)
            aux_hidden_states = None
        drops = self.feeding.visual == "dropped" and self.model_state.supports_mm_inputs
        feed = None
        if drops and not dummy_run:
            feed = feed_batch(
                self._feeder, input_batch, self.model_state, last_hidden_states, block
            )
        block.shift(None if feed is None else feed.shift_K)
        self._guess_shift_B = None if feed is None else feed.guess_shift_B
        if feed is not None:
            last_hidden_states = feed.hidden_KD
            batch = without_dropped(input_batch, feed)
            if feed.kept is not None:
                next_prefill_tokens = _next_tokens(
                    next_prefill_tokens, input_batch, feed.kept
                )
                batch = replace(
                    batch, input_ids=input_batch.input_ids[feed.kept.id_row_K]
                )
            input_batch = batch
            attn_metadata, slot_mappings = self._attention(input_batch)
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

    def on_prefill_begin(self, num_reqs: int) -> None:
        """The first pass of a draft, when it is captured, too."""
        self.model.model.guesses = False

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        """One row for each request from here on."""
        block = self.model.model
        block.guesses = True
        block.shift(self._guess_shift_B)
        if self._feeder.drafter.joins:
            last_B = self.last_token_indices[:num_reqs]
            block.joined_ND[:num_reqs] = block.joined_ND[last_B]

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


def _next_tokens(
    next_prefill_tokens: Tensor, batch: InputBatch, kept: KeptRows
) -> Tensor:
    """vLLM's next tokens of unfinished prompts: after the last row that is kept."""
    if not kept.next_rows:
        return next_prefill_tokens
    next_prefill_tokens = next_prefill_tokens.clone()
    for request, row in kept.next_rows.items():
        state = int(batch.idx_mapping_np[request])
        next_prefill_tokens[0, state] = batch.input_ids[row]
    return next_prefill_tokens
