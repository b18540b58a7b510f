"""A target VLM on one device: it also decodes, one sequence at a time, as the `Target` of the decoders.

Shapes: B samples, L positions, N tokens of one decoding step, K committed rows, A rotary axes, D hidden
width, S committed positions, U visual tokens.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.pipelines.targets.capture import Transcript
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.families.family import Visual
from vlmdistill.pipelines.targets.fused_decoder import Decoder
from vlmdistill.pipelines.targets.generation import Sampler, continue_batch
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.stores.schema import Feature

HIDDEN_TEXT = Feature("hidden", "text")


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

    @property
    def passes(self) -> int:
        """Forward passes after a prefill so far, whoever asked for them."""
        return self._decoder.passes

    @cached_property
    def _decoder(self) -> Decoder:
        with torch.inference_mode(False), torch.no_grad():  # the weights can still be used in training
            return Decoder(self._text, compiled=self._compiled)

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[EncodedPrompt], max_new_tokens: int, sampler: Sampler
    ) -> list[list[int]]:
        layers, lengths = self._decoder.layers, [prompt.length for prompt in prompts]
        draw = sampler.begin(self.device)
        cache = BatchKVCache(layers.shape, lengths, layers.embed_VD)
        states = self._states(prompts, [Transcript.of(prompt) for prompt in prompts], (), cache)
        last_B = torch.tensor(lengths, device=self.device) - 1
        hidden_BD = states["hidden"][torch.arange(len(prompts), device=self.device), last_B]
        rope_B = torch.tensor([prompt.next_rope for prompt in prompts], device=self.device)
        return continue_batch(
            layers,
            cache,
            hidden_BD,
            rope_B,
            lambda h_BD: draw(self.logits(h_BD)),
            self.info.eos_ids,
            max_new_tokens,
        )

    def drafter(self, folder: Path) -> Proposer:
        """The drafter in a folder, for this target; see `checkpoint.load`."""
        return checkpoint.load(folder, self.head, self.info, provenance=self.provenance((), "float32"))

    def prefill(
        self,
        prompt: EncodedPrompt,
        features: Collection[Feature] = (),
        on_encoded: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Start a new sequence: run a prompt and return its tokens with `features` and hidden.text."""
        self._prompt, self.sequence = prompt, self.sequence + 1
        wanted = {HIDDEN_TEXT, *features}
        with torch.inference_mode():
            states = self._prefill(prompt, {f.source for f in wanted}, on_encoded)
            return Transcript.of(prompt).batch({name: state[0] for name, state in states.items()}, wanted)

    def _prefill(
        self, prompt: EncodedPrompt, sources: Collection[str], on_encoded: Callable[[], None]
    ) -> dict[str, Tensor]:
        """Run a prompt into the decoder's cache: states by source [1, L, D]."""
        cache = self._decoder.start(prompt.length, prompt.next_rope)
        embedded = self._embed([prompt], [Transcript.of(prompt)])
        on_encoded()
        states = self._run(*embedded, sources, cache)
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
        return self._decoder.extend(ids_N, depth_N, visible_NN, sources)

    @torch.inference_mode()
    def commit(self, rows_K: Tensor) -> None:
        """Keep these rows of the last `extend`, see `Target.commit`."""
        self._decoder.commit(rows_K)

    @torch.inference_mode()
    def attention(self) -> Tensor:
        """The attention of the text after the last visual token to each visual token: float32 [U].

        Mean over that text, all heads and layers. Call it after `prefill`, before anything is committed.
        """
        prompt = self._last_prompt
        if not prompt.spans:
            return torch.zeros(0, device=self.device)
        first = prompt.spans[-1].start + prompt.spans[-1].length
        ids_N = prompt.ids_L[first:].to(self.device)
        weight_S = self._decoder.attention(ids_N, prompt.rope_AL[0, first:].to(self.device), first)
        return weight_S[prompt.visual_L.to(self.device)]

    @torch.inference_mode()
    def without(self, keep_U: Tensor) -> Decoder:
        """A second sequence over the same weights: the last prompt with only these visual tokens (bool)."""
        prompt, keep_U = self._last_prompt, keep_U.to(self.device)
        embed_1LD, rope_A1L, visual_1L, visual = self._embed([prompt], [Transcript.of(prompt)])
        keep_L = ~visual_1L[0]
        keep_L[visual_1L[0]] = keep_U
        if visual is not None:
            visual = Visual(visual.embed_UD[keep_U], tuple(level[keep_U] for level in visual.deepstack))
        reader, length = Decoder(self._text, self._decoder.layers), int(keep_L.sum())
        cache = reader.start(length, prompt.next_rope)
        self._run(embed_1LD[:, keep_L], rope_A1L[:, :, keep_L], visual_1L[:, keep_L], visual, (), cache)
        cache.length = length
        return reader

    @property
    def _last_prompt(self) -> EncodedPrompt:
        assert self._prompt is not None, "prefill comes first"
        return self._prompt
