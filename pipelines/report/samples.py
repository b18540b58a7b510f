"""The sample responses of a report: their pieces, with times for the replay, and copies of the images."""

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vlmdistill.pipelines.bench.records import Decoding, ShownResponse
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.media.urls import at_hand, is_url
from vlmdistill.pipelines.report.comparison import Group
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

IMAGE_SIDE = 320  # pixels of the longer side of an embedded image


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
    responses: dict[float, list[tuple[str, ShownResponse]]] = field(
        default_factory=dict
    )
    replays: list[Replay] = field(
        default_factory=list
    )  # of the responses whose times were recorded

    @property
    def plains(self) -> list[Playback]:
        """The plain responses of its replays: drafters that were measured together have the same one."""
        return list(dict.fromkeys(one.plain for one in self.replays))


@dataclass(frozen=True)
class OwnFiles:
    """The files that a page may show: below the workspace, or media of its prompts.

    A record may come from a stranger, and name any file of this machine or bucket of its user.
    """

    workspace: Workspace

    def __contains__(self, file: str) -> bool:
        if not is_url(file) and Path(file).resolve().is_relative_to(
            self.workspace.root.resolve()
        ):
            return True
        return file in self._media

    @cached_property
    def _media(self) -> set[str]:
        sets = sorted((self.workspace.root / "benchmarks").glob("*.parquet"))
        media: set[str] = set()
        for file in (self.workspace.prompts, *sets):
            with contextlib.suppress(DataError):  # no held-out prompts
                media.update(
                    path
                    for prompt in prompt_table.load(file, split="eval")
                    for path in prompt.files
                )
        return media


def samples(group: Group, own: OwnFiles) -> list[ShownPrompt]:
    """The prompts of a group whose responses were kept, those with images first.

    Images that are no `own` files are not read.
    """
    shown: dict[str, ShownPrompt] = {}
    for one in group.results:
        measured = {prompt.key: prompt for prompt in one.measurement.prompts}
        for sample in one.measurement.shown:
            if sample.key not in shown:
                shown[sample.key] = ShownPrompt(
                    sample.prompt, [_embedded(file, own) for file in sample.files]
                )
            prompt, counts = shown[sample.key], measured.get(sample.key)
            prompt.responses.setdefault(one.temperature, []).append((one.name, sample))
            if counts is not None and _timed(sample.pieces) and _timed(sample.plain):
                drafted = Playback(sample.pieces, counts.drafted)
                plain = Playback(sample.plain, counts.plain)
                prompt.replays.append(Replay(one.name, one.temperature, drafted, plain))
    return sorted(shown.values(), key=lambda one: not one.media)


def _timed(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and all(piece.seconds is not None for piece in pieces)


def _embedded(file: str, own: OwnFiles) -> dict[str, str]:
    """Name and kind of a prompt's file, and for an image a small copy as a data URI."""
    from PIL import Image

    from vlmdistill.pipelines.media.images import (
        MediaError,
        decoding,
        kind_of,
        open_image,
        upright,
    )

    path = Path(file)
    if kind_of(path.name) == "video":
        return {"name": path.name, "kind": "video"}
    try:
        local = at_hand(file) if file in own else None
        if local is not None and local.is_dir():
            return {"name": path.name, "kind": "video"}
        if local is None or not local.is_file():  # a FIFO would never end
            return {"name": path.name, "kind": "missing"}
        with open_image(local) as image:
            with decoding():
                image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
            small = upright(image, "RGBA")
    except (MediaError, OSError):
        return {"name": path.name, "kind": "missing"}
    opaque = Image.new("RGB", small.size, "white")
    opaque.paste(small, mask=small.getchannel("A"))
    copies = []
    for kind in ("png", "jpeg"):  # drawings are smaller as PNG, photos as JPEG
        buffer = io.BytesIO()
        opaque.save(buffer, kind, optimize=True)
        copies.append(
            (len(buffer.getvalue()), kind, base64.b64encode(buffer.getvalue()).decode())
        )
    _, kind, data = min(copies)
    return {
        "name": path.name,
        "kind": "image",
        "uri": f"data:image/{kind};base64,{data}",
    }
