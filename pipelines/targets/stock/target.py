"""A target whose forward passes are the stock model's: any family, any text model.

Shapes: B samples, L positions, U visual tokens.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from vlmdistill.pipelines.targets.batching import pad
from vlmdistill.pipelines.targets.capture import Transcript
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.stock.decoder import StockDecoder, watched
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.targets.text_layers import cache_argument
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import TargetError


class StockTarget(VisionLanguageTarget):
    """A loaded target VLM that runs through the stock forward pass."""

    _generate = TargetModel._generate

    @cached_property
    def _decoder(self) -> StockDecoder:  # type: ignore[override]
        return StockDecoder(self._text, 3 if self.family.mrope else 1)

    def _states(
        self,
        prompts: Sequence[EncodedPrompt],
        sequences: Sequence[Transcript],
        sources: Collection[str],
        cache: Any = None,
    ) -> dict[str, Tensor]:
        inputs = self._stock_inputs(prompts, sequences)
        if inputs is None:  # images of different sizes
            self._check_readable(prompts)
            return self._one_by_one(prompts, sequences, sources)
        caching = {
            cache_argument(self.model.model): cache,
            "use_cache": cache is not None,
        }
        with (
            self._hidden_placeholders(inputs, sequences),
            watched(self._text.layers, sources) as states,
        ):
            output = self.model.model(**inputs, **caching)
        return {**states, "hidden": output.last_hidden_state}

    def _one_by_one(
        self,
        prompts: Sequence[EncodedPrompt],
        sequences: Sequence[Transcript],
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        """The states of a batch [B, L, D], of one pass for each prompt."""
        rows: dict[str, list[Tensor]] = {}
        for prompt, sequence in zip(prompts, sequences, strict=True):
            states = self._states([prompt], [sequence], sources)
            for source, state_1LD in states.items():
                rows.setdefault(source, []).append(state_1LD[0].T)
        padded = {source: pad(of_source, 0) for source, of_source in rows.items()}
        return {source: state.transpose(1, 2) for source, state in padded.items()}

    def _prefill(
        self,
        prompt: EncodedPrompt,
        sources: Collection[str],
        on_encoded: Callable[[], None],
    ) -> dict[str, Tensor]:
        cache = self._decoder.start(prompt.length, prompt.next_rope)
        first = self._text.layers[0].register_forward_pre_hook(lambda *_: on_encoded())
        try:
            return self._states([prompt], [Transcript.of(prompt)], sources, cache)
        finally:
            first.remove()

    def attention(self) -> Tensor:
        """TargetError: the stock kernels give no attention weights."""
        raise TargetError(
            f"{self.name}: drafts from the target's attention need fused layers: use "
            "another drafter"
        )

    def without(self, keep_U: Tensor) -> Any:
        """TargetError: see `attention`."""
        return self.attention()
