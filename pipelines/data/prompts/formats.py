"""Convert rows of the supported formats into conversations: LLaVA, ShareGPT, chat messages, question columns.

A row becomes a `Conversation` or raises BadRowError: nothing is dropped silently or repaired by guessing.
`docs/inputs.md` shows a row of each format.
"""

import base64
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import unquote

from vlmdistill.pipelines.data.prompts import columns, sources
from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.hidden_media import media_kind
from vlmdistill.pipelines.data.prompts.json_rows import loads
from vlmdistill.pipelines.data.prompts.sources import Row
from vlmdistill.pipelines.media.resolver import BadRowError, Media
from vlmdistill.stores.errors import DataError, lone_surrogate, one_line

Format = Literal["auto", "llava", "sharegpt", "chat", "hf"]
Sampling = Mapping[
    str, float | int
]  # "fps" or "frames" of a video; empty: the target's own

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
}
TOOLS = (
    "tool",
    "function",
    "function_call",
    "tool_call",
    "tool_response",
    "observation",
    "ipython",
)
TURNS = ("messages", "conversations", "conversation", "items", "texts", "prompt")
SPEAKERS = {
    "role",
    "from",
    "user",
    "human",
    "assistant",
}  # keys of a turn, or of a pair of turns
ASKING = (
    "chat/completions",
    "/responses",
)  # the requests of an OpenAI batch that are read
FILES = {"image": ("image", "images"), "video": ("video", "videos")}
COUNTS = ("frames", "nframes", "num_frames")  # keys for the number of frames of a video
SAMPLING = ("fps", *COUNTS)
CLIPS = (
    "video_start",
    "video_end",
    "start",
    "end",
    "start_time",
    "end_time",
    "start_sec",
    "end_sec",
)
MOST = 2**31 - 1  # frames, or frames per second, of a video
NUMBERED = {
    kind: re.compile(rf"{kind}_?(\d+)") for kind in FILES
}  # columns, as of MMMU
# <image>, <IMAGE>, <image 1> (MMMU), <image_1>, <|image_1|> (Phi), with one line break or space at its sides.
PLACEHOLDER = re.compile(
    r"(?:\r?\n[ \t]*| )?"
    r"<(\|)?(?:(image|IMAGE|video|VIDEO)|([Ii]mage|IMAGE|[Vv]ideo|VIDEO)[ _-]?(\d{1,6}))(?(1)\|)>"
    r"(?:[ \t]*\r?\n| )?"
)
FOREIGN = re.compile(
    r"<image_placeholder>|<ImageHere>|<\|(?:image|video)_pad\|>|<\|vision_start\|>"
)


@dataclass(frozen=True)
class Conversation:
    """Turns with known roles. Image and video parts hold `media` (path or bytes), not checked yet."""

    messages: list[Message]
    trimmed: bool = False  # without assistant turns before the first question
    unread: tuple[
        str, ...
    ] = ()  # columns with text, and keys of media parts, that were not used
    hidden: tuple[str, ...] = ()  # those of them that hold or name images or videos


def detect(source: str, wanted: Format = "auto", ask: str | None = None) -> Format:
    """The format of a source; DataError if it does not exist or has no known format.

    With `ask`, its images and videos need no question.
    """
    path = sources.check(source, hub=wanted == "hf")
    if wanted != "auto":
        return wanted
    if path.is_dir():
        return "hf"
    first, images, problem, texts = None, False, None, False
    for row in sources.read(source):
        first = first or row
        if not isinstance(row.value, Mapping):
            continue
        try:
            value = _request(row.value)
            name, given = _turns(value)
        except BadRowError as error:
            problem = problem or error
            continue
        pictured = any(_media_columns(value, kind) for kind in FILES)
        images |= pictured
        if given is not None and (pictured or name == "messages"):
            return "chat" if name == "messages" else "llava"
        texts |= given is not None  # ShareGPT, unless a later row has images
        if given is not None:
            continue
        if value.keys() & {*columns.QUESTIONS, *columns.MORE[:1]} or (ask and pictured):
            return "sharegpt" if texts else "hf"
    if texts:
        return "sharegpt"
    if problem:
        raise DataError(f"{source}: {first}: {problem}")
    if images:
        raise DataError(
            f"{source} has images and no questions: ask one, --ask 'Describe the image.'"
        )
    raise DataError(
        f"{source}: no row has 'conversations' (LLaVA, ShareGPT), 'messages' (chat) or a 'question': "
        f"{first or 'it has no rows'}. `vlmdistill prompts --help` shows a row of each format"
    )


