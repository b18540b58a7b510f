"""The proposer that feeds exported drafters as they were trained, on the V1 runner of vLLM 0.32.

Shapes: B requests of a batch, N rows of a step, K rows that are kept, D hidden.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models import supports_multimodal
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.medusa import MedusaProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vlmdistill.pipelines.engines.vllm.entry_map import EntryMap, Shown, StepRows
from vlmdistill.pipelines.engines.vllm.limits import feeding_of


class ChosenProposer(EagleProposer):
    """vLLM's proposer for its own drafters, and `ServedProposer` for exported ones."""

    def __new__(cls, vllm_config: VllmConfig, *_: object, **__: object) -> "ChosenProposer":
        """Choose by the drafter's folder."""
        return object.__new__(cls if feeding_of(vllm_config) is None else ServedProposer)


class ServedMedusaProposer(MedusaProposer):
    """vLLM's proposer, which gives exported heads the target's LM head."""

    def load_model(self, target_model: Any) -> None:
        """Load the heads."""
        super().load_model(target_model)
        if feeding_of(self.vllm_config) is not None:
            language = (
                target_model.get_language_model() if supports_multimodal(target_model) else target_model
            )
            self.model.lm_head = language.lm_head


@dataclass
class _Request:
    """A request of the batch, and what is known of its prompt."""

    state: Any
    entries: EntryMap | None
    """None: it has no visual tokens."""
    sources: list[tuple[str, int]] = field(default_factory=list)
    """Of each image: the key of its embeddings, and the first of them."""
    joined: dict[int, Tensor] = field(default_factory=dict)
    """What each image joins to later states, once it is known."""


