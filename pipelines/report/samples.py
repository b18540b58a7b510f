"""The sample responses of a report: their pieces, with times for the replay, and copies of the images."""

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdistill.pipelines.bench.records import Decoding, PromptResult, ShownResponse
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.media.urls import at_hand, is_url
from vlmdistill.pipelines.report.comparison import Group
from vlmdistill.pipelines.report.results import DrafterResult
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SIDE = 320  # pixels of the longer side of an embedded image
FORMATS = ("png", "jpeg")  # drawings are smaller as PNG, photos as JPEG


@dataclass(frozen=True)
class Playback:
    """A response with the time of each piece, and the counts and times of its decoding."""

    pieces: tuple[Piece, ...]
    decoding: Decoding


@dataclass(frozen=True)
class Replay:
    """A drafter's response, and the plain one that was measured beside it."""

    name: str
    temperature: float
    drafted: Playback
    plain: Playback


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its images, and by temperature the response of each drafter, the fastest first."""

    prompt: str
    media: list[dict[str, str]]
    responses: dict[float, list[tuple[DrafterResult, ShownResponse]]] = field(
        default_factory=dict
    )
    replays: list[Replay] = field(default_factory=list)
    """Of the responses whose times were recorded."""

    @property
    def plains(self) -> list[Playback]:
        """The plain responses of its replays: drafters that were measured together have the same one."""
        return list(dict.fromkeys(replay.plain for replay in self.replays))


@dataclass(frozen=True)
class OwnFiles:
    """The files that a page may show: below the workspace, or media of its prompts.

    A record may come from a stranger, and name any file of this machine or bucket of its user.
    """

    workspace: Workspace

    def __contains__(self, file: str) -> bool:
        return self._is_below(file) or file in self._media

    def _is_below(self, file: str) -> bool:
        root = self.workspace.root.resolve()
        return not is_url(file) and Path(file).resolve().is_relative_to(root)

    def copied(self, file: str) -> str:
        """The same file in a copied workspace: records hold the path on the machine that measured."""
        parts = Path(file).parts
        for start in range(1, len(parts)):
            inside = self.workspace.root.joinpath(*parts[start:])
            if inside.is_file() and self._is_below(str(inside)):
                return str(inside)
        return file

    @cached_property
    def _media(self) -> set[str]:
        """The files of the held-out prompts."""
        sets = sorted((self.workspace.root / "benchmarks").glob("*.parquet"))
        media: set[str] = set()
        for file in (self.workspace.prompts, *sets):
            with contextlib.suppress(DataError):  # no held-out prompts
                for prompt in prompt_table.load(file, split="eval"):
                    media.update(prompt.files)
        return media


def samples(group: Group, own: OwnFiles) -> list[ShownPrompt]:
    """The prompts of a group whose responses were kept, those with images first.

    Images that are no `own` files are not read.
    """
    prompts: dict[str, ShownPrompt] = {}
    for result in group.results:
        for recorded in result.measurement.shown:
            response = _as_counted(result, recorded)
            if response.key not in prompts:
                media = [_embedded(file, own) for file in response.files]
                prompts[response.key] = ShownPrompt(response.prompt, media)
            prompt = prompts[response.key]
            at_temperature = prompt.responses.setdefault(result.temperature, [])
            at_temperature.append((result, response))
            replay = _replay(result, response)
            if replay is not None:
                prompt.replays.append(replay)
    return sorted(prompts.values(), key=lambda prompt: not prompt.media)


def _as_counted(result: DrafterResult, response: ShownResponse) -> ShownResponse:
    """With the tau of its prompt's counts, which were audited; its own if that was not measured."""
    prompt = _measured(result, response)
    if prompt is None:
        return response
    counts = prompt.drafted
    return replace(response, tau=(counts.tokens - 1) / max(1, counts.calls))


def _measured(result: DrafterResult, response: ShownResponse) -> PromptResult | None:
    """The prompt of a response; None if it was not measured."""
    prompts = result.measurement.prompts
    return next((prompt for prompt in prompts if prompt.key == response.key), None)


def _replay(result: DrafterResult, response: ShownResponse) -> Replay | None:
    """The replay of a response; None if its prompt was not measured, or without times."""
    prompt = _measured(result, response)
    if prompt is None or not (_timed(response.pieces) and _timed(response.plain)):
        return None
    drafted = Playback(response.pieces, prompt.drafted)
    plain = Playback(response.plain, prompt.plain)
    return Replay(result.label, result.temperature, drafted, plain)


def _timed(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and all(piece.seconds is not None for piece in pieces)


def _embedded(file: str, own: OwnFiles) -> dict[str, str]:
    """Name and kind of a prompt's file, and for an image a small copy as a data URI."""
    from vlmdistill.pipelines.media.images import MediaError, kind_of

    name = Path(file).name
    if kind_of(name) == "video":
        return {"name": name, "kind": "video"}
    try:
        if file not in own:
            file = own.copied(file)
        local = at_hand(file) if file in own else None
        if local is not None and local.is_dir():  # the frames of a video
            return {"name": name, "kind": "video"}
        if local is None or not local.is_file():  # a FIFO would never end
            return {"name": name, "kind": "missing"}
        small = _small_copy(local)
    except (MediaError, OSError):
        return {"name": name, "kind": "missing"}
    return {"name": name, "kind": "image", "uri": _data_uri(small)}


def _small_copy(file: Path) -> "Image.Image":
    """An image upright, on white, with sides of at most IMAGE_SIDE pixels."""
    from PIL import Image

    from vlmdistill.pipelines.media.images import decoding, open_image, upright

    with open_image(file) as image:
        with decoding():
            image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        small = upright(image, "RGBA")
    opaque = Image.new("RGB", small.size, "white")
    opaque.paste(small, mask=small.getchannel("A"))
    return opaque


def _data_uri(image: "Image.Image") -> str:
    """The image in the smaller of FORMATS."""
    files = {kind: _encoded(image, kind) for kind in FORMATS}
    smallest = min(FORMATS, key=lambda kind: (len(files[kind]), kind))
    return f"data:image/{smallest};base64,{base64.b64encode(files[smallest]).decode()}"


def _encoded(image: "Image.Image", kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True)
    return buffer.getvalue()