def conversation(
    row: Row, kind: Format, sampling: Sampling | None = None, ask: str | None = None
) -> Conversation:
    """The checked conversation of a row; BadRowError if the row cannot be used.

    A `sampling` that is not empty overrides that in the row. `ask` is the question about the images and
    videos of a row that has none.
    """
    if row.problem:
        raise row.problem
    if not isinstance(row.value, Mapping):
        raise BadRowError(
            "not an object", f"{type(row.value).__name__} instead of a JSON object"
        )
    value = _request(row.value)
    name, raw = _turns(value)
    read = {name}
    if raw is None:
        made = columns.turns_of(value)
        shows = any(
            value.get(name) for kind in FILES for name in _media_columns(value, kind)
        )
        if made is None and ask and shows:
            made = columns.turns_of({**value, "question": ask})
        if made is None:
            raise BadRowError(
                "no conversation", f"columns: {', '.join(map(str, value))}"
            )
        raw, read = made
    system = columns.system(value)
    if system and not any(ROLES.get(_role(turn)) == "system" for turn in raw):
        raw = [{"role": "system", "content": "\n".join(system.values())}, *raw]
        read |= set(system)
    media = _MediaOfRow(value, kind, sampling)
    messages = [_message(turn, media) for turn in raw]
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise BadRowError("no user turn")
    media.place_numbered()
    users[0]["content"] = media.untagged() + users[0]["content"]
    unread = _unread(value, {*read, *media.columns})
    media.note_unread(unread, value)
    if name == "":
        media.note_hidden(columns.MORE, value)
    shows_media = any(
        part["type"] in FILES for message in messages for part in message["content"]
    )
    if not shows_media:
        media.require_nothing_hidden()
    return _ordered(messages, (*unread, *media.unread), tuple(media.hidden))


def _media_columns(value: Mapping[str, Any], kind: str) -> list[str]:
    """The columns of a row for images or videos: `image` or `images`, else `image_1`, `image_2` and so on."""
    named = [name for name in FILES[kind] if name in value]
    numbers = {
        name: int(match[1])
        for name in value
        if isinstance(name, str) and (match := NUMBERED[kind].fullmatch(name))
    }
    if any(value[name] for name in named) or not numbers:
        return named
    return [*named, *sorted(numbers, key=lambda name: numbers[name])]


def _unread(value: Mapping[str, Any], read: set[str]) -> list[str]:
    """The names of what has content and was not read."""
    full = (
        name
        for name, one in value.items()
        if isinstance(one, str | bytes | list | dict) and one
    )
    return [str(name) for name in full if name not in {"id", *read}]


