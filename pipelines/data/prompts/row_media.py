"""The images and videos of a row, and where its parts and placeholders show them."""

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from vlmdistill.pipelines.data.prompts.hidden_media import (
    TYPE_KEYS,
    is_about_media,
    is_data_url,
    kind_of_column,
    media_kind,
    names_part_of_video,
)
from vlmdistill.pipelines.data.prompts.row import has_content
from vlmdistill.pipelines.media.resolver import BadRowError, Media

Kind = Literal["image", "video"]
Sampling = Mapping[str, float | int]
"""`fps` or `frames` of a video; empty: the target's own."""
Part = dict[str, Any]

KINDS: tuple[Kind, ...] = ("image", "video")
COLUMNS: dict[Kind, tuple[str, str]] = {
    "image": ("image", "images"),
    "video": ("video", "videos"),
}
NUMBERED_COLUMN = {kind: re.compile(rf"{kind}_?(\d+)") for kind in KINDS}  # as of MMMU
FRAME_COUNTS = ("frames", "nframes", "num_frames")
SAMPLING_COLUMNS = ("fps", *FRAME_COUNTS)
FILE_KEYS = ("source", "path", "url", "bytes")  # of a part; `source` is Anthropic's
CONTENT_KEYS = ("bytes", "data", "path", "url")
"""Keys of an object that is a file; qwen-vl-utils' is its kind."""
MOST_SAMPLED = 2**31 - 1  # frames, or frames per second, of a video

# <image>, <Image>, <IMAGE>, <|image|>, <image 1> (MMMU), <image_1>, <|image_1|> (Phi), and what sets it apart
# from the text: one line break or space at each side.
PLACEHOLDER = re.compile(
    r"(?:\r?\n[ \t]*| )?"
    r"<(?P<bar>\|)?"
    r"(?:(?P<plain>[Ii]mage|IMAGE|[Vv]ideo|VIDEO)"
    r"|(?P<numbered>[Ii]mage|IMAGE|[Vv]ideo|VIDEO)[ _-]?(?P<number>\d{1,6}))"
    r"(?(bar)\|)>"
    r"(?:[ \t]*\r?\n| )?"
)
FOREIGN_PLACEHOLDER = re.compile(
    r"<\|?(?:image|img|video|vision|media)[_-]?"
    r"(?:placeholder|plh|here|pad|start|end|context|(?:soft_)?token)\|?>"
    r"|<im_(?:start|end|patch)>|<start_of_image>|<\|begin_of_(?:image|video)\|>"
    r"|<\|?img_?\d*\|?>|</(?:image|video)>|<(?:image|video)(?:\s+|\s*/)>"
    r"|<\|?(?:image|video)\s*:[^<>\n]{0,200}>"
    r"|<vila/(?:image|video)>"
    r"|<ref-object>|<bbox>",  # of ms-swift, which takes them from the column `objects`
    re.IGNORECASE,
)
WORD_PLACEHOLDER = re.compile(
    r"\[(?:img|image|video)_?\d*\]|(?<![\w}])\{(?:img|image|video)_?\d*\}"
    r"|<picture>|&lt;(?:image|video)&gt;",
    re.IGNORECASE,
)
"""Those that are ordinary text in a row that has placeholders of the known form."""
ON_ITS_OWN_LINE = re.compile(
    r"\A\s*(<(?:image|video)>)[ \t]*\r?\n|\n[ \t]*(<(?:image|video)>)\s*\Z"
)


@dataclass(frozen=True)
class MediaFile:
    """An image or a video of a row."""

    media: Media
    keys: Mapping[str, Any] = field(default_factory=dict)
    """What else the row's object for it says, such as `fps` or `start`."""


@dataclass(frozen=True)
class _Numbered:
    """A placeholder with a number, and the part that it becomes."""

    number: int
    part: Part


@dataclass
class _Placement:
    """Which of the row's images, or of its videos, are shown so far."""

    media: list[MediaFile]
    elsewhere: list[Media] = field(default_factory=list)
    """Those that parts and turns have of their own."""
    in_order: int = 0  # by placeholders and parts without a number, one after the other
    by_index: set[int] = field(default_factory=set)  # again and again
    numbered: list[_Numbered] = field(default_factory=list)  # not placed yet

    @property
    def shown(self) -> int:
        """How many are shown."""
        return self.in_order + len(self.by_index)


