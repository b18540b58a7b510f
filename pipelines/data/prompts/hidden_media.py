"""Find images and videos in values that hold them under other names than `image` and `video`."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from vlmdistill.pipelines.media.images import kind_of
from vlmdistill.pipelines.media.resolver import BadRowError

LONGEST_NAME = 1000  # characters of a file's name: longer ones are texts
LONGEST_ENDING = 5  # characters of a file's name behind its last dot
MOST_VALUES = 1000  # of a column, that are looked at
SHORTEST_BASE64 = 64  # characters
TYPE_KEYS = (
    "type",
    "mime_type",
    "content_type",
    "media_type",
    "mimeType",
    "contentType",
)
FILE_KEYS = ("url", "uri", "path", "file", "file_name", "data", "content", "src")
BASE64 = {
    "image": re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD[dl]|UklGR)[A-Za-z0-9+/=\s]*"),
    "video": re.compile(r"(AAAA..Z0eXB|GkXfo)[A-Za-z0-9+/=\s]*"),
}
NAMING_COLUMN = re.compile(
    r"(?:\w+[ _-])?(?:(?:image|img|picture|pic|photo)|(?P<film>video|vid|clip|gif|youtube|yt))s?[ _-]?"
    r"(?:id|idx|index|uid|uuid|key|hash|md5|sha256|name|file|file[ _-]?name|path|url|uri|link"
    r"|b64|base64|base64[ _-]?str|bytes)s?|(?P<vid>vid)",
    re.IGNORECASE,
)
YOUTUBE = re.compile(
    r"https?://(?:(?:www|m)\.)?(?:youtube\.com/(?:watch|shorts/)|youtu\.be/)\S+\Z"
)
QUOTED = re.compile(r"\"([^\"\n]++)\"|'([^'\n]++)'")
MEDIA_WORDS = (
    "image images img imgs picture pictures photo photos video videos clip clips frame frames nframes fps "
    "segment segments bound bounds range start end begin stop from to offset realtime moment tstart tend "
    "timestamp timestamps duration crop pixels resized"
)
"""Words in names of columns that say something about media, or how to sample them, as `UNIT_WORDS` do."""
PART_WORDS = (
    "clip clips segment bound bounds range start end begin stop tstart tend timestamps"
)
UNIT_WORDS = "video time frame frames t ts s sec secs second seconds ms"
"""Words beside those of `PART_WORDS` in names for a part of a video: `start_sec`, but not `clip_id`."""
SOUND_ENDINGS = (".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav")
DOCUMENT_ENDINGS = (".pdf", ".docx", ".pptx")
DOCUMENT_WORDS = {"pdf", "doc", "document", "file"}
"""Words in names of columns of documents: a text may also name the one that it is from, as its source."""
STOP = "stop"  # alone it may be texts that end a response
FIRST_BYTES = {
    b"\xff\xd8\xff": "image",  # JPEG
    b"\x89PNG": "image",
    b"GIF8": "image",
    b"II*\0": "image",  # TIFF
    b"MM\0*": "image",
    b"\x1aE\xdf\xa3": "video",  # Matroska, WebM
}


class HiddenMediaError(BadRowError):
    """A row without images and videos that has one in another column, or in a key of a turn or a part."""

    def __init__(self, kind: str, column: str) -> None:
        """The kind is image or video."""
        advice = f"'{column}': name the column {kind}, or remove it"
        super().__init__(f"{kind} in another column", advice)
        self.column = column


def kind_of_column(name: str, value: Any) -> str:
    """Whether a column such as `image_id` or `video_url` names an image or a video; empty if not."""
    match = NAMING_COLUMN.fullmatch(name)
    is_zero = value == 0 and not isinstance(value, bool)  # the first of some
    if match is None or not (value or is_zero) or value == -1:
        return ""
    return "video" if match["film"] or match["vid"] else "image"


def kind_of_keys(value: Any) -> str:
    """Whether a key of an object, anywhere in a value, names an image or a video; empty if not."""
    for holder in islice(_values(value), MOST_VALUES):
        for name, item in holder.items() if isinstance(holder, Mapping) else ():
            if isinstance(item, str | int) and (
                kind := kind_of_column(str(name), item)
            ):
                return kind
    return ""


def _words(name: str) -> frozenset[str]:
    """The words of a name such as `start_time` or `startTime`, in lower case."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return frozenset(re.findall(r"[a-z]+", apart.lower()))


