"""From a conversation to what the target reads: token ids, spans of visual tokens, rotary positions.

Shapes: L positions of the expanded prompt, A rotary axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from torch import Tensor

from vlmdistill.pipelines.targets.family import Family, Inputs
from vlmdistill.pipelines.targets.folder import first_line
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Span

Messages = Sequence[Mapping[str, Any]]
NOT_VISUAL = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Prompt:
    """A conversation as the target reads it, on the CPU."""

    ids_L: Tensor  # int64, placeholders expanded to one per visual token
    rope_AL: Tensor  # int64, the target's own rotary positions
    spans: tuple[Span, ...]  # one per image
    inputs: Inputs  # pixel_values and what goes with them; empty where there is no image

    @property
    def length(self) -> int:
        """L, visual tokens included."""
        return len(self.ids_L)

    @property
    def next_rope(self) -> int:
        """The rotary position of the first token after the prompt."""
        return int(self.rope_AL.max()) + 1

    @property
    def visual_L(self) -> Tensor:
        """Which positions are visual tokens."""
        mask_L = torch.zeros(self.length, dtype=torch.bool)
        for span in self.spans:
            mask_L[span.start : span.start + span.length] = True
        return mask_L


@dataclass(frozen=True)
class Response:
    """What the target answered: token ids with the EOS that ended it, and nothing after it."""

    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    text: str


def encode(messages: Messages, *, family: Family, model: Any, processor: Any, max_length: int) -> Prompt:
    """Run chat template and processor once over OpenAI-like messages.

    Content is a string or a list of parts: {"type": "text", "text"} or {"type": "image", "path" or
    "image": a path or a PIL image}. Raises DataError naming the file or the part that cannot be used.
    """
    conversation = [_turn(message) for message in messages]
    if not conversation:
        raise DataError("a prompt needs at least one message")
    for text in (part.get("text", "") for turn in conversation for part in turn["content"]):
        for placeholder in (processor.image_token, getattr(processor, "video_token", None)):
            if placeholder and placeholder in text:
                raise DataError(f"a prompt's text contains '{placeholder}', the target's own placeholder")
    images = sum(part["type"] == "image" for turn in conversation for part in turn["content"])
    try:
        batch = processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:  # templates and processors raise anything
        raise DataError(f"the target's processor refuses this prompt: {first_line(error)}") from error
    ids_L = batch["input_ids"][0]
    if len(ids_L) > max_length:
        raise DataError(f"the prompt has {len(ids_L)} tokens and the target reads at most {max_length}")
    inputs = {k: torch.as_tensor(v) for k, v in batch.items() if k not in NOT_VISUAL} if images else {}
    ids = family.visual_ids(model.config)
    kind_L = torch.zeros_like(ids_L)
    for kind, visual_id in enumerate(ids, start=1):
        kind_L[ids_L == visual_id] = kind
    lengths = [
        processor.replace_image_token(batch, image_idx=i).count(processor.image_token) for i in range(images)
    ]
    return Prompt(
        ids_L=ids_L,
        rope_AL=family.rope(model, kind_L, inputs),
        spans=_spans(kind_L, lengths),
        inputs=inputs,
    )


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if "role" not in message or not isinstance(content, str | Sequence):
        raise DataError(f"a message needs a role and a content, not {str(dict(message))[:80]}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [_part(p) for p in content]
    return {"role": message["role"], "content": parts}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "image": source} | {"type": "image", "path": source}:
            return {"type": "image", "image": read_image(source)}
    raise DataError(f"a message part is a text or an image with its path, not {str(part)[:80]}")


def read_image(source: str | Path | Image.Image) -> Image.Image:
    """Load an image upright and in RGB; DataError names a file that is missing or unreadable."""
    try:
        if isinstance(source, Image.Image):
            return ImageOps.exif_transpose(source).convert("RGB")
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise DataError(f"image {source} does not exist") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        AttributeError,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(f"image {source} cannot be read: {error}") from None


def _spans(kind_L: Tensor, lengths: Sequence[int]) -> tuple[Span, ...]:
    """Cut the visual positions into images: neighbours without a token between them are told apart."""
    places = torch.nonzero(kind_L).flatten().tolist()
    if sum(lengths) != len(places):
        raise DataError(
            f"the prompt holds {len(places)} visual tokens and its images need {sum(lengths)}: "
            "does the chat template place each image once?"
        )
    spans, taken = [], 0
    for length in lengths:
        start = places[taken]
        if places[taken + length - 1] != start + length - 1:
            raise DataError("the visual tokens of one image do not stand side by side in this prompt")
        spans.append(Span(start, length))
        taken += length
    return tuple(spans)
