"""Encodes a conversation for the target: token ids, spans of visual tokens, rotary positions, pixels.

Shapes: L positions of the expanded prompt, A rotary axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vlmdistill.pipelines.media.frames import check_unchanged, media_file
from vlmdistill.pipelines.media.images import MediaError, read_image
from vlmdistill.pipelines.media.urls import is_url
from vlmdistill.pipelines.targets.batching import out_of_memory
from vlmdistill.pipelines.targets.checkpoints.folder import first_line
from vlmdistill.pipelines.targets.families.family import IMAGE, VIDEO, Family, Inputs
from vlmdistill.pipelines.targets.families.video import FrameProcessor, FrameSampling
from vlmdistill.stores.errors import DataError, lone_surrogate, without_panics
from vlmdistill.stores.schema import Span

Messages = Sequence[Mapping[str, Any]]
NOT_VISUAL = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "video_metadata",
)


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded conversation of L positions, on the CPU.

    Args:
        ids_L: int64 [L], token ids; placeholders are expanded to one per visual token.
        rope_AL: int64 [A, L], the target's own rotary positions on its A axes.
        kind_L: int64 [L]: 0 at text, 1 at image, 2 at video tokens.
        spans: One per image, and per contiguous run of a video's tokens.
        inputs: `pixel_values` and their sizes; empty without images and videos.
        samplings: Which frames are sampled, one per video.
    """

    ids_L: Tensor
    rope_AL: Tensor
    kind_L: Tensor
    spans: tuple[Span, ...]
    inputs: Inputs
    samplings: tuple[FrameSampling, ...] = ()

    @property
    def length(self) -> int:
        """L, visual tokens included."""
        return len(self.ids_L)

    @property
    def next_rope(self) -> int:
        """The rotary position of the first token after the prompt."""
        return int(self.rope_AL.max()) + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the visual inputs; gigabytes for a long video."""
        return sum(value.nbytes for value in self.inputs.values())

    @property
    def visual_L(self) -> Tensor:
        """Which positions are visual tokens."""
        return self.kind_L > 0


@dataclass(frozen=True)
class EncodedResponse:
    """A response.

    Args:
        ids: Token ids, with the EOS that ends it.
        finish: `stop` if an EOS ended it, `length` if it reached `max_new_tokens`.
        text: The text of the tokens, without special ones.
    """

    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    text: str


def encode(
    messages: Messages,
    *,
    family: Family,
    model: Any,
    processor: Any,
    max_length: int,
    max_characters: int,
    variables: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """Run chat template, with `variables`, and processor once over OpenAI-like messages.

    Content is a string or a list of parts: {"type": "text", "text"}, {"type": "image", "path" or "image": a
    path or a PIL image} or {"type": "video", "path" or "video": a file, a folder, an array or a list of
    images}; a video may have the "fps" or the number of "frames" to sample it by, and a part with a "path"
    the "digest" of its file. DataError names the part that cannot be used; it is a MediaError if a file
    cannot be read, or has another digest.
    """
    videos = VideoSampler(family.name, getattr(processor, "video_processor", None))
    try:
        conversation = [_turn(message, videos) for message in messages]
    except MemoryError as error:
        raise MediaError(
            f"this machine's memory is too small for this prompt: {first_line(error)}"
        ) from None
    if not conversation:
        raise DataError("a prompt needs at least one message")
    texts = [part.get("text", "") for turn in conversation for part in turn["content"]]
    if (
        characters := sum(map(len, texts))
    ) > max_characters:  # before they are tokenized, which takes long
        raise DataError(
            f"the messages have {characters} characters: at most {max_characters} fit into the target's "
            f"{max_length} positions"
        )
    for text in texts:
        if position := lone_surrogate(text):
            raise DataError(
                f"a prompt's text is not Unicode: a lone surrogate at position {position}"
            )
        for placeholder in _placeholders(processor, family.visual_ids(model.config)):
            if placeholder and placeholder in text:
                raise DataError(
                    f"a prompt's text contains '{placeholder}', a placeholder of the target"
                )
    kinds = [part["type"] for turn in conversation for part in turn["content"]]
    metadata = [sampling.metadata for sampling in videos.samplings]
    try:
        with without_panics():  # of a regular expression of the tokenizer
            batch = processor.apply_chat_template(
                conversation,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"video_metadata": metadata, "do_sample_frames": False}
                if metadata
                else {},
                **(variables or {}),
            )
    except Exception as error:  # templates and processors raise anything
        refusal = (
            MediaError
            if isinstance(error, OSError) or out_of_memory(error)
            else DataError
        )
        raise refusal(
            f"the target's processor refuses this prompt: {first_line(error)}"
        ) from error
    ids_L = batch["input_ids"][0]
    if len(ids_L) > max_length:
        raise DataError(
            f"the prompt has {len(ids_L)} tokens and the target reads at most {max_length}"
        )
    visual = (
        {k: v for k, v in batch.items() if k not in NOT_VISUAL}
        if {"image", "video"} & {*kinds}
        else {}
    )
    taken = family.accepts(model, family.join_videos(visual))
    inputs = {name: torch.as_tensor(value) for name, value in taken.items()}
    kind_L = torch.zeros_like(ids_L)
    for kind, visual_id in zip(
        (IMAGE, VIDEO), family.visual_ids(model.config), strict=False
    ):
        kind_L[ids_L == visual_id] = kind
    lengths = {
        IMAGE: family.image_lengths(
            model.config, processor, batch, kinds.count("image")
        ),
        VIDEO: family.video_runs(processor, inputs),
    }
    return EncodedPrompt(
        ids_L=ids_L,
        rope_AL=family.rope(model, ids_L, kind_L, inputs),
        kind_L=kind_L,
        spans=_spans(kind_L, lengths),
        inputs=inputs,
        samplings=tuple(videos.samplings),
    )


def _placeholders(processor: Any, visual_ids: Sequence[int]) -> set[str | None]:
    """What a template writes for an image or a video, and what the processor makes of it."""
    written = {getattr(processor, f"{kind}_token", None) for kind in ("image", "video")}
    return written | set(processor.tokenizer.convert_ids_to_tokens(list(visual_ids)))


@dataclass
class VideoSampler:
    """Samples the videos of one prompt and records the frames of each."""

    family: str
    processor: FrameProcessor | None
    samplings: list[FrameSampling] = field(default_factory=list)

    def sample(self, source: Any, part: Mapping[str, Any]) -> dict[str, Any]:
        """The part with its frames; DataError if the family does not support video."""
        if self.processor is None:
            raise DataError(
                f"targets of the family {self.family} support images, not videos"
            )
        frames_FHWC, sampling = self.processor.sample(
            source, part.get("fps"), part.get("frames")
        )
        self.samplings.append(sampling)
        return {"type": "video", "video": frames_FHWC}


def _turn(message: Mapping[str, Any], videos: VideoSampler) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if "role" not in message or not isinstance(content, str | Sequence):
        raise DataError(
            f"a message needs a role and a content, not {str(message)[:80]}"
        )
    listed = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    return {
        "role": message["role"],
        "content": [_part(part, videos) for part in listed],
    }


def _part(part: Mapping[str, Any], videos: VideoSampler) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "image": source} | {"type": "image", "path": source}:
            shown = {"type": "image", "image": read_image(_local(source, part))}
        case {"type": "video", "video": source} | {"type": "video", "path": source}:
            shown = videos.sample(_local(source, part), part)
        case _:
            what = str(part)[:80]
            raise DataError(
                f"a message part is a text, an image or a video with its path, not {what}"
            )
    check_unchanged(part)
    return shown


def _local(source: Any, part: Mapping[str, Any]) -> Any:
    return (
        media_file({**part, "path": source})
        if isinstance(source, str) and is_url(source)
        else source
    )


def _spans(
    kind_L: Tensor, lengths: Mapping[int, Sequence[int] | None]
) -> tuple[Span, ...]:
    """One span per contiguous run of the tokens of an image or video, even if no token is between two.

    `lengths` are the numbers of tokens of images, and of runs of videos, by kind, in order.
    """
    spans = []
    for kind, known in lengths.items():
        positions = torch.nonzero(kind_L == kind).flatten()
        runs = [len(positions)] if known is None else list(known)
        if sum(runs) != len(positions):
            raise DataError(
                f"the prompt has {len(positions)} visual tokens and its images or videos need {sum(runs)}: "
                "does the chat template insert each exactly once?"
            )
        for one in torch.split(
            positions, runs
        ):  # an image in rows has other tokens between them
            gaps = torch.nonzero(one.diff() > 1).flatten() + 1
            spans += [
                Span(int(run[0]), len(run))
                for run in one.tensor_split(gaps)
                if len(run)
            ]
    return tuple(sorted(spans, key=lambda span: span.start))