def is_about_media(name: str) -> bool:
    """Whether a column may say something about images or videos, by its name."""
    return not _words(name).isdisjoint(f"{MEDIA_WORDS} {UNIT_WORDS}".split())


def names_part_of_video(name: str) -> bool:
    """Whether a column such as `start_time` or `clip` may say which part of a video is meant."""
    words = _words(name)
    of_parts = {*PART_WORDS.split()}
    if words == {STOP}:
        return False
    return words <= {*of_parts, *UNIT_WORDS.split()} and not words.isdisjoint(of_parts)


def media_kind(value: Any) -> str:
    """Whether a value of a row is or names an image or a video, anywhere in it; empty if not."""
    # In a list such links are sources of a text.
    if isinstance(value, str) and YOUTUBE.match(value):
        return "video"
    kinds = (_kind_of_value(item) for item in islice(_values(value), MOST_VALUES))
    return next(filter(None, kinds), "")


def names_unseen(name: str, value: Any) -> str:
    """Whether a column names a file of sound or a document, which no target sees; empty if not."""
    words = {word.removesuffix("s") for word in _words(name)}
    is_of_documents = not words.isdisjoint(DOCUMENT_WORDS)
    for item in islice(_values(value), MOST_VALUES):
        if not isinstance(item, str) or re.search(r"\s", item):
            continue
        if item.lower().endswith(SOUND_ENDINGS):
            return "audio"
        if is_of_documents and item.lower().endswith(DOCUMENT_ENDINGS):
            return "document"
    return ""


def _values(value: Any) -> Iterator[Any]:
    """A value and all values in it."""
    yield value
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        for item in inside:
            yield from _values(item)


def _kind_of_value(value: Any) -> str:
    if isinstance(value, str):
        return _kind_of_text(value)
    if isinstance(value, bytes):
        return _kind_of_bytes(value)
    if isinstance(value, Mapping):
        return _kind_of_object(value)
    return ""


def is_data_url(text: str) -> bool:
    """Whether a text is the content of a file as a URL."""
    return text[:5].lower() == "data:"


def _kind_of_text(text: str) -> str:
    for kind, pattern in BASE64.items():
        if text[:11].lower() == f"data:{kind}/":
            return kind
        is_long = len(text) >= SHORTEST_BASE64
        if is_long and pattern.fullmatch(text[:LONGEST_NAME]):
            return kind
    if text.startswith(("[", "{")):  # it may be JSON
        names = (match[1] or match[2] for match in QUOTED.finditer(text))
        return next(filter(None, map(_kind_of_name, islice(names, MOST_VALUES))), "")
    return _kind_of_name(text)


def _kind_of_name(text: str) -> str:
    if len(text) >= LONGEST_NAME or "\n" in text:
        return ""
    has_query = "?" in text or "#" in text
    if has_query and not re.search(r"\s", text):
        text = re.split(r"[?#]", text, maxsplit=1)[0]
    _, dot, ending = text.rpartition(".")
    return kind_of(text) if dot and len(ending) <= LONGEST_ENDING else ""


def _kind_of_bytes(content: bytes) -> str:
    if content[:4] == b"RIFF":
        return "image" if content[8:12] == b"WEBP" else "video"
    if content[4:8] == b"ftyp":
        return "image" if content[8:11] in (b"avi", b"hei", b"mif") else "video"
    matching = (
        kind for first, kind in FIRST_BYTES.items() if content.startswith(first)
    )
    return next(matching, "")


def _kind_of_object(value: Mapping[Any, Any]) -> str:
    """The kind of an object with bytes, as `datasets` has them, or of a file with a type."""
    if isinstance(value.get("bytes"), bytes) and value["bytes"]:
        return _kind_of_bytes(value["bytes"]) or "image"
    if not any(value.get(key) for key in FILE_KEYS):
        return ""
    for key in TYPE_KEYS:
        named = value.get(key)
        if isinstance(named, str) and named.startswith(("image", "video")):
            return named[:5]
    return ""