class ServedProposer(ChosenProposer):
    """Feeds a drafter true positions and slots, visual embeddings, or no visual tokens at all.

    vLLM gives the drafter of an M-RoPE target its temporal coordinate as position, and computes slots of the
    KV cache from it (llm_base_proposer.py `_set_positions`, `_update_positions_dependent_metadata`): after
    an image both lag. Here positions and slots follow from the length of the sequence.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        feeding = feeding_of(vllm_config)
        assert feeding is not None
        self.feeding, self.runner = feeding, runner
        self._known: dict[str, _Request] = {}
        self._joined_BD: Tensor | None = None
        self._text_states: dict[str, Tensor] = {}

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Shift tokens as vLLM does, correct the positions, and drop entries where the drafter has none."""
        count, sampled_B, batch = super().set_inputs_first_pass(*args, **kwargs)
        lengths_B = batch.naive_query_lens()
        offset_B = batch.seq_lens - batch.query_start_loc[1:]
        offset_N = torch.repeat_interleave(offset_B, lengths_B, output_size=count)
        position_N = self.arange[:count] + offset_N
        self.positions[:count] = position_N
        starts = batch.query_start_loc_cpu.tolist()
        self._continue_prompts(starts)
        if self.feeding.visual != "dropped":
            return count, sampled_B, batch
        steps = self._steps(starts)
        if self.feeding.compression is not None:
            self._compress(steps, starts)
        if any(step.changed for step in steps):
            if self.feeding.after_image == "text":
                self._pair_with_text(steps, starts)
            count, sampled_B, batch = self._drop(steps, position_N, sampled_B, batch)
        if self._joins:
            self._joined_BD = self.model.model.joined_ND[sampled_B.long()]
        return count, sampled_B, batch

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs: tuple[list[Tensor], Tensor] | None
    ) -> tuple[dict[str, Any], int]:
        """Mark the rows of bare visual embeddings, and start to count guesses."""
        if self.feeding.visual == "raw" and mm_embed_inputs is not None:
            self.model.model.raw_N = mm_embed_inputs[1].to(self.device)
        if self._counts:
            self.model.model.guess_1.zero_()
        made: tuple[dict[str, Any], int] = super().build_model_inputs_first_pass(
            num_tokens, num_input_tokens, mm_embed_inputs
        )
        return made

    def _update_positions_dependent_metadata(
        self,
        positions: Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        batch_size: int,
        input_batch_size: int,
        block_size: int,
    ) -> Tensor:
        """One guess further: each sequence is one entry longer, and its slot is the last one.

        A guess beyond the longest sequence is written nowhere and sees a single entry, as in vLLM.
        """
        batch = common_attn_metadata
        over_B = positions + 1 >= self.max_model_len
        position_B = torch.where(over_B, 0, positions + 1)
        index_B = torch.where(over_B, 0, batch.seq_lens).long()
        slot_B = _slots(index_B, torch.arange(batch_size, device=self.device), batch, block_size)
        self.positions[:batch_size] = position_B
        self._slot_mapping_buffer[:batch_size] = torch.where(over_B, PADDING_SLOT_ID, slot_B)
        self._slot_mapping_buffer[batch_size:input_batch_size] = PADDING_SLOT_ID
        batch.slot_mapping = self._slot_mapping_buffer[:batch_size]
        batch.seq_lens = torch.where(over_B, 1, batch.seq_lens + 1).to(batch.seq_lens.dtype)
        batch.max_seq_len = min(batch.max_seq_len + 1, self.max_model_len)
        if batch.seq_lens_cpu_upper_bound is not None:
            batch.seq_lens_cpu_upper_bound = batch.seq_lens_cpu_upper_bound + 1
        if self._counts:
            self.model.model.guess_1.add_(1)
        if self._joined_BD is not None:
            self.model.model.joined_ND[:batch_size] = self._joined_BD
        return position_B

    @property
    def _counts(self) -> bool:
        """The model reads the number of guesses."""
        return self.feeding.guesses > 0 or self.feeding.placeholder

    @property
    def _joins(self) -> bool:
        """The model reads a vector of the last image beside each state."""
        return self.feeding.compression is not None and self.feeding.compression.joined

    def _requests(self) -> dict[str, Any]:
        """The requests of the batch, in the order of their rows."""
        return {name: self.runner.requests[name] for name in self.runner.input_batch.req_ids}

    def _continue_prompts(self, starts: list[int]) -> None:
        """End the rows of an unfinished prompt with its next token.

        vLLM takes the prompt's last token (llm_base_proposer.py `prepare_next_token_ids_padded`), which stays
        in the drafter's KV cache at the end of each step.
        """
        for (start, end), state in zip(pairwise(starts), self._requests().values(), strict=True):
            read = state.num_computed_tokens + end - start
            if read < state.num_prompt_tokens:
                self.input_ids[end - 1] = state.get_token_id(read)

    def _steps(self, starts: list[int]) -> list[StepRows]:
        """The rows of each request of the batch, [B]."""
        known = self._known
        self._known = {
            name: known[name] if name in known and known[name].state is state else self._request(state)
            for name, state in self._requests().items()
        }
        everything = EntryMap.of(np.zeros(0, dtype=bool), "visual")
        return [
            (one.entries or everything).step(one.state.num_computed_tokens, end - start)
            for (start, end), one in zip(pairwise(starts), self._known.values(), strict=True)
        ]

    def _request(self, state: Any) -> _Request:
        """The entries of one request's prompt."""
        if not state.mm_features:
            return _Request(state, None)
        visual_P = np.zeros(state.num_prompt_tokens, dtype=bool)
        images, sources = list[Shown](), list[tuple[str, int]]()
        for feature in state.mm_features:
            shown = feature.mm_position
            own_L = np.ones(shown.length, bool) if shown.is_embed is None else shown.is_embed.cpu().numpy()
            visual_P[shown.offset : shown.offset + shown.length] |= own_L
            edges = np.flatnonzero(np.diff(np.concatenate([[False], own_L, [False]]))).tolist()
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                images.append(Shown(shown.offset + start, end - start))
                sources.append((feature.identifier, int(own_L[:start].sum())))
        entries = EntryMap.of(visual_P, self.feeding.after_image, images, self.feeding.compression)
        return _Request(state, entries, sources)

    def _compress(self, steps: list[StepRows], starts: list[int]) -> None:
        """Compress the images that rows of this step carry, or that their states are joined with."""
        model, first = self.model.model, 0
        rows, carried = list[int](), list[Tensor]()
        for (start, end), step, one in zip(pairwise(starts), steps, self._known.values(), strict=True):
            kept_K = np.flatnonzero(step.kept_N)
            image_K, query_K = step.image_N[kept_K], step.query_N[kept_K]
            here = slice(first, first + len(kept_K))
            if self._joins:
                model.joined_ND[here] = 0
            for image in np.unique(image_K[image_K >= 0]).tolist():
                of_K = image_K == image
                carries_K = np.flatnonzero(of_K & (query_K >= 0))
                if len(carries_K) or (self._joins and image not in one.joined):
                    visual_LD = self._visual(one, image, start, end)
                    if visual_LD is None:
                        # The row before an image carries an entry if the image has no more tokens than it
                        # has entries. Where a step ends at that row, it stays as it is.
                        continue
                    out_QD = model.compressor(visual_LD)
                    rows += (first + carries_K).tolist()
                    carried.append(out_QD[query_K[carries_K].tolist()])
                    if self._joins:
                        one.joined[image] = out_QD[-1]
                if self._joins:
                    model.joined_ND[here][self._tensor(of_K)] = one.joined[image]
            first += len(kept_K)
        if rows:
            model.compressed = torch.tensor(rows, device=self.device), torch.cat(carried)

    def _visual(self, one: _Request, image: int, start: int, end: int) -> Tensor | None:
        """The visual tokens of an image as the drafter reads them, [L, D]; None: not known in this step.

        The rows of the request are those from `start` up to and without `end`.
        """
        assert one.entries is not None
        assert self.feeding.compression is not None
        shown = one.entries.images[image]
        if self.feeding.compression.reads == "hidden":
            first = start + shown.start - one.state.num_computed_tokens
            if first + shown.length > end:
                return None
            read_ND = self.hidden_states
        else:
            key, first = one.sources[image]
            read_ND = self.runner.encoder_cache.get(key)
            if read_ND is None:
                return None
        # The first D columns, since Qwen3-VL has deep features after its embeddings.
        visual_LD: Tensor = read_ND[first : first + shown.length, : self.hidden_size].to(self.dtype)
        return visual_LD

    def _pair_with_text(self, steps: list[StepRows], starts: list[int]) -> None:
        """Put the state of the last text token into the entries after an image (HiViS eq. 3).

        Where a prompt is read in several steps, that state may come from an earlier one: it is kept until
        the prompt is read.
        """
        requests = self.runner.requests  # one that was aborted leaves its state behind
        self._text_states = {name: held for name, held in self._text_states.items() if name in requests}
        hidden_ND = self.hidden_states.clone() if any(_moves(step) for step in steps) else self.hidden_states
        for (start, end), step, (name, one) in zip(pairwise(starts), steps, self._known.items(), strict=True):
            state = one.state
            held_1D = self._text_states.pop(name, None)
            row_N, source_N = np.arange(end - start), step.source_N
            for row in np.flatnonzero(step.kept_N & (source_N != row_N)):
                earlier = source_N[row] < 0
                if earlier and held_1D is None:
                    continue  # no text before: the row is there only because a step needs one
                self.hidden_states[start + row] = held_1D if earlier else hidden_ND[start + source_N[row]]
            if state.num_computed_tokens + end - start < state.num_prompt_tokens:
                last = source_N[-1]
                if last >= 0:
                    held_1D = hidden_ND[start + last].clone()
                if held_1D is not None:
                    self._text_states[name] = held_1D

    def _drop(
        self, steps: list[StepRows], position_N: Tensor, sampled_B: Tensor, batch: CommonAttentionMetadata
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Move the kept rows together; they fill the drafter's KV cache without gaps."""
        kept_N = np.concatenate([step.kept_N for step in steps])
        lengths_B = np.array([int(step.kept_N.sum()) for step in steps])
        dropped_N = self._tensor(np.concatenate([step.dropped_N for step in steps]))
        dropped_B = self._tensor(np.array([step.dropped for step in steps]))
        kept_K = self._tensor(np.flatnonzero(kept_N))
        count = len(kept_K)
        index_K = (position_N - dropped_N)[kept_K]
        self.input_ids[:count] = self.input_ids[kept_K]
        self.hidden_states[:count] = self.hidden_states[kept_K]
        turned_N = self._tensor(np.concatenate([step.turned_N for step in steps]))
        rotary_K = index_K if self.feeding.positions == "compact" else (position_N + turned_N)[kept_K]
        self.positions[:count] = rotary_K
        row_N = self._tensor(np.cumsum(kept_N) - 1)
        starts_cpu = torch.from_numpy(np.append(0, np.cumsum(lengths_B)).astype(np.int32))
        request_K = self._tensor(np.repeat(np.arange(len(steps)), lengths_B))
        upper_B = batch.seq_lens_cpu_upper_bound
        made = batch.replace(
            query_start_loc=starts_cpu.to(self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=(batch.seq_lens - dropped_B).to(batch.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if upper_B is None else upper_B - dropped_B.cpu().to(upper_B.dtype),
            num_actual_tokens=count,
            max_query_len=int(lengths_B.max()),
            slot_mapping=_slots(index_K, request_K, batch, self.block_size),
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return count, row_N[sampled_B.long()].to(sampled_B.dtype), made

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _moves(step: StepRows) -> bool:
    """Some entry is paired with the state of another row."""
    return bool((step.kept_N & (step.source_N != np.arange(len(step.kept_N)))).any())


def _slots(index_N: Tensor, request_N: Tensor, batch: CommonAttentionMetadata, block_size: int) -> Tensor:
    """Where the drafter's KV cache holds entry `index_N` of each row's request, [N]."""
    block_N: Tensor = batch.block_table_tensor[request_N, index_N // block_size].long()
    return block_N * block_size + index_N % block_size