def _request(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a line of an OpenAI batch file; any other row as it is."""
    body = value.get("body")
    if not isinstance(body, Mapping) or "custom_id" not in value:
        return value
    url = value.get("url")
    if isinstance(url, str) and not url.endswith(ASKING):
        raise BadRowError("no conversation", f"a request to {url}")
    named = {name: item for name, item in body.items() if name != "model"}
    return (
        {"messages": named.pop("input"), **named}
        if isinstance(named.get("input"), list)
        else named
    )


def _turns(value: Mapping[str, Any]) -> tuple[str, list[Any] | None]:
    """The turns of a row, and their column; a pair of user and assistant text becomes two turns."""
    for name in TURNS:
        items = _decoded(name, value.get(name))
        if isinstance(items, list) and (
            not items or any(isinstance(item, Mapping) for item in items)
        ):
            return name, [turn for item in items for turn in _spread(item)]
    return "", None


def _decoded(name: str, value: Any) -> Any:
    """The turns that JSON text or a list for each key stands for; any other value as it is.

    `datasets` writes a sequence of objects as one object of lists.

    BadRowError if text in the place of turns looks like them, and is no JSON.
    """
    if isinstance(value, Mapping) and value.keys() & SPEAKERS:
        return _transposed(value)
    if not (isinstance(value, str) and re.match(r"\s*\[\s*\{", value)):
        return value
    try:
        turns = loads(value)
        speaking = [
            isinstance(turn, Mapping) and bool(turn.keys() & SPEAKERS) for turn in turns
        ]
        return turns if all(speaking) else value
    except (ValueError, RecursionError) as error:
        if name not in TURNS[:3]:  # other columns may hold a question
            return value
        detail = f"the column {name} is text that is not JSON ({one_line(error)}): write it as JSON"
        raise BadRowError("conversation is text", detail) from None


def _transposed(lists: Mapping[str, Any]) -> Any:
    """The objects of an object of lists; any other value as it is."""
    if not all(isinstance(items, list) for items in lists.values()):
        return lists
    if len({len(items) for items in lists.values()}) > 1:
        raise BadRowError(
            "conversation of lists", f"the lists of {', '.join(lists)} differ in length"
        )
    return [
        dict(zip(lists, items, strict=True))
        for items in zip(*lists.values(), strict=True)
    ]


def _spread(item: Any) -> list[Any]:
    """The turns of one item: a turn, or a pair such as {"user": ..., "assistant": ...}."""
    if (
        not isinstance(item, Mapping)
        or item.keys() & {"role", "from"}
        or "assistant" not in item
    ):
        return [item]
    asked = {
        name: one
        for name, one in item.items()
        if name not in ("user", "human", "assistant")
    }
    asked |= {"role": "user", "content": item.get("user", item.get("human"))}
    return [asked, {"role": "assistant", "content": item["assistant"]}]


def _ordered(
    messages: list[Message], unread: tuple[str, ...], hidden: tuple[str, ...]
) -> Conversation:
    """Check that roles alternate; remove assistant turns before the first question."""
    system = [message for message in messages if message["role"] == "system"]
    spoken = [message for message in messages if message["role"] != "system"]
    if system and messages[: len(system)] != system:
        raise BadRowError("late system turn")
    first = next(
        index for index, message in enumerate(spoken) if message["role"] == "user"
    )
    if any(
        part["type"] in FILES
        for message in spoken[:first]
        for part in message["content"]
    ):
        raise BadRowError(
            "image before the first question",
            "the assistant shows it: give it to a user",
        )
    kept = spoken[first:]
    for before, after in pairwise(kept):
        if before["role"] == after["role"]:
            raise BadRowError(
                "roles do not alternate", f"two {after['role']} turns in a row"
            )
    return Conversation(system + kept, first > 0, unread, hidden)


class _MediaOfRow:
    """The images and videos of a row's columns, which tags and parts use up in order.

    A part may also name one by its `index`, from 0, again and again.
    """

    def __init__(
        self, value: Mapping[str, Any], kind: Format, sampling: Sampling | None
    ) -> None:
        self.value, self.kind, self.sampling = value, kind, sampling
        named = {what: _media_columns(value, what) for what in FILES}
        filled = {
            what: [name for name in names if value.get(name)]
            for what, names in named.items()
        }
        self.given = {what: _given(value, names) for what, names in filled.items()}
        self.placed: Counter[str] = Counter()  # by tags, and by parts without an index
        self.indexed = {what: set[int]() for what in FILES}
        self.numbered: dict[str, list[_Numbered]] = {what: [] for what in FILES}
        has_columns = any(named.values())  # maybe null
        self.tagged = kind == "llava" or has_columns  # else <image> is ordinary text
        self.tagged_by_number = kind != "chat" or has_columns
        self.columns = {name for names in filled.values() for name in names}
        self.columns |= {*SAMPLING} if self.given["video"] else set()
        self.unread: list[str] = []  # keys of parts
        self.hidden: dict[str, str] = {}  # what is unread, and holds media -> its kind
        self.unplaced = ""  # a placeholder of a row without media

    def of_part(self, what: str, part: Mapping[str, Any]) -> Media:
        """The image or video of a part without a path: the one of its index, else the next."""
        index = _index(part.get("index"), what)
        if index is None:
            return self.next(what)
        if self.placed[what]:
            raise _half_indexed(what)
        given = self.given[what]
        if not 0 <= index < len(given):
            raise BadRowError(
                f"{what} count",
                f"a part shows the {what} of index {index}, the row has {len(given)}",
            )
        self.indexed[what].add(index)
        return given[index]

    def next(self, what: str) -> Media:
        """The next image or video of the row, for a tag or a part without a path or an index."""
        if self.indexed[what]:
            raise _half_indexed(what)
        given, at = self.given[what], self.placed[what]
        if at >= len(given):
            raise BadRowError(
                f"{what} count",
                f"the text has more <{what}> than the row has files ({len(given)})",
            )
        self.placed[what] += 1
        return given[at]

    def tag(self, what: str, number: str | None) -> dict[str, Any]:
        """The part of a placeholder. LLaVA uses <image> for videos too."""
        if what == "image" and self.given["video"] and not self.given["image"]:
            what = "video"
        if number is None:
            return self.part(what, {}, self.next(what))
        part = self.part(what, {}, "")
        self.numbered[what].append(_Numbered(int(number), part))
        return part

    def place_numbered(self) -> None:
        """Give each numbered placeholder its image or video, counted from 1, or from 0 if there is a 0.

        BadRowError unless the numbers are those of all images or videos.
        """
        for what, placeholders in self.numbered.items():
            numbers = {placeholder.number for placeholder in placeholders}
            if not numbers:
                continue
            if self.placed[what] or self.indexed[what]:
                raise _half_indexed(what)
            given = self.given[what]
            first = min(min(numbers), 1)
            if numbers != {*range(first, first + len(given))}:
                shown = ", ".join(map(str, sorted(numbers)))
                raise BadRowError(
                    f"{what} count",
                    f"the text has the {what}s {shown}, the row has {len(given)}",
                )
            for placeholder in placeholders:
                placeholder.part["media"] = given[placeholder.number - first]
            self.indexed[what] |= {*range(len(given))}

    def note_unread(
        self, names: Collection[str], holder: Mapping[str, Any], of: str = ""
    ) -> None:
        """Note which of the values that are not read hold images or videos."""
        for name in names:
            if kind := media_kind(holder.get(name)):
                self.hidden[f"{of}{name}"] = kind

    def note_hidden(self, names: Collection[str], holder: Mapping[str, Any]) -> None:
        """Note which values are asked as text and are the name or the content of an image or a video."""
        self.note_unread([name for name in names if name in holder], holder)

    def require_nothing_hidden(self) -> None:
        """BadRowError if a row without images and videos has one elsewhere, or a placeholder for one."""
        for name, kind in self.hidden.items():
            raise BadRowError(
                f"{kind} in another column",
                f"'{name}': name the column {kind}, or remove it",
            )
        if self.unplaced:
            raise BadRowError(
                "image count", f"the text has {self.unplaced}, and the row no media"
            )

    def part(self, what: str, keys: Mapping[str, Any], media: Media) -> dict[str, Any]:
        """The part of an image or video with its own keys."""
        used = {"type", what, f"{what}_url", "path", "url", "bytes", "index", *SAMPLING}
        self.unread += [
            f"{what}.{key}"
            for key in keys
            if keys[key] not in (None, "") and key not in used
        ]
        if what == "image":
            return {"type": what, "media": media}
        _whole(keys)
        _whole(self.value)
        return {
            "type": what,
            "media": media,
            **(self.sampling or _sampling(keys) or _sampling(self.value)),
        }

    def untagged(self) -> list[dict[str, Any]]:
        """The parts of media without tags, put first as in LLaVA. BadRowError if only some have tags."""
        parts = []
        for what, given in self.given.items():
            shown = self.placed[what] + len(self.indexed[what])
            if given and not shown:
                parts += [self.part(what, {}, media) for media in given]
            elif len(given) != shown:
                counts = f"{shown} <{what}> in the text, {len(given)} given"
                raise BadRowError(f"{what} count", counts)
        return parts


def _index(value: Any, what: str) -> int | None:
    """The index in a part; None if it has none. Columns with nulls hold numbers as 1.0, others as text."""
    if value is None or value == "" or value != value:  # NaN
        return None
    try:
        if not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadRowError(
        f"{what} count",
        f"the index of a part is {str(value)[:40]!r}: give a number from 0",
    )


def _half_indexed(what: str) -> BadRowError:
    return BadRowError(
        f"{what} count", f"some parts name their {what} by an index, and some do not"
    )


@dataclass(frozen=True)
class _Numbered:
    """A placeholder with a number, and the part that it becomes."""

    number: int
    part: dict[str, Any]


def _given(value: Mapping[str, Any], names: list[str]) -> list[Media]:
    """The media of columns, in order. BadRowError if `image` and `images` differ."""
    lists = [_listed(value[name]) for name in names]
    if any(name in kinds for kinds in FILES.values() for name in names):
        if any(given != lists[0] for given in lists):
            raise BadRowError(
                "several media columns", f"{' and '.join(names)} differ: keep one"
            )
        return lists[0]
    return [media for given in lists for media in given]


def _listed(found: Any) -> list[Media]:
    """The media of a column: one, or a list."""
    return [_media(item) for item in (found if isinstance(found, list) else [found])]


def _media(item: Any) -> Media:
    """The path or the bytes of a file, in any form that rows use."""
    if isinstance(item, Mapping):
        if isinstance(encoded := item.get("bytes"), str) and encoded:
            return _from_base64(encoded)
        item = item.get("bytes") or item.get("path") or item.get("url")
    if isinstance(item, str) and item.startswith("data:"):
        return _from_base64(item.partition(",")[2])
    if isinstance(item, str) and item.startswith("file://"):
        return unquote(
            item.removeprefix("file://").removeprefix("localhost"),
            errors="surrogateescape",
        )
    if isinstance(item, str) and item:
        return item
    if isinstance(item, bytes):
        return item
    if isinstance(item, list):
        raise BadRowError(
            "list of frames",
            "put the frames of a video into a folder and give its path",
        )
    raise BadRowError("no media file", f"neither path nor bytes: {str(item)[:60]}")


def _from_base64(text: str) -> bytes:
    """Decode base64, with or without line breaks."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise BadRowError(
            "no media file", f"its bytes are text, but not base64: {error}"
        ) from None


