"""A request for a chat completion: its supported parameters, and its conversation."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from vlmdistill.pipelines.endpoint.gate import ApiError
from vlmdistill.pipelines.media.images import (
    MAX_PIXELS,
    large_images,
    open_image,
    upright,
)

# Not all formats that Pillow reads: for EPS it starts Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MIN_PIXELS = 512**2  # that an image counts as: processors enlarge a smaller one
MAX_STOP = 256
"""Characters of a stop string: as many are searched after each piece of text."""
MAX_FIELDS = 64  # of an object: each unknown one is an error to report

Neutral = dict[str, tuple[Any, ...]]
"""By unsupported parameter, the values that change nothing: clients send them by default."""

_SAMPLING: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
}
_PENALTIES: Neutral = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
}
_TOKENS: Neutral = {
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
}
_TOOLS: Neutral = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools
    "functions": ([],),
    "function_call": ("none", "auto"),
}
_SERVICE: Neutral = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
NEUTRAL: Neutral = _SAMPLING | _PENALTIES | _TOKENS | _TOOLS | _SERVICE
IN_MESSAGES: Neutral = {"annotations": ([],), "tool_calls": ([],)}
"""The same in turns: clients send an earlier response back with them."""


def _without(fields: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """The fields whose values are not neutral."""
    return {
        name: value
        for name, value in fields.items()
        if value not in neutral.get(name, ())
    }


class StrictModel(BaseModel):
    """JSON without unknown fields; null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(
                f"an object of a request has at most {MAX_FIELDS} fields, not {len(data)}"
            )
        return {name: value for name, value in data.items() if value is not None}


class ImageUrl(StrictModel):
    """A data URL, or a file:// URL below the media folder."""

    url: str
    detail: Literal["auto", "high"] = "auto"  # the target's own resolution


class ContentPart(StrictModel):
    """A text or an image."""

    type: Literal["text", "image_url"]
    text: str = ""
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_its_content(self) -> "ContentPart":
        fields = self.model_fields_set
        if self.type not in fields or len(fields) > 2:
            raise ValueError(
                f"a part of type {self.type} needs the field {self.type} and no other"
            )
        return self


class StreamOptions(StrictModel):
    """The contents of the end of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding that hides lengths; no event has it


class ChatTemplateKwargs(StrictModel):
    """The variables of chat templates that turn reasoning on and off."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], Field(min_length=1), FailFast()]

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_part(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = _without(data, IN_MESSAGES)
        if isinstance(kept.get("content"), str):
            kept["content"] = [{"type": "text", "text": kept["content"]}]
        return kept


class ChatRequest(StrictModel):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # its older name
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP)]],
        Field(max_length=4),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    chat_template_kwargs: ChatTemplateKwargs = ChatTemplateKwargs()
    user: str = ""  # the client's own id of its user, which is recorded
    speculate: bool = True  # not in the OpenAI API: false decodes without the drafter
    drafter: str | None = None  # nor is this: one of `serve --compare`

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_values(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = _without(data, NEUTRAL)
        if isinstance(kept.get("stop"), str):
            kept["stop"] = [kept["stop"]]
        return kept

    @property
    def thinking(self) -> Literal["on", "off"] | None:
        """The mode of thinking that is asked for; None: as the server has it."""
        variables = self.chat_template_kwargs
        is_on = variables.enable_thinking
        if is_on is None:
            is_on = variables.thinking
        if is_on is None:
            return None
        return "on" if is_on else "off"

    def conversation(self, media: Path | None) -> list[dict[str, Any]]:
        """The messages as a target encodes them; ApiError names the image that cannot be used.

        Files are read below `media` only. To be called in one thread at a time (see `large_images`).
        """
        turns: list[dict[str, Any]] = []
        pixels = MAX_PIXELS  # that are left
        for i, message in enumerate(self.messages):
            parts: list[dict[str, Any]] = []
            for j, part in enumerate(message.content):
                if part.image_url is None:
                    parts.append({"type": "text", "text": part.text})
                    continue
                try:
                    source = image_source(part.image_url.url, media)
                    image = _image(source, pixels)
                except (ValueError, OSError) as error:
                    param = f"messages.{i}.content.{j}.image_url.url"
                    raise ApiError(
                        400, f"{param}: {error}", param=param, code="invalid_image"
                    ) from None
                pixels -= _counted_pixels(image)
                parts.append({"type": "image", "image": image})
            role = "system" if message.role == "developer" else message.role
            turns.append({"role": role, "content": parts})
        return turns


def image_source(url: str, media: Path | None) -> Path | io.BytesIO:
    """The file of an image; ValueError when the URL is not allowed."""
    if url.startswith("data:"):
        header, comma, data = url.partition(",")
        if not comma or not header.endswith(";base64"):
            raise ValueError("a data URL looks like data:image/png;base64,...")
        on_one_line = "".join(data.split())
        return io.BytesIO(base64.b64decode(on_one_line, validate=True))
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise ValueError("images are not downloaded: send a data URL")
    if media is None:
        raise ValueError(
            "the server reads no files (it runs without --media): send a data URL"
        )
    file = Path(unquote(parts.path)).resolve()
    # One message for both cases, so that it does not tell which files exist elsewhere.
    if not (file.is_relative_to(media.resolve()) and file.is_file()):
        raise ValueError("there is no such file in the server's media folder")
    return file


def _image(source: Path | io.BytesIO, pixels: int) -> Image.Image:
    """An image upright and in RGB; OSError when it cannot be read, ValueError when it is too large."""
    with large_images():
        try:
            opened = open_image(source, FORMATS)
        except UnidentifiedImageError:  # whose message is of a Python object
            raise OSError(
                "this is no PNG, JPEG, WebP or GIF, or it is damaged"
            ) from None
        with opened as image:
            if _counted_pixels(image) > pixels:
                raise ValueError(
                    f"{image.width} x {image.height} pixels are too many: the images of a request may have "
                    f"{MAX_PIXELS} pixels together, each counted as at least {MIN_PIXELS}"
                )
            return upright(image)


def _counted_pixels(image: Image.Image) -> int:
    """The pixels that an image takes of those of a request."""
    return max(image.width * image.height, MIN_PIXELS)
