"""Encodes a conversation for the target: token ids, spans of visual tokens, rotary positions, pixels.

Shapes: L positions of the expanded prompt, A rotary axes.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from vlmdistill.pipelines.media.frames import SAMPLING, check_unchanged, media_file
from vlmdistill.pipelines.media.images import MediaError, read_image
from vlmdistill.pipelines.media.urls import is_url
from vlmdistill.pipelines.targets.batching import out_of_memory
from vlmdistill.pipelines.targets.checkpoints.folder import first_line
from vlmdistill.pipelines.targets.checkpoints.template import (
    PUBLISHED,
    REASONING_END,
)
from vlmdistill.pipelines.targets.families.family import IMAGE, VIDEO, Family, Inputs
from vlmdistill.pipelines.targets.families.video import FrameProcessor, FrameSampling
from vlmdistill.stores.errors import DataError, lone_surrogate, without_panics
from vlmdistill.stores.schema import Span

log = logging.getLogger("vlmdistill.pipelines")

Messages = Sequence[Mapping[str, Any]]
Finish = Literal["stop", "length"]
MESSAGE_KEYS = ("role", "content")
# A template drops others, or writes them as they are.
ROLES = ("system", "user", "assistant")
Turn = Mapping[str, Any]
CODE = re.compile(r"""\{\s*(["'])type\1:\s*\1text\1""")
"""How Python and JSON write a part of a turn."""
AS_TEXTS = ((), ("assistant",), ("system",), ("system", "assistant"), ROLES)
"""Roles whose turns a template may read as texts alone, in the order of trial."""
MOVED = (
    "the chat template of the target moves the images of a turn out of its text: a prompt such as 'which of "
    "<image> and <image> is red?' is read without their places"
)
READ_AS_TEXTS = (
    "the chat template of the target reads some turns as texts, not as parts: a server that gives it parts, "
    "as vLLM does, lets the target read them as code"
)
RESPONSE_END = 20  # characters of an earlier response that a template must keep
PART_KEYS = {
    "text": ("type", "text"),
    "image": ("type", "image", "path", "digest"),
    "video": ("type", "video", "path", "digest", *SAMPLING),
}
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
    finish: Finish
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
    """Run the chat template, with `variables`, and the processor over OpenAI-like messages.

    Content is a string or a list of parts: {"type": "text", "text"}, {"type": "image",
    "path" or "image": a path or a PIL image} or {"type": "video", "path" or "video": a
    file, a folder, an array or a list of images}; a video may have the "fps" or the number
    of "frames" to sample it by, and a part with a "path" the "digest" of its file.
    DataError names the part or the key that cannot be used; it is a MediaError if a file
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
    visual_ids = family.visual_ids(model.config)
    parts = [part for turn in conversation for part in turn["content"]]
    texts = [part.get("text", "") for part in parts]

    # Before the texts are tokenized: for long ones, that takes long.
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise DataError(
            f"the messages have {characters} characters: at most {max_characters} fit "
            f"into the target's {max_length} positions"
        )
    placeholders = _placeholders(processor, visual_ids)
    _check_texts(texts, placeholders)
    variables = variables or {}
    readable, rendered = _readable(conversation, processor, variables)
    _check_order(conversation, rendered, placeholders, processor.tokenizer.name_or_path)
    batch = _processed(readable, processor, videos.samplings, variables)
    ids_L = batch["input_ids"][0]
    if len(ids_L) > max_length:
        raise DataError(
            f"the prompt has {len(ids_L)} tokens and the target reads at most {max_length}"
        )

    images = sum(part["type"] == "image" for part in parts)
    visual: dict[str, Any] = {}
    if images or videos.samplings:
        visual = {
            name: value for name, value in batch.items() if name not in NOT_VISUAL
        }
    accepted = family.accepts(model, family.join_videos(visual))
    inputs = {name: torch.as_tensor(value) for name, value in accepted.items()}
    kind_L = torch.zeros_like(ids_L)
    for kind, visual_id in zip((IMAGE, VIDEO), visual_ids, strict=False):
        kind_L[ids_L == visual_id] = kind
    lengths = {
        IMAGE: family.image_lengths(model.config, processor, batch, images),
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


def _placeholders(processor: Any, visual_ids: Sequence[int]) -> set[str]:
    """The texts that stand for an image or a video: in the template, and after the processor."""
    tokens = processor.tokenizer.convert_ids_to_tokens(list(visual_ids))
    for kind in ("image", "video"):
        tokens.append(getattr(processor, f"{kind}_token", None))
    return {token for token in tokens if token}


def _check_texts(texts: Sequence[str], placeholders: Collection[str]) -> None:
    """DataError if a text is not Unicode, or contains a placeholder."""
    for text in texts:
        if position := lone_surrogate(text):
            raise DataError(
                f"a prompt's text is not Unicode: a lone surrogate at position {position}"
            )
        for placeholder in placeholders:
            if placeholder in text:
                raise DataError(
                    f"a prompt's text contains '{placeholder}', a placeholder of the "
                    "target"
                )


def _readable(
    conversation: Sequence[Turn], processor: Any, variables: Mapping[str, Any]
) -> tuple[Sequence[Turn], str]:
    """A conversation in the form that the chat template reads, and the text that it makes of it.

    Templates write the content of some turns as it is: a system prompt or a response is
    a text then (GLM-4.1V, Gemma 4), and a list of parts would be code. DataError
    if the template reads no form, or leaves out a text.
    """
    problems: list[DataError] = []
    for roles in AS_TEXTS:
        form = [
            _as_text(turn) if turn["role"] in roles else turn for turn in conversation
        ]
        try:
            rendered = _rendered(form, processor, variables)
            _require_read(conversation, rendered)
        except MediaError:  # of this machine
            raise
        except DataError as error:
            problems.append(error)
            continue
        if roles:
            warn_once(READ_AS_TEXTS, processor.tokenizer.name_or_path)
        return form, rendered
    raise problems[0]


def _require_read(conversation: Sequence[Turn], rendered: str) -> None:
    """DataError if the text that a template makes of a conversation lacks one of its texts.

    Of a response, templates may leave out the reasoning at its beginning.
    """
    parts = [(turn["role"], part) for turn in conversation for part in turn["content"]]
    texts = [(role, part["text"].strip()) for role, part in parts if "text" in part]
    if _count_code(rendered) != sum(_count_code(text) for _, text in texts):
        raise DataError(
            "the chat template of the target writes the parts of a turn as code: "
            f"{PUBLISHED}"
        )
    for role, text in texts:
        kept = text
        if role == "assistant":
            kept = REASONING_END.split(text)[-1].strip()[-RESPONSE_END:]
        if kept not in rendered:
            raise DataError(
                f"the chat template of the target leaves out a text of the {role}: '{text[:40]}': join the "
                "texts of a turn, or use a target that reads it"
            )


def _count_code(text: str) -> int:
    return sum(1 for _ in CODE.finditer(text))


def _as_text(turn: Turn) -> Turn:
    """A turn of texts alone with its lines as the content; any other as it is."""
    parts = turn["content"]
    if any(part["type"] != "text" for part in parts):
        return turn
    return {**turn, "content": "\n".join(part["text"] for part in parts)}


def _rendered(
    conversation: Sequence[Turn],
    processor: Any,
    variables: Mapping[str, Any],
) -> str:
    """The text that the chat template makes of a conversation; DataError if it refuses it."""
    with _refusals():
        return str(
            processor.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False, **variables
            )
        )


def _check_order(
    conversation: Sequence[Turn],
    rendered: str,
    placeholders: Collection[str],
    target: str,
) -> None:
    """Warn if the chat template has moved the images of a turn out of its text."""
    media_left = sum(_count_media(turn["content"]) for turn in conversation)
    for turn in conversation:
        parts = turn["content"]
        media_left -= _count_media(parts)
        kinds = [part["type"] == "text" for part in parts]
        is_interleaved = len([*groupby(kinds)]) > 2
        if is_interleaved and not _has_order(parts, rendered, placeholders, media_left):
            warn_once(MOVED, target)


def _count_media(parts: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["type"] != "text" for part in parts)


def _has_order(
    parts: Sequence[Mapping[str, Any]],
    rendered: str,
    placeholders: Collection[str],
    media_left: int,
) -> bool:
    """Whether a rendered turn has its texts and placeholders in the order of the parts.

    Placeholders of the `media_left` images and videos of later turns must be behind it.
    """
    end = 0
    for part in parts:
        text = part.get("text", "").strip()
        names = (text,) if part["type"] == "text" else placeholders
        ends = [
            start + len(name)
            for name in names
            if (start := rendered.find(name, end)) >= 0
        ]
        if not ends:
            return False
        end = min(ends)
    behind = rendered[end:]
    return sum(behind.count(name) for name in placeholders) >= media_left


@cache
def warn_once(text: str, target: str) -> None:
    """Once in a process for each target, by the name of its folder."""
    log.warning("%s: %s", target, text)


def _processed(
    conversation: Sequence[Turn],
    processor: Any,
    samplings: Sequence[FrameSampling],
    variables: Mapping[str, Any],
) -> Any:
    """The processor's output for a conversation; DataError if it refuses it."""
    processor_kwargs: dict[str, Any] = {}
    if samplings:
        processor_kwargs["video_metadata"] = [sample.metadata for sample in samplings]
        processor_kwargs["do_sample_frames"] = False
    with _refusals():
        return processor.apply_chat_template(
            conversation,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=processor_kwargs,
            **variables,
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what a template or a processor raises into a DataError."""
    try:
        with without_panics():  # of a regular expression of the tokenizer
            yield
    except Exception as error:  # templates and processors raise anything
        of_machine = isinstance(error, OSError) or out_of_memory(error)
        refusal = MediaError if of_machine else DataError
        raise refusal(
            f"the target's processor refuses this prompt: {first_line(error)}"
        ) from error


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
        fps, frames = part.get("fps"), part.get("frames")
        frames_FHWC, sampling = self.processor.sample(source, fps, frames)
        self.samplings.append(sampling)
        return {"type": "video", "video": frames_FHWC}


def _turn(message: Mapping[str, Any], videos: VideoSampler) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if "role" not in message or not isinstance(content, str | Sequence):
        raise DataError(
            f"a message needs a role and a content, not {str(message)[:80]}"
        )
    if message["role"] not in ROLES:
        raise DataError(
            f"a message has the role {str(message['role'])[:40]!r}: use {', '.join(ROLES)}"
        )
    _require_known(message, MESSAGE_KEYS)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [_part(part, videos) for part in content]
    return {"role": message["role"], "content": parts}


def _part(part: Mapping[str, Any], videos: VideoSampler) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            _require_known(part, PART_KEYS["text"])
            return {"type": "text", "text": text}
        case {"type": "image", "image": _} | {"type": "image", "path": _}:
            read = {"type": "image", "image": read_image(_source(part, "image"))}
        case {"type": "video", "video": _} | {"type": "video", "path": _}:
            read = videos.sample(_source(part, "video"), part)
        case _:
            raise DataError(
                "a message part is a text, an image or a video with its path, not "
                f"{str(part)[:80]}"
            )
    check_unchanged(part)
    _require_known(part, PART_KEYS[part["type"]])
    return read


def _require_known(holder: Mapping[str, Any], keys: Collection[str]) -> None:
    """DataError if a message or a part has a value that the target would not see."""
    unknown = [
        str(name)
        for name, value in holder.items()
        if value is not None and name not in keys
    ]
    if unknown:
        raise DataError(
            f"a message has '{', '.join(unknown)}', which targets do not read: leave it "
            f"out, or use {', '.join(keys)}"
        )


def _source(part: Mapping[str, Any], kind: str) -> Any:
    """The image or video of a part, of a URL its local copy; DataError if the part has two."""
    source, path = part.get(kind), part.get("path")
    if source is not None and path is not None:
        raise DataError(f"a part has '{kind}' and 'path': give one of them")
    source = path if source is None else source
    if isinstance(source, str) and is_url(source):
        return media_file({**part, "path": source})
    return source


def _spans(
    kind_L: Tensor, lengths: Mapping[int, Sequence[int] | None]
) -> tuple[Span, ...]:
    """One span per contiguous run of visual tokens of an image or a video.

    `lengths` are the numbers of tokens of images, and of runs of videos, by kind, in
    order: neighbors are told apart although no token is between them. None if unknown.
    """
    spans: list[Span] = []
    for kind, known_lengths in lengths.items():
        position_U = torch.nonzero(kind_L == kind).flatten()
        counts = [len(position_U)] if known_lengths is None else list(known_lengths)
        if sum(counts) != len(position_U):
            raise DataError(
                f"the prompt has {len(position_U)} visual tokens and its images or "
                f"videos need {sum(counts)}: does the chat template insert each exactly "
                "once?"
            )
        for item_N in torch.split(position_U, counts):
            # Of an image in rows, other tokens are between the rows.
            after_gap = torch.nonzero(item_N.diff() > 1).flatten() + 1
            for run_N in item_N.tensor_split(after_gap):
                if len(run_N):
                    spans.append(Span(int(run_N[0]), len(run_N)))
    return tuple(sorted(spans, key=lambda span: span.start))
