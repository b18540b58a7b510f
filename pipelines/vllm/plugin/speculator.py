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


def reading(batch: InputBatch, shown: Mapping[str, Any]) -> dict[str, Reading]:
    """The requests of a batch, in the order of their rows; after a prompt, any first row does.

    `shown` has their images and videos by request.
    """
    return {
        name: Reading(shown.get(name, ()), int(prompt), int(first))
        for name, prompt, first in zip(
            batch.req_ids,
            batch.prefill_len_np,
            batch.num_computed_prefill_tokens_np,
            strict=True,
        )
    }


def without_dropped(batch: InputBatch, feed: Feed) -> InputBatch:
    """The batch as if the dropped tokens had never been read, but for their ids."""
    count, starts = len(feed.kept_K), feed.starts
    upper_B = batch.seq_lens_cpu_upper_bound[: batch.num_reqs]
    return replace(
        batch,
        num_scheduled_tokens=feed.lengths_B.astype(np.int32),
        num_tokens=count,
        num_tokens_after_padding=count,
        num_reqs_after_padding=batch.num_reqs,
        query_start_loc=starts.to(feed.kept_K.device),
        query_start_loc_np=starts.numpy(),
        seq_lens=(batch.seq_lens[: batch.num_reqs] - feed.dropped_B).to(
            batch.seq_lens.dtype
        ),
        seq_lens_cpu_upper_bound=upper_B - feed.dropped_B.cpu().to(upper_B.dtype),
        positions=feed.index_K,
    )


class ChosenSpeculator(BesideAnyTarget, EagleSpeculator):
    """vLLM's speculator for its own drafters, and `ServedSpeculator` for exported ones."""

    def __new__(cls, vllm_config: VllmConfig, *_: object) -> "ChosenSpeculator":
        """Choose by the drafter's folder; EAGLE-3 needs only its class."""
        feeding = feeding_of(vllm_config)
        ours = feeding is not None and feeding.built is not None
        return object.__new__(ServedSpeculator if ours else cls)


class ServedSpeculator(ChosenSpeculator):
    """Drops entries before vLLM drafts: all that it drafts from are arguments of `propose`.

    The positions that vLLM counts are those of the drafter's KV cache; the model adds what the rotary ones
    are ahead of them. The drafter runs without CUDA graphs, which would hold the target's slots.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        feeding = feeding_of(vllm_config)
        assert feeding is not None
        self.feeding = feeding
        self._ahead_B: Tensor | None = None
        """What is added to the positions of guesses."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which reads the number of guesses where vLLM counts it."""
        super().load_model(target_model)
        self.model.model.guess_1 = self.current_draft_step.view(1)
        drafter = self.model.model.drafter
        self._feeder = Feeder(drafter, self.device)
        if drafter.taps:
            target_model.register_forward_hook(with_last_state)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graphs."""
        super().init_cudagraph_manager(CUDAGraphMode.NONE)

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
        block.ahead_N, self._ahead_B = None, None
        if self.feeding.visual == "raw" and mm_inputs is not None:
            block.raw_N = mm_inputs[1].to(self.device)
        if aux_hidden_states:
            states_NS = torch.cat(aux_hidden_states, dim=-1)
            last_hidden_states, aux_hidden_states = (
                self.model.combine_hidden_states(states_NS),
                None,
            )
        if (
            self.feeding.visual == "dropped"
            and self.model_state.supports_mm_inputs
            and not dummy_run
        ):
            batch, hidden_ND = (
                input_batch,
                last_hidden_states[: input_batch.num_tokens].clone(),
            )
            starts = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
            feed = self._feeder.feed(
                reading(batch, self.model_state.encoder_cache.mm_features),
                starts,
                batch.positions[: batch.num_tokens],
                hidden_ND,
                block,
                self.model_state.encoder_cache.encoder_outputs,
                self.model_state.encoder_cache.mm_features,
            )
            if feed is not None:
                next_prefill_tokens = next_prefill_tokens.clone()
                input_batch = self._drop(feed, starts, batch, next_prefill_tokens)
                last_hidden_states = hidden_ND[feed.kept_K]
                attn_metadata, slot_mappings = self._attention(input_batch)
                block.ahead_N = feed.turned_K
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
            block.joined_ND[:num_reqs] = block.joined_ND[
                self.last_token_indices[:num_reqs]
            ]

    def _drop(
        self,
        feed: Feed,
        starts: list[int],
        batch: InputBatch,
        next_prefill_tokens: Tensor,
    ) -> InputBatch:
        """The batch as if the dropped tokens had never been read."""
        count, new = len(feed.kept_K), feed.starts.tolist()
        # vLLM shifts the ids by one row: the id of each kept row goes into the row after it.
        from_K, last = np.zeros(count, dtype=np.int64), list[tuple[int, int]]()
        for request, ((start, end), at, step) in enumerate(
            zip(pairwise(starts), new, feed.steps, strict=False)
        ):
            row_K = np.flatnonzero(step.kept_N)
            from_K[at], from_K[at + 1 : at + len(row_K)] = start, start + row_K[:-1] + 1
            if (
                start + row_K[-1] + 1 < end
            ):  # of an unfinished prompt, whose last rows are dropped
                last.append(
                    (int(batch.idx_mapping_np[request]), int(start + row_K[-1] + 1))
                )
        for state, row in last:
            next_prefill_tokens[0, state] = batch.input_ids[row]
        return replace(
            without_dropped(batch, feed),
            input_ids=batch.input_ids[self._feeder.tensor(from_K)],
        )

    def _attention(self, batch: InputBatch) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and slots of the drafter's own entries."""
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping[: batch.num_reqs],
            batch.query_start_loc,
            batch.positions,
            batch.num_tokens,
        )
        metadata = self.model_state.prepare_attn(
            batch,
            CUDAGraphMode.NONE,
            tuple(
                table[: batch.num_reqs]
                for table in self.block_tables.input_block_tables
            ),
            slots,
            self.attn_groups,
            self.kv_cache_config,
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)
