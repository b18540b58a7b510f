"""A target VLM on one device, which also decodes, one sequence at a time.

Shapes: B samples, L positions, N tokens of one decoding step, A rotary axes, D hidden
width, S committed positions, U visual tokens.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import trained_thinking
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.devices import free_bytes
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.transfer import place
from vlmdistill.pipelines.targets.batching import CPU_BATCH
from vlmdistill.pipelines.targets.capture import Transcript
from vlmdistill.pipelines.targets.checkpoints.template import (
    DEFAULT,
    LOSS,
    PROBE,
    Thinking,
)
from vlmdistill.pipelines.targets.encode import EncodedPrompt, warn_once
from vlmdistill.pipelines.targets.fused_decoder import Decoder
from vlmdistill.pipelines.targets.generation import Prefilled, Sampler, generate_batch
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.targets.text_layers import LayerInputs
from vlmdistill.stores.errors import PromptError
from vlmdistill.stores.schema import Feature

HIDDEN_TEXT = Feature("hidden", "text")
GPU_BATCH = 512
"""The most sequences of a batch: with more, a step is bound by arithmetic and gains nothing."""
PASS_BYTES = 4 << 30  # for the states of a prefill
SAMPLED_BYTES = 40
"""Bytes of each logit while a token is drawn: float32, and several float64 copies."""


@dataclass(frozen=True)
class Arithmetic:
    """The settings of torch that change how fast or how exactly a pass is computed."""

    threads: int
    cpu_precision: str  # of products of float32
    gpu_precision: str  # likewise
    autocast: bool

    @classmethod
    def of(cls, device: torch.device) -> "Arithmetic":
        """The settings now."""
        return cls(
            threads=torch.get_num_threads(),
            cpu_precision=torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
            gpu_precision=torch.backends.cuda.matmul.fp32_precision,
            autocast=torch.is_autocast_enabled(device.type),
        )


class VisionLanguageTarget(TargetModel):
    """A loaded target VLM, which also verifies draft trees; `load_target` makes one.

    Args:
        compiled: Decoding steps run as `torch.compile` programs.
        loaded: What loading gives: the model, its processor, its family and its folder.
    """

    def __init__(self, *, compiled: bool = False, **loaded: Any):
        super().__init__(**loaded)
        self._compiled = compiled
        self._prompt: EncodedPrompt | None = None  # of the last prefill
        self.sequence = 0  # prefills so far
        self.computed_with: set[Arithmetic] | None = None
        """A set to which each call of `extend` adds its settings; an evaluation gives one."""

    @property
    def passes(self) -> int:
        """Calls of `extend` so far, in all sequences."""
        return self._decoder.passes

    @cached_property
    def _decoder(self) -> Decoder:
        # Not in inference mode: the fused weights can still be used in training.
        with torch.inference_mode(False), torch.no_grad():
            return Decoder(self._text, compiled=self._compiled)

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[EncodedPrompt],
        max_new_tokens: int,
        sampler: Sampler,
        batch_size: int | None,
    ) -> Iterator[tuple[int, list[int]]]:
        layers = self._decoder.layers
        draw = sampler.begin(self.device)
        lengths = [prompt.length for prompt in prompts]
        capacity = max(lengths) + max_new_tokens
        slots = min(batch_size or self._slots(capacity), len(prompts))
        cache = BatchKVCache(layers.shape, slots, capacity, layers.embed_VD)
        yield from generate_batch(
            layers,
            cache,
            lengths,
            lambda numbers: self._admit(prompts, numbers, cache),
            lambda hidden_BD: draw(self.logits(hidden_BD)),
            self.info.eos_ids,
            max_new_tokens,
        )

    def _admit(
        self,
        all_prompts: Sequence[EncodedPrompt],
        numbers: Sequence[int],
        cache: BatchKVCache,
    ) -> Prefilled:
        """Read the prompts of these numbers into free slots of a cache."""
        prompts = [all_prompts[number] for number in numbers]
        sequences = [Transcript.of(prompt) for prompt in prompts]
        admitted = cache.admit([prompt.length for prompt in prompts])
        hidden_BLD = self._states(prompts, sequences, (), admitted)["hidden"]
        last_B = torch.tensor([prompt.length - 1 for prompt in prompts])
        start_B = torch.arange(len(prompts)) * hidden_BLD.shape[1]
        row_B = start_B + last_B
        rows_ND = hidden_BLD.flatten(0, 1)
        hidden_BD = rows_ND.index_select(0, place(row_B, self.device))
        try:
            self.check_finite(hidden_BD)
        except PromptError as error:
            error.at = numbers[error.at]
            raise
        return Prefilled(hidden_BD, [prompt.next_rope for prompt in prompts])

    def _slots(self, capacity: int) -> int:
        """The sequences of `capacity` positions that are generated at a time.

        On a GPU these are as many as its memory holds.
        """
        if self.device.type != "cuda":
            return CPU_BATCH
        free = free_bytes(self.device) - PASS_BYTES
        position_bytes = self._decoder.layers.shape.position_bytes(self.dtype)
        logits_bytes = SAMPLED_BYTES * self.info.vocab_size
        fitting = free // (position_bytes * capacity + logits_bytes)
        return max(1, min(GPU_BATCH, fitting))

    def drafter(self, folder: Path) -> Proposer:
        """The drafter in a folder, for this target; see `checkpoint.load`.

        The log tells of one that was trained with another mode of thinking.
        """
        drafter = checkpoint.load(
            folder, self.head, self.info, provenance=self.provenance((), "float32")
        )
        trained = cast("Thinking | None", trained_thinking(folder))
        if trained is not None and not self._thinks_as(trained):
            warn_once(
                f"{folder.name} was trained with thinking {trained or DEFAULT}, and "
                f"decodes with thinking {self.thinking or DEFAULT}: {LOSS}",
                self.name,
            )
        return drafter

    def _thinks_as(self, mode: Thinking) -> bool:
        """Whether another mode of thinking has the target's own, or comes to that."""
        if mode in ("mixed", self.thinking):
            return True
        if self.thinking == "mixed":
            return False
        own_L = self.encode([PROBE]).ids_L
        return torch.equal(own_L, self.encode([PROBE], mode).ids_L)

    def prefill(
        self,
        prompt: EncodedPrompt,
        features: Collection[Feature] = (),
        on_encoded: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Start a new sequence: run a prompt and return its tokens with `features` and hidden.text.

        PromptError if its last state is not finite.
        """
        self._prompt = prompt
        self.sequence += 1
        needed = {HIDDEN_TEXT, *features}
        sources = {feature.source for feature in needed}
        with torch.inference_mode():
            states = self._prefill(prompt, sources, on_encoded)
            self.check_finite(states["hidden"][:, -1])
            of_prompt = {name: state_1LD[0] for name, state_1LD in states.items()}
            return Transcript.of(prompt).batch(of_prompt, needed)

    def _prefill(
        self,
        prompt: EncodedPrompt,
        sources: Collection[str],
        on_encoded: Callable[[], None],
    ) -> dict[str, Tensor]:
        """Run a prompt into the decoder's cache: states by source [1, L, D]."""
        cache = self._decoder.start(prompt.length, prompt.next_rope)
        embedded = self._embed([prompt], [Transcript.of(prompt)])
        on_encoded()
        states = self._run(embedded, sources, cache)
        cache.length = prompt.length
        return states

    @torch.inference_mode()
    def extend(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None = None,
        sources: Collection[str] = ("hidden",),
    ) -> dict[str, Tensor]:
        """One forward pass over N tokens after the committed prefix, see `Target.extend`."""
        if self.computed_with is not None:
            self.computed_with.add(Arithmetic.of(self.device))
        return self._decoder.extend(ids_N, depth_N, visible_NN, sources)

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last `extend`, see `Target.commit`."""
        self._decoder.commit(rows)

    @torch.inference_mode()
    def attention(self) -> Tensor:
        """The attention of the text after the last visual token to each visual token: float32 [U].

        It is the mean over that text, all heads and layers. Call it after `prefill`,
        before anything is committed.
        """
        prompt = self._last_prompt
        if not prompt.spans:
            return torch.zeros(0, device=self.device)
        last = prompt.spans[-1]
        first = last.start + last.length
        ids_N = prompt.ids_L[first:].to(self.device)
        rope_N = prompt.rope_AL[0, first:].to(self.device)
        weight_S = self._decoder.attention(ids_N, rope_N, first)
        return weight_S[prompt.visual_L.to(self.device)]

    @torch.inference_mode()
    def without(self, keep_U: Tensor) -> Decoder:
        """A second sequence over the same weights: the last prompt with only some visual tokens.

        `keep_U` (bool) marks the visual tokens that stay.
        """
        prompt = self._last_prompt
        embedded = self._embed([prompt], [Transcript.of(prompt)])
        kept = _with_visual(embedded, keep_U.to(self.device))
        length = kept.hidden_BLD.shape[1]
        reader = Decoder(self._text, self._decoder.layers)
        cache = reader.start(length, prompt.next_rope)
        self._run(kept, (), cache)
        cache.length = length
        return reader

    @property
    def _last_prompt(self) -> EncodedPrompt:
        assert self._prompt is not None, "prefill comes first"
        return self._prompt


def _with_visual(embedded: LayerInputs, keep_U: Tensor) -> LayerInputs:
    """The inputs of one prompt without the other visual tokens."""
    length = embedded.hidden_BLD.shape[1]
    visual_L = torch.zeros(length, dtype=torch.bool, device=keep_U.device)
    visual_L[embedded.visual_U] = True
    keep_L = ~visual_L
    keep_L[embedded.visual_U] = keep_U
    return LayerInputs(
        hidden_BLD=embedded.hidden_BLD[:, keep_L],
        rope_ABL=embedded.rope_ABL[:, :, keep_L],
        visual_U=visual_L[keep_L].nonzero().flatten(),
        deepstack=tuple(level_UD[keep_U] for level_UD in embedded.deepstack),
    )