@dataclass
class Unread:
    """What a row has and no prompt includes: columns, and keys of turns and parts."""

    names: list[str] = field(default_factory=list)
    hidden: dict[str, str] = field(default_factory=dict)
    """Those that hold or name an image or a video -> its kind."""

    def add(
        self, names: Collection[str], holder: Mapping[str, Any], prefix: str = ""
    ) -> None:
        """Note names of a row, a turn or a part."""
        self.names += [f"{prefix}{name}" for name in names]
        self.look_into(names, holder, prefix)

    def look_into(
        self, names: Collection[str], holder: Mapping[str, Any], prefix: str = ""
    ) -> None:
        """Note which of these values hold or name images or videos."""
        for name in names:
            if kind := media_kind(holder.get(name)):
                self.hidden[f"{prefix}{name}"] = kind

    def extend(self, other: "Unread") -> None:
        """Add what another one has."""
        self.names += other.names
        self.hidden |= other.hidden


def unread_names(holder: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The names of what has content and was not read: text, bytes and objects, and numbers about media."""
    filled = [str(name) for name, value in holder.items() if _has_content(name, value)]
    return [name for name in filled if name != "id" and name not in read]


def _has_content(name: Any, value: Any) -> bool:
    if isinstance(value, str | bytes | list | dict):
        return has_content(value)
    is_number = isinstance(value, int | float) and value not in (0, -1)
    names_media = bool(kind_of_column(str(name), value))
    return names_media or (is_number and is_about_media(str(name)))


def media_columns(row: Mapping[str, Any], kind: Kind) -> list[str]:
    """The columns for images or videos: `image` and `images`, else also `image_1`, `image_2` and so on."""
    named = [name for name in COLUMNS[kind] if name in row]
    if any(row[name] for name in named):
        return named
    numbers = {}
    for name in row:
        if str(name).startswith(kind):
            match = NUMBERED_COLUMN[kind].fullmatch(str(name))
            if match:
                numbers[str(name)] = int(match[1])
    return [*named, *sorted(numbers, key=lambda name: numbers[name])]


def has_media_columns(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column for images or videos, which may be empty."""
    return any(media_columns(row, kind) for kind in KINDS)


def has_media(row: Mapping[str, Any]) -> bool:
    """Whether a column of a row has images or videos."""
    return any(row.get(name) for kind in KINDS for name in media_columns(row, kind))


def _is_filled(value: Any) -> bool:
    """Whether a column for images or videos has some. Empty bytes are a lost one, and 0 may be its number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return bool(value) or is_number or value == b""


class RowMedia:
    """The images and videos in the columns of a row, or in the keys of a turn, and where they are shown.

    Placeholders and parts use them up in order. A part or a placeholder with a number may show one again.
    """

    def __init__(
        self, row: Mapping[str, Any], sampling: Sampling | None, *, has_tags: bool
    ) -> None:
        """Of a row whose text has placeholders, even without any column for media, if `has_tags`.

        A `sampling` that is not empty overrides that of the row.
        """
        self._row = row
        self._sampling = sampling
        names = {kind: media_columns(row, kind) for kind in KINDS}
        filled = {
            kind: [n for n in names[kind] if _is_filled(row[n])] for kind in KINDS
        }
        self._of = {
            kind: _Placement(_media_of(row, filled[kind], kind)) for kind in KINDS
        }
        self.tagged = has_tags or any(names.values())  # else <image> is ordinary text
        self.columns = {name for kind in KINDS for name in filled[kind]}
        if self._of["video"].media:
            self.columns |= {*SAMPLING_COLUMNS}
        self.tag_in_response = ""
        self.unread = Unread()

    def __bool__(self) -> bool:
        """Whether there are any images or videos."""
        return any(placement.media for placement in self._of.values())

    def of_turn(self, turn: Mapping[str, Any]) -> "RowMedia":
        """The media of a turn, if it has any of its own; else these."""
        if not has_media(turn):
            return self
        media = RowMedia(turn, self._sampling, has_tags=False)
        for kind, placement in media._of.items():
            self._of[kind].elsewhere += [file.media for file in placement.media]
        return media

    def part_of_placeholder(self, kind: Kind, number: str | None) -> Part:
        """The part of a placeholder. LLaVA uses <image> for videos too."""
        if kind == "image" and self._of["video"].media and not self._of["image"].media:
            kind = "video"
        if number is None:
            return self.part(kind, {}, self._next(kind))
        part: Part = {"type": kind}
        self._of[kind].numbered.append(_Numbered(int(number), part))
        return part

    def part_without_file(self, kind: Kind, keys: Mapping[str, Any]) -> Part:
        """The part that shows the image or video of its `index`, from 0, else the next one of the row."""
        placement = self._of[kind]
        index = _index(keys.get("index"), kind)
        if index is None:
            return self.part(kind, keys, self._next(kind))
        if placement.in_order:
            raise _half_numbered(kind)
        count = len(placement.media)
        if not 0 <= index < count:
            raise BadRowError(
                f"{kind} count",
                f"a part shows the {kind} of index {index}, the row has {count}",
            )
        placement.by_index.add(index)
        return self.part(kind, keys, placement.media[index])

    def part_with_file(
        self, kind: Kind, keys: Mapping[str, Any], file: MediaFile
    ) -> Part:
        """The part of an image or video of its own."""
        self._of[kind].elsewhere.append(file.media)
        return self.part(kind, keys, file)

    def part(self, kind: Kind, keys: Mapping[str, Any], file: MediaFile) -> Part:
        """The part of an image or video, with its own keys but the one of its file."""
        keys = {**file.keys, **keys}
        used = {"type", "index", *SAMPLING_COLUMNS}
        unused = [
            key for key in keys if keys[key] not in (None, "") and key not in used
        ]
        self.unread.add(unused, keys, f"{kind}.")
        if kind == "image":
            return {"type": kind, "media": file.media}
        _require_whole_video(keys)
        _require_whole_video(self._row)
        sampling = self._sampling or _sampling(keys) or _sampling(self._row)
        return {"type": kind, "media": file.media, **sampling}

    def place_numbered(self) -> None:
        """Give each numbered placeholder its image or video, counted from 1, or from 0 if there is a 0.

        BadRowError unless the numbers are those of all images or videos.
        """
        for kind, placement in self._of.items():
            if not placement.numbered:
                continue
            if placement.shown:
                raise _half_numbered(kind)
            numbers = {placeholder.number for placeholder in placement.numbered}
            first = min(*numbers, 1)
            count = len(placement.media)
            if numbers != {*range(first, first + count)}:
                listed = ", ".join(map(str, sorted(numbers)))
                raise BadRowError(
                    f"{kind} count",
                    f"the text has {kind} {listed}, the row has {count}",
                )
            for placeholder in placement.numbered:
                index = placeholder.number - first
                shown = self.part(kind, {}, placement.media[index])
                placeholder.part.update(shown)
                placement.by_index.add(index)

    def parts_without_placeholder(self) -> list[Part]:
        """The parts of media that no placeholder shows, which come first as in LLaVA.

        None if parts and turns have the same files. BadRowError if they have others, or if placeholders show
        only some, or are in responses alone.
        """
        parts = []
        for kind, placement in self._of.items():
            count = len(placement.media)
            if placement.shown == 0 and placement.media and placement.elsewhere:
                if placement.elsewhere != [file.media for file in placement.media]:
                    raise BadRowError(
                        f"{kind} count",
                        f"the turns have {len(placement.elsewhere)} of their own, and no <{kind}> shows the "
                        f"{count} of the row: keep one of them",
                    )
            elif placement.shown == 0:
                if placement.media and self.tag_in_response:
                    raise BadRowError(
                        f"{kind} of a response",
                        f"no question has {self.tag_in_response}, but a response does",
                    )
                parts += [self.part(kind, {}, file) for file in placement.media]
            elif placement.shown != count:
                shown = f"{placement.shown} <{kind}> in the text"
                raise BadRowError(f"{kind} count", f"{shown}, {count} given")
        return parts

    def _next(self, kind: Kind) -> MediaFile:
        """The next image or video of the row."""
        placement = self._of[kind]
        if placement.by_index:
            raise _half_numbered(kind)
        count = len(placement.media)
        if placement.in_order >= count:
            raise BadRowError(
                f"{kind} count",
                f"the text has more <{kind}> than the row has files ({count})",
            )
        placement.in_order += 1
        return placement.media[placement.in_order - 1]


def placeholder_in(text: str) -> str:
    """The first placeholder of a text; empty if it has none."""
    match = PLACEHOLDER.search(text)
    return match[0].strip() if match else ""


def split_at_placeholders(text: str) -> Iterator[str | re.Match[str]]:
    """The texts and the placeholders of a text, in turn. It begins and ends with a text, maybe empty."""
    start = 0
    for match in PLACEHOLDER.finditer(text):
        yield text[start : match.start()]
        yield match
        start = match.end()
    yield text[start:]


def _half_numbered(kind: Kind) -> BadRowError:
    return BadRowError(
        f"{kind} count", f"some parts name their {kind} by a number, and some do not"
    )


def _index(value: Any, kind: Kind) -> int | None:
    """The index in a part; None if it has none. Columns with nulls hold numbers as 1.0, others as text."""
    is_nan = value != value
    if value is None or value == "" or is_nan:
        return None
    try:
        if not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadRowError(
        f"{kind} count",
        f"the index of a part is {str(value)[:40]!r}: give a number from 0",
    )


def _media_of(row: Mapping[str, Any], names: list[str], kind: Kind) -> list[MediaFile]:
    """The media of columns, in order. BadRowError if `image` and `images` differ."""
    lists = [_listed(row[name], kind) for name in names]
    is_numbered = not any(name in COLUMNS[kind] for kind in KINDS for name in names)
    if is_numbered or not lists:
        return [media for column in lists for media in column]
    if any(column != lists[0] for column in lists):
        raise BadRowError(
            "several media columns", f"{' and '.join(names)} differ: keep one"
        )
    return lists[0]


def _listed(value: Any, kind: Kind) -> list[MediaFile]:
    """The media of a column: one, or a list."""
    items = value if isinstance(value, list) else [value]
    return [read_file(item, kind) for item in items]


def read_file(item: Any, kind: Kind) -> MediaFile:
    """An image or a video in any form that rows use; BadRowError if it is neither path nor bytes."""
    if not isinstance(item, Mapping):
        return MediaFile(_path_or_bytes(item), {})
    file = read_file(_content_of(item, kind), kind)
    read = {*CONTENT_KEYS, kind, *TYPE_KEYS}
    keys = {name: value for name, value in item.items() if name not in read}
    return MediaFile(file.media, {**keys, **file.keys})


def _path_or_bytes(item: Any) -> Media:
    if isinstance(item, bytes):
        return item
    if isinstance(item, list):
        raise BadRowError(
            "list of frames",
            "put the frames of a video into a folder and give its path",
        )
    if not isinstance(item, str) or not item:
        raise BadRowError("no media file", f"neither path nor bytes: {str(item)[:60]}")
    if is_data_url(item):
        return _from_base64(item.partition(",")[2])
    if item[:7].lower() == "file://":
        path = item[7:].removeprefix("localhost")
        return unquote(path, errors="surrogateescape")
    return item


def _content_of(item: Mapping[str, Any], kind: Kind) -> Any:
    """The file of an object; BadRowError if it has none, or two.

    `datasets` writes the bytes and the path of one file.
    """
    keys = [*CONTENT_KEYS, kind]
    filled = [key for key in keys if item.get(key)]
    if not filled:
        raise BadRowError(
            "no media file", f"an object without any of {', '.join(keys)}"
        )
    if kind in filled and len(filled) > 1:
        raise BadRowError(
            "several media files", f"an object has {' and '.join(filled)}: keep one"
        )
    content = item[filled[0]]
    if filled[0] in ("bytes", "data") and isinstance(content, str):
        return _from_base64(content)
    return content


def _from_base64(text: str) -> bytes:
    """Decode base64, with or without line breaks."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise BadRowError(
            "no media file", f"its bytes are text, but not base64: {error}"
        ) from None


