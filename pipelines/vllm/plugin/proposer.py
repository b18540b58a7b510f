"""The proposer that feeds exported drafters as they were trained, on vLLM's V1 runner.

Shapes: B requests of a batch, N rows of a step, K rows that are kept, D hidden.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from vlmdistill.pipelines.vllm.plugin.entry_map import TextStates
from vlmdistill.pipelines.vllm.plugin.feeder import Feed, Feeder, Reading
from vlmdistill.pipelines.vllm.plugin.limits import feeding_of
from vlmdistill.pipelines.vllm.plugin.served_model import (
    BesideAnyTarget,
    with_last_state,
)


class ChosenProposer(BesideAnyTarget, EagleProposer):
    """vLLM's proposer for its own drafters, and `ServedProposer` for exported ones."""

    def __new__(
        cls, vllm_config: VllmConfig, *_: object, **__: object
    ) -> "ChosenProposer":
        """Choose by the drafter's folder."""
        return object.__new__(
            cls if feeding_of(vllm_config) is None else ServedProposer
        )


class ServedProposer(ChosenProposer):
    """Feeds a drafter true positions and slots, visual embeddings, or no visual tokens at all.

    vLLM gives the drafter of an M-RoPE target its temporal coordinate as position, and computes slots of the
    KV cache from it (llm_base_proposer.py `_set_positions`, `_update_positions_dependent_metadata`): after
    an image both lag. Here positions and slots follow from the length of the sequence.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any = None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        feeding = feeding_of(vllm_config)
        assert feeding is not None
        self.feeding = feeding
        self.runner = runner
        self._feeder: Feeder | None = None
        """None: vLLM's own class runs the drafter."""
        self._joined_BD: Tensor | None = None
        self._expanded = False
        """Positions are not the numbers of entries."""

    def load_model(self, target_model: Any) -> None:
        """Load the drafter."""
        super().load_model(target_model)
        if self.feeding.built is not None:
            drafter = self.model.model.drafter
            self._feeder = Feeder(drafter, self.device)
            drops = self.feeding.visual == "dropped"
            self._expanded = drops and drafter.config.positions == "expanded"
            if drafter.taps:
                target_model.register_forward_hook(with_last_state)

    def set_inputs_first_pass(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Shift tokens as vLLM does, correct the positions, and drop entries where the drafter has none."""
        count, sampled_B, batch = super().set_inputs_first_pass(*args, **kwargs)
        position_N = _positions(batch, count)
        self.positions[:count] = position_N
        starts = batch.query_start_loc_cpu.tolist()
        self._continue_prompts(starts)
        if self._feeder is None or self.feeding.visual != "dropped":
            return count, sampled_B, batch
        feed = self._feeder.feed(
            _reading(self.runner, starts),
            position_N,
            self.hidden_states[:count],
            self.model.model,
            self.runner.encoder_cache,
        )
        if feed is not None:
            count, sampled_B, batch = self._drop(feed, sampled_B, batch)
        if self._feeder.drafter.joins:
            self._joined_BD = self.model.model.joined_ND[sampled_B.long()]
        return count, sampled_B, batch

    def build_model_inputs_first_pass(
        self,
        num_tokens: int,
        num_input_tokens: int,
        mm_embed_inputs: tuple[list[Tensor], Tensor] | None,
    ) -> tuple[dict[str, Any], int]:
        """Mark the rows of bare visual embeddings, and start to count guesses."""
        if self.feeding.visual == "raw" and mm_embed_inputs is not None:
            _, is_visual_N = mm_embed_inputs
            self.model.model.mark_raw(is_visual_N)
        if self._feeder is not None:
            self.model.model.guesses = False
            self.model.model.guess_1.zero_()
        inputs: tuple[dict[str, Any], int] = super().build_model_inputs_first_pass(
            num_tokens, num_input_tokens, mm_embed_inputs
        )
        return inputs

    def _update_positions_dependent_metadata(
        self,
        positions: Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        batch_size: int,
        input_batch_size: int,
        block_size: int,
    ) -> Tensor:
        """One guess further: each sequence is one entry longer, and its slot is the last one.

        vLLM computes slots from positions; expanded ones are not the numbers of entries.
        """
        batch = common_attn_metadata
        number_B = positions
        if self._expanded:
            number_B = (batch.seq_lens - 1).long()
        position_B: Tensor = super()._update_positions_dependent_metadata(
            number_B, batch, batch_size, input_batch_size, block_size
        )
        if self._expanded:
            position_B = positions + 1
            self.positions[:batch_size] = position_B
        if self._feeder is not None:
            self.model.model.guesses = True
            self.model.model.guess_1.add_(1)
        if self._joined_BD is not None:
            self.model.model.joined_ND[:batch_size] = self._joined_BD
        return position_B

    def _continue_prompts(self, starts: list[int]) -> None:
        """End the rows of an unfinished prompt with its next token.

        vLLM takes the prompt's last token (llm_base_proposer.py `prepare_next_token_ids_padded`), which stays
        in the drafter's KV cache at the end of each step.
        """
        # Of these requests vLLM throws the sampled token away; they may have been preempted.
        unfinished_B = self.runner.discard_request_mask.np[: len(starts) - 1]
        for number in np.flatnonzero(unfinished_B):
            state = self.runner.requests[self.runner.input_batch.req_ids[number]]
            start, end = starts[number : number + 2]
            read = state.num_computed_tokens + end - start
            self.input_ids[end - 1] = state.get_token_id(read)

    def _drop(
        self, feed: Feed, sampled_B: Tensor, batch: CommonAttentionMetadata
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Move the kept rows together; they fill the drafter's KV cache without gaps."""
        count = len(feed.index_K)
        rotary_K = feed.index_K
        if feed.shift_K is not None:
            rotary_K = rotary_K + feed.shift_K
        self.positions[:count] = rotary_K
        slot_K = _slots(feed.index_K, feed.request_K, batch, self.block_size)
        if feed.hidden_KD.data_ptr() != self.hidden_states.data_ptr():
            self.hidden_states[:count] = feed.hidden_KD
        kept = feed.kept
        if kept is not None:
            self.input_ids[:count] = self.input_ids[kept.kept_K]
            sampled_B = kept.row_N[sampled_B.long()].to(sampled_B.dtype)
        return count, sampled_B, _without_dropped(batch, feed, slot_K)


class ChosenBlockProposer(BesideAnyTarget, DFlashProposer):
    """vLLM's proposer of block drafters: with true positions for ours, and with the states of text alone.

    See `ServedProposer` on positions: slots of the context follow from them.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any = None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self._feeder = Feeder(TextStates(), device)

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Correct the positions, and leave out the states of visual tokens where the drafter has none."""
        feeding = feeding_of(self.vllm_config)
        if feeding is not None:
            target_positions = _positions(cad, len(target_token_ids))
        if feeding is not None and feeding.visual == "dropped":
            target_hidden_states = target_hidden_states[: len(target_token_ids)]
            feed = self._feeder.feed(
                _reading(self.runner, cad.query_start_loc_cpu.tolist()),
                target_positions,
                target_hidden_states,
                None,
                {},
            )
            if feed is not None:
                if feed.kept is not None:
                    target_token_ids = target_token_ids[feed.kept.kept_K]
                target_hidden_states = feed.hidden_KD
                target_positions = feed.index_K
                cad = _without_dropped(cad, feed, cad.slot_mapping)
        inputs: tuple[int, Tensor, CommonAttentionMetadata] = (
            super().set_inputs_first_pass(
                target_token_ids,
                next_token_ids,
                target_positions,
                target_hidden_states,
                token_indices_to_sample,
                cad,
                num_rejected_tokens_gpu,
            )
        )
        return inputs


def _positions(batch: CommonAttentionMetadata, count: int) -> Tensor:
    """The index of each row of a step in its sequence, [N]."""
    lengths_B = batch.naive_query_lens()
    offset_B = batch.seq_lens - batch.query_start_loc[1:]
    offset_N = torch.repeat_interleave(offset_B, lengths_B, output_size=count)
    return torch.arange(count, device=offset_N.device) + offset_N


def _reading(runner: Any, starts: list[int]) -> Reading:
    """The requests of the batch, as the feeder takes them."""
    names = runner.input_batch.req_ids
    states = [runner.requests[name] for name in names]
    return Reading(
        names=names,
        media={
            name: state.mm_features for name, state in zip(names, states, strict=True)
        },
        prompt_B=np.array([state.num_prompt_tokens for state in states]),
        first_B=np.array([state.num_computed_tokens for state in states]),
        starts=starts,
        alive=runner.requests,
    )


def _without_dropped(
    batch: CommonAttentionMetadata, feed: Feed, slots: Tensor
) -> CommonAttentionMetadata:
    """The batch as if the dropped tokens had never been read."""
    lengths_B = (batch.seq_lens - feed.dropped_B).to(batch.seq_lens.dtype)
    upper_B = batch.seq_lens_cpu_upper_bound
    if upper_B is not None:
        upper_B = upper_B - feed.cpu_dropped_B.to(upper_B.dtype)
    remaining: CommonAttentionMetadata = batch.replace(
        seq_lens=lengths_B,
        seq_lens_cpu_upper_bound=upper_B,
        slot_mapping=slots,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    if feed.kept is None:
        return remaining
    moved: CommonAttentionMetadata = remaining.replace(
        query_start_loc=feed.kept.starts,
        query_start_loc_cpu=feed.kept.cpu_starts,
        num_actual_tokens=len(feed.index_K),
        max_query_len=int(feed.kept.lengths_B.max()),
    )
    return moved


def _slots(
    index_N: Tensor, request_N: Tensor, batch: CommonAttentionMetadata, block_size: int
) -> Tensor:
    """Where the drafter's KV cache holds entry `index_N` of each row's request, [N]."""
    number_N = index_N // block_size
    block_N: Tensor = batch.block_table_tensor[request_N, number_N].long()
    return block_N * block_size + index_N % block_size