def _role(turn: Any) -> str:
    """The role of a turn in lower case; empty if it is not a turn."""
    return (
        str(turn.get("role") or turn.get("from")).lower()
        if isinstance(turn, Mapping)
        else ""
    )


def _message(turn: Any, media: _MediaOfRow) -> Message:
    """One turn of either style: from/value or role/content."""
    if not isinstance(turn, Mapping):
        raise BadRowError("not an object", f"a turn is {type(turn).__name__}")
    role = _role(turn)
    if role in TOOLS or turn.get("tool_calls") or turn.get("function_call"):
        raise BadRowError("tool call", f"a turn of '{role}': prompts cannot call tools")
    if role not in ROLES:
        raise BadRowError(
            "unknown role", f"{role}, in a turn with {', '.join(map(str, turn))}"
        )
    name = next(
        (name for name in ("content", "value", "text") if turn.get(name) is not None),
        "content",
    )
    content, outer = _parts_of_text(turn.get(name)), media
    own = _MediaOfRow(turn, media.kind, media.sampling)
    if any(own.given.values()):
        media = own
    parts: list[dict[str, Any]] = []
    for part in (
        content if isinstance(content, list) else [{"type": "text", "text": content}]
    ):
        parts += _parts(part, media, is_response=ROLES[role] == "assistant")
    if media is own:
        own.place_numbered()
        parts = own.untagged() + parts
        outer.unread += own.unread
        outer.hidden |= own.hidden
    unread = _unread(turn, {"role", "from", name, *own.columns})
    outer.unread += [f"turn.{key}" for key in unread]
    outer.note_unread(unread, turn, "turn.")
    has_text = any(part["type"] == "text" and part["text"].strip() for part in parts)
    shows_media = any(part["type"] in FILES for part in parts)
    if not has_text and not (ROLES[role] == "user" and shows_media):
        raise BadRowError("empty turn", role)
    return {"role": ROLES[role], "content": parts}


