"""The stock model, run the plain way: one sample, no padding, its own positions, its own forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.video_utils import VideoMetadata

from vlmdistill.pipelines.targets.text_layers import cache_argument
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

Messages = list[dict[str, Any]]
IMAGES = ("pixel_values", "image_sizes", "batch_num_images")


class Stock:
    """A second copy of a checkpoint that shares nothing with the target but files and processor."""

    def __init__(
        self, folder: Path, target: VisionLanguageTarget, attention: str = "sdpa"
    ):
        self.processor = target.processor
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation=attention
        ).eval()

    def inputs(self, messages: Messages) -> dict[str, Any]:
        """The processor's batch of one; videos are arrays, two frames a second."""
        parts = [part for message in messages for part in message["content"]]
        metadata = [
            VideoMetadata(
                total_num_frames=count, fps=2.0, frames_indices=list(range(count))
            )
            for count in (
                len(part["video"]) for part in parts if part["type"] == "video"
            )
        ]
        batch = dict(
            self.processor.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"video_metadata": metadata} if metadata else {},
            )
        )
        if isinstance(
            batch.get("pixel_values_videos"), list
        ):  # of several lengths: the model takes one
            videos = [video[None] for video in batch.pop("pixel_values_videos")]
            images = {name: batch.pop(name) for name in IMAGES if name in batch}
            with torch.inference_mode():
                seen = [self.model.model.get_video_features(video) for video in videos]
                image = (
                    self.model.model.get_image_features(**images) if images else None
                )
            seen[0].pooler_output = torch.cat([out.pooler_output for out in seen], 1)
            batch["mm_encoder_outputs"] = {"video": seen[0], "image": image}
        return batch

    @torch.inference_mode()
    def states(self, messages: Messages, more: Sequence[int] = ()) -> dict[str, Tensor]:
        """Every state of every position: hidden, embed, and the input of each layer, [L, D].

        The prompt in one pass, what comes after it in a second one over the first's cache, as `generate`
        does: after a video, M-RoPE goes on elsewhere than inside of a prompt.
        """
        batch, parts = self.inputs(messages), list[dict[str, Tensor]]()
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        with self._watched(parts):
            out = self.model(**batch, output_hidden_states=True, use_cache=True)
            outs = [out]
            if more:
                ids = torch.tensor([list(more)])
                outs.append(
                    self.model(
                        input_ids=ids,
                        output_hidden_states=True,
                        use_cache=True,
                        **{cache_argument(self.model): out.past_key_values},
                    )
                )
        seen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        embed = torch.cat([out.hidden_states[0][0] for out in outs])
        assert torch.equal(seen["layer0"], embed)
        seen["embed"], seen["hidden"] = (
            embed,
            torch.cat([out.hidden_states[-1][0] for out in outs]),
        )
        seen["logits"] = torch.cat([out.logits[0] for out in outs])
        seen["ids"] = torch.cat(
            [batch["input_ids"][0], torch.tensor(list(more), dtype=torch.long)]
        )
        return seen

    @contextmanager
    def _watched(self, parts: list[dict[str, Tensor]]) -> Iterator[None]:
        """The input of every layer, for each pass."""

        def watch(number: int) -> Any:
            def hook(
                module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> None:
                if not number:
                    parts.append({})
                parts[-1][f"layer{number}"] = (
                    args[0] if args else kwargs["hidden_states"]
                )[0].clone()

            return hook

        handles = [
            layer.register_forward_pre_hook(watch(number), with_kwargs=True)
            for number, layer in enumerate(self.model.model.language_model.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def generate(self, messages: Messages, count: int, **more: Any) -> Any:
        """Its own greedy generate."""
        return self.model.generate(
            **self.inputs(messages), max_new_tokens=count, do_sample=False, **more
        )