def _require_whole_video(keys: Mapping[str, Any]) -> None:
    """BadRowError if the row uses only a part of a video, which prompts do not support."""
    bounds = [
        f"{name} {value}"
        for name, value in keys.items()
        if value and names_part_of_video(str(name)) and not media_kind(value)
    ]
    if bounds:
        raise BadRowError(
            "part of a video",
            f"{', '.join(bounds)}: cut it into a separate file; if the file is that part, remove the column",
        )


def _sampling(keys: Mapping[str, Any]) -> Sampling:
    """The video sampling of a row: frames per second, a number of frames, or empty."""
    fps: Any = keys.get("fps")
    counts = (keys[name] for name in FRAME_COUNTS if keys.get(name) is not None)
    count: Any = next(counts, None)
    if fps is None and count is None:
        return {}
    if fps is not None and count is not None:
        raise BadRowError(
            "video sampling",
            f"fps {fps} and frames {count}: give one of them, or --fps",
        )
    given = count if fps is None else fps
    try:
        value = 0.0 if isinstance(given, bool) else float(given)
        if fps is None and value == int(value):
            value = int(value)
    except (TypeError, ValueError, OverflowError):
        value = 0
    is_whole = fps is not None or isinstance(value, int)
    if not (is_whole and 0 < value <= MOST_SAMPLED):
        raise BadRowError(
            "video sampling",
            f"fps {fps}, frames {str(count)[:40]}: give a number above 0, at most {MOST_SAMPLED}",
        )
    return {"frames": value} if fps is None else {"fps": value}