def _parts_of_text(content: Any) -> Any:
    """The parts that JSON text as a whole content stands for; any other content as it is."""
    if not (isinstance(content, str) and re.match(r'\s*\[\s*\{\s*"', content)):
        return content
    try:
        parts = loads(content)
    except (ValueError, RecursionError):
        return content
    kinds = [
        str(part.get("type")) if isinstance(part, Mapping) else "" for part in parts
    ]
    kinds = [kind.removeprefix("input_").removesuffix("_url") for kind in kinds]
    return (
        parts if kinds and all(kind in ("text", *FILES) for kind in kinds) else content
    )


def _parts(part: Any, media: _MediaOfRow, is_response: bool) -> list[dict[str, Any]]:
    """The parts of one content item: several if its text has placeholders.

    A response writes <image>, and shows none.
    """
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = ""
    if isinstance(
        part, Mapping
    ):  # without a type as in Qwen's examples: {"image": path}
        named = (what for what in FILES if part.get(what) or part.get(f"{what}_url"))
        kind = str(part.get("type") or next(named, "text"))
    what = kind.removeprefix("input_").removesuffix("_url")
    if what == "text":
        text = part.get("text")
        unread = _unread(part, {"type", "text"})
        media.unread += [f"text.{key}" for key in unread]
        media.note_unread(unread, part, "text.")
        if text is None:
            return []
        if not isinstance(text, str):
            raise BadRowError("text is not a string", type(text).__name__)
        if position := lone_surrogate(text):
            raise BadRowError(
                "text is not Unicode", f"unpaired surrogate at character {position}"
            )
        if is_response:
            return [{"type": "text", "text": text}] if text else []
        return _parts_at_placeholders(text, media)
    if what not in FILES:
        raise BadRowError("unknown part", kind or type(part).__name__)
    names = (what, f"{what}_url", "path", "url", "bytes")
    name = next((name for name in names if part.get(name)), None)
    given = {"bytes": part[name]} if name == "bytes" else part[name] if name else None
    return [
        media.part(
            what, part, media.of_part(what, part) if given is None else _media(given)
        )
    ]


