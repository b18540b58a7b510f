"""The stock model, run the plain way: one sample, no padding, its own positions, its own forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from vlmdistill.pipelines.targets.base import VisionLanguageTarget

Messages = list[dict[str, Any]]


class Stock:
    """A second copy of a checkpoint that shares nothing with the target but files and processor."""

    def __init__(self, folder: Path, target: VisionLanguageTarget, attention: str = "sdpa"):
        self.processor = target.processor
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation=attention
        ).eval()

    def inputs(self, messages: Messages, more: Sequence[int] = ()) -> dict[str, Tensor]:
        """The processor's batch of one, with more tokens after the prompt."""
        batch = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        count = len(more)
        batch["input_ids"] = torch.cat([batch["input_ids"], torch.tensor([list(more)], dtype=torch.long)], 1)
        for name in ("attention_mask", "mm_token_type_ids"):
            if name in batch:
                filler = batch[name].new_full((1, count), int(name == "attention_mask"))
                batch[name] = torch.cat([batch[name], filler], 1)
        return dict(batch)

    @torch.inference_mode()
    def states(self, messages: Messages, more: Sequence[int] = ()) -> dict[str, Tensor]:
        """Every state of every position: hidden, embed, and the input of each layer, [L, D]."""
        seen: dict[str, Tensor] = {}
        with self._watched(seen):
            out = self.model(**self.inputs(messages, more), output_hidden_states=True)
        assert torch.equal(seen["layer0"], out.hidden_states[0][0])
        seen["embed"], seen["hidden"] = out.hidden_states[0][0], out.hidden_states[-1][0]
        seen["logits"] = out.logits[0]
        return seen

    @contextmanager
    def _watched(self, seen: dict[str, Tensor]) -> Iterator[None]:
        def watch(name: str) -> Any:
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[name] = (args[0] if args else kwargs["hidden_states"])[0].clone()

            return hook

        handles = [
            layer.register_forward_pre_hook(watch(f"layer{i}"), with_kwargs=True)
            for i, layer in enumerate(self.model.model.language_model.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def generate(self, messages: Messages, count: int, **more: Any) -> Any:
        """Its own greedy generate."""
        return self.model.generate(**self.inputs(messages), max_new_tokens=count, do_sample=False, **more)