def _parts_at_placeholders(text: str, media: _MediaOfRow) -> list[dict[str, Any]]:
    """The texts and media of a text with placeholders. Other text stays as it is, with its indentation."""
    if media.tagged and any(media.given.values()) and (foreign := FOREIGN.search(text)):
        raise BadRowError("foreign placeholder", f"{foreign[0]}: write <image>")
    parts: list[dict[str, Any]] = []
    start = 0
    for match in PLACEHOLDER.finditer(text):
        _, plain, counted, number = match.groups()
        if number is not None and not any(media.given.values()):
            if media.tagged_by_number:
                media.unplaced = media.unplaced or match[0].strip()
            continue
        if number is None and not media.tagged:
            continue
        before = text[start : match.start()]
        if before.strip():
            parts.append({"type": "text", "text": before})
        parts.append(media.tag((plain or counted).lower(), number))
        start = match.end()
    rest = text[start:]
    if rest.strip() or (rest and not start):
        parts.append({"type": "text", "text": rest})
    return parts


def _whole(keys: Mapping[str, Any]) -> None:
    """BadRowError if the row uses only a part of a video, which prompts do not support."""
    if bounds := [f"{name} {keys[name]}" for name in CLIPS if keys.get(name)]:
        raise BadRowError(
            "part of a video", f"{', '.join(bounds)}: cut it into a separate file"
        )


def _sampling(keys: Mapping[str, Any]) -> dict[str, float | int]:
    """The video sampling of a row: frames per second, a number of frames, or empty."""
    fps: Any = keys.get("fps")
    count: Any = next(
        (keys[name] for name in COUNTS if keys.get(name) is not None), None
    )
    if fps is None and count is None:
        return {}
    if fps is not None and count is not None:
        raise BadRowError(
            "video sampling",
            f"fps {fps} and frames {count}: give one of them, or --fps",
        )
    try:
        sampling: dict[str, float | int] = (
            {"frames": int(count)} if fps is None else {"fps": float(fps)}
        )
    except (TypeError, ValueError, OverflowError):
        sampling = {}
    if not sampling or not 0 < min(sampling.values()) <= MOST:
        problem = f"fps {fps}, frames {str(count)[:40]}: give a number above 0, at most {MOST}"
        raise BadRowError("video sampling", problem)
    return sampling
