"""The formats of rows, and the conversation of a row: LLaVA, ShareGPT, chat messages, question columns.

A row becomes a `Conversation` or raises BadRowError: nothing is dropped silently or repaired by guessing.
`docs/inputs.md` shows a row of each format.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, Protocol

from vlmdistill.pipelines.data.prompts import columns, sources
from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.hidden_media import (
    HiddenMediaError,
    kind_of_column,
    kind_of_keys,
    media_kind,
    names_unseen,
)
from vlmdistill.pipelines.data.prompts.json_rows import loads
from vlmdistill.pipelines.data.prompts.row import Row, has_content
from vlmdistill.pipelines.data.prompts.row_media import (
    KINDS,
    RowMedia,
    Sampling,
    Unread,
    has_media,
    has_media_columns,
    unread_names,
)
from vlmdistill.pipelines.data.prompts.turns import (
    MessageReader,
    is_open,
    is_system,
    require_alternating,
)
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line

Format = Literal["auto", "llava", "sharegpt", "chat", "hf"]
Columns = Mapping[str, Any]

MESSAGES = "messages"
CONVERSATIONS = ("conversations", "conversation")
"""Columns that always hold turns, maybe as JSON text."""
OTHER_TURNS = ("items", "texts", "prompt")  # hold turns, or something else
TURN_KEYS = {"role", "from", "user", "human", "assistant"}
"""Keys of a turn, or of a pair of turns."""
QUESTION_COLUMNS = {*columns.QUESTIONS, MESSAGES, *CONVERSATIONS}
SYSTEM_COLUMN = columns.SYSTEM[0]
UNSEEN = ("audio", "audios", "wav", "mp3", "flac", "pdf", "pdfs")
"""Columns, or endings in an archive, of what no target sees."""
OF_A_PROMPT = {"key", "split", MESSAGES, "augmentation", "augmentation_text"}
"""Columns that only the prompts file of a workspace has together."""
OF_A_REQUEST = ("custom_id", "method", "url", "body")
"""Columns of a batch file. Others are as those of the body."""
CHAT_URLS = ("chat/completions", "/responses")
"""Ends of the URLs that a batch's requests may have."""


class NoRowsError(DataError):
    """A source has no rows at all."""


@dataclass(frozen=True)
class Conversation:
    """Turns with known roles. Image and video parts hold `media` (path or bytes), not checked yet."""

    messages: list[Message]
    trimmed: bool = False  # assistant turns before the first question were removed
    unread: tuple[str, ...] = ()
    """Columns with text, and keys of turns and parts, that were not used."""
    hidden: tuple[str, ...] = ()
    """Those of `unread` that hold or name images or videos."""
    unshown: tuple[str, ...] = ()
    """Placeholders that are text: images are missing there, if other rows have columns for them."""
    shows_by_tag: bool = False
    """Whether a placeholder shows an image or a video."""
    has_history: bool = False
    """Whether a column has turns before the question of the row, which is the last one."""


@dataclass(frozen=True)
class Turns:
    """The turns of a row, and the columns that they were read from."""

    row: Columns  # or the body of a request: what holds the turns, images and videos
    turns: list[Any]
    read_columns: set[str]


class RowFormat(Protocol):
    """One way to write a conversation as a row."""

    format: Format

    def matches(self, row: Columns) -> bool:
        """Whether a row is of this format; BadRowError if it is, and cannot be read."""

    def turns(self, row: Columns) -> Turns:
        """The turns of a row of this format; BadRowError if they cannot be read."""


class OpenAIBatch:
    """A request of an OpenAI batch file: for chat completions, or for responses."""

    format: Format = "chat"

    def matches(self, row: Columns) -> bool:
        """Whether a row is a request."""
        return isinstance(row.get("body"), Mapping) and "custom_id" in row

    def turns(self, row: Columns) -> Turns:
        """The turns of its body; BadRowError if the request is for something else."""
        url = row.get("url")
        if isinstance(url, str) and not url.endswith(CHAT_URLS):
            raise BadRowError("no conversation", f"a request to {url}")
        beside = {name: row[name] for name in row if name not in OF_A_REQUEST}
        body = {**beside, **row["body"]}
        body.pop("model", None)
        if isinstance(body.get("instructions"), str):
            body = {SYSTEM_COLUMN: body.pop("instructions"), **body}
        if MESSAGES not in body and isinstance(body.get("input"), list):
            body[MESSAGES] = body.pop("input")
        for body_format in FORMATS[1:]:
            if body_format.matches(body):
                return body_format.turns(body)
        raise _no_conversation(body)


class Chat:
    """OpenAI messages."""

    format: Format = "chat"

    def matches(self, row: Columns) -> bool:
        """Whether a row has messages."""
        return _list_of_turns(row, MESSAGES) is not None

    def turns(self, row: Columns) -> Turns:
        """Its messages."""
        return Turns(row, _turns_in(row, MESSAGES), {MESSAGES})


class ShareGPT:
    """Turns of human and gpt, or pairs of user and assistant, in one of several columns.

    LLaVA's are the same, with images or videos in columns and placeholders for them in the text.
    """

    format: Format = "sharegpt"

    def matches(self, row: Columns) -> bool:
        """Whether a row has turns."""
        return self._column(row) is not None

    def turns(self, row: Columns) -> Turns:
        """Its turns."""
        name = self._column(row) or CONVERSATIONS[0]
        return Turns(row, _turns_in(row, name), {name})

    def _column(self, row: Columns) -> str | None:
        """The column with the turns of a row, if any."""
        for name in (*CONVERSATIONS, *OTHER_TURNS):
            if name in row and _list_of_turns(row, name) is not None:
                return name
        return None


class Questions:
    """A question, with a response and more in columns."""

    format: Format = "hf"

    def matches(self, row: Columns) -> bool:
        """Whether a row has a question."""
        return columns.has_question(row)

    def turns(self, row: Columns) -> Turns:
        """Earlier turns, the question with what belongs to it, and the response."""
        turns, read = columns.turns_of(row)
        return Turns(row, turns, read)


FORMATS: tuple[RowFormat, ...] = (
    OpenAIBatch(),
    Chat(),
    ShareGPT(),
    Questions(),
)


def format_of(row: Columns) -> RowFormat | None:
    """The first format that a row matches; None if it matches none. BadRowError if it is damaged."""
    for row_format in FORMATS:
        if row_format.matches(row):
            return row_format
    return None


def detect(source: str, wanted: Format = "auto", ask: str | None = None) -> Format:
    """The format of a source; DataError if it does not exist or has no known format.

    With `ask`, rows with images or videos need no question of their own.
    """
    path = sources.check(source, hub=wanted == "hf")
    if wanted != "auto":
        return wanted
    if path.is_dir():
        return "hf"
    search = _FormatSearch(source)
    for row in sources.read(source):
        search.look(_without_nan(row), ask)
        if search.decided:
            return search.decided
    return search.undecided()


@dataclass
class _FormatSearch:
    """What the first rows of a source tell about its format."""

    source: str
    decided: Format | None = None
    first_row: Row | None = None
    unread_row: Row | None = None  # the first row that could not be read
    damaged: tuple[Row, BadRowError] | None = None  # the first one with a damaged turn
    has_media: bool = False  # columns for images or videos

    def look(self, row: Row, ask: str | None) -> None:
        """Take one more row into account."""
        self.first_row = self.first_row or row
        if row.problem:
            self.unread_row = self.unread_row or row
        if not isinstance(row.value, Mapping):
            return
        try:
            row_format = format_of(row.value)
            if row_format is None:
                _require_no_question(row.value)
        except BadRowError as error:
            self.damaged = self.damaged or (row, error)
            return
        row_has_media = row.problem is None and has_media_columns(row.value)
        self.has_media |= row_has_media
        if row_format is not None:
            self.decided = row_format.format
        elif row_has_media and ask:
            self.decided = "hf"

    def undecided(self) -> Format:
        """The format when no row decides; DataError if there is none."""
        if self.damaged:
            row, problem = self.damaged
            raise DataError(f"{self.source}: {row}: {problem}")
        if self.has_media:
            raise DataError(
                f"{self.source} has images and no column of questions "
                f"({self.unread_row or self.first_row}): rename the one that has them to question, or ask "
                "one, --ask 'Describe the image.'"
            )
        refusal = DataError if self.first_row else NoRowsError
        raise refusal(
            f"{self.source}: no row has 'conversations' (LLaVA, ShareGPT), 'messages' (chat) or a "
            f"'question': {self.first_row or 'it has no rows'}. `vlmdistill prompts --help` shows a row of "
            "each format"
        )


def conversation(
    row: Row,
    source_format: Format,
    sampling: Sampling | None = None,
    ask: str | None = None,
) -> Conversation:
    """The checked conversation of a row; BadRowError if the row cannot be used.

    A `sampling` that is not empty overrides that in the row. `ask` is the question about images and videos
    in rows without a question.
    """
    if row.problem:
        raise row.problem
    row = _without_nan(row)
    if not isinstance(row.value, Mapping):
        raise BadRowError(
            "not an object", f"{type(row.value).__name__} instead of a JSON object"
        )
    _require_no_prompt(row.value)
    located_turns = _without_open_turn(_with_system(_turns_of(row.value, ask)))
    # In LLaVA, <image> is a placeholder even in a row without images. In a chat, whose parts show its images,
    # <image 1> is ordinary text in such a row.
    media = RowMedia(located_turns.row, sampling, has_tags=source_format == "llava")
    reader = MessageReader(media, is_chat=source_format == "chat")
    messages = [reader.message(turn) for turn in located_turns.turns]
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise BadRowError("no user turn")
    media.place_numbered()
    first_user = users[0]
    first_user["content"] = media.parts_without_placeholder() + first_user["content"]
    _require_nothing_unseen(located_turns.row)
    unread = _unread(located_turns, media)
    has_history = columns.HISTORY in located_turns.read_columns
    talk = replace(_trimmed(messages, unread), has_history=has_history)
    parts = [part for message in messages for part in message["content"]]
    if not any(part["type"] in KINDS for part in parts):
        _require_nothing_hidden(located_turns.row, unread, reader)
        return replace(talk, unshown=tuple(reader.unshown))
    if reader.lines:
        raise BadRowError(
            "image count",
            f"the text has the line {reader.lines[0]}, but parts show the images and videos: remove it",
        )
    return replace(talk, shows_by_tag=reader.shows_by_tag)


def _without_nan(row: Row) -> Row:
    """The row without columns of NaN, which tables have where there is no value."""
    if not isinstance(row.value, Mapping):
        return row
    value = {name: item for name, item in row.value.items() if item == item}
    return replace(row, value=value)


def _require_no_prompt(row: Columns) -> None:
    """BadRowError for a prompt of a workspace, which would lose its split and the time of its request."""
    if row.keys() >= OF_A_PROMPT:
        raise BadRowError(
            "prompt of a workspace",
            "give its file to --prompts, or copy it with the folders of its images",
        )


def _turns_of(row: Columns, ask: str | None) -> Turns:
    """The turns of a row; with `ask`, a row with images or videos needs no question."""
    row_format = format_of(row)
    if row_format is not None:
        return row_format.turns(row)
    _require_no_question(row)
    if ask and has_media(row):
        return Questions().turns({**row, "question": ask})
    raise _no_conversation(row)


def _require_no_question(row: Columns) -> None:
    """BadRowError if a column of a row without turns is named after questions, or has such keys."""
    for name, value in row.items():
        if value and (_is_of_questions(name) or _has_questions(value)):
            raise BadRowError(
                "question of another form",
                f"'{name}': give one text in a column question, or turns in a column conversations",
            )


def _is_of_questions(name: Any) -> bool:
    plain = str(name).strip().lower()
    return not {plain, plain.removesuffix("s")}.isdisjoint(QUESTION_COLUMNS)


def _has_questions(value: Any) -> bool:
    """Whether a value is an object with questions, or a list of them.

    Tables give all objects of a column the same keys, some without a value. The `prompt` of a single object
    may be that by which an image was made.
    """
    is_list = isinstance(value, list)
    holder = value[0] if is_list else value
    if not isinstance(holder, Mapping):
        return False
    filled = [
        name
        for name, item in holder.items()
        if has_content(item)
        and (is_list or isinstance(item, list) or name in columns.QUESTIONS[:1])
    ]
    return any(map(_is_of_questions, filled))


def _no_conversation(row: Columns) -> BadRowError:
    return BadRowError("no conversation", f"columns: {', '.join(map(str, row))}")


def _with_system(located_turns: Turns) -> Turns:
    """The turns with the row's system prompt first, unless they have one."""
    system = columns.system(located_turns.row)
    if not system or any(is_system(turn) for turn in located_turns.turns):
        return located_turns
    first = {"role": "system", "content": _system_content([*system.values()])}
    return Turns(
        located_turns.row,
        [first, *located_turns.turns],
        located_turns.read_columns | set(system),
    )


def _without_open_turn(located_turns: Turns) -> Turns:
    """The turns without an empty response at their end, which is the one that is asked for."""
    turns = located_turns.turns
    if turns and is_open(turns[-1]):
        turns = turns[:-1]
    return replace(located_turns, turns=turns)


def _system_content(values: Sequence[Any]) -> Any:
    """The content of a system turn: texts as its lines; if some are lists of parts, all as parts.

    Equal ones are one.
    """
    values = [value for i, value in enumerate(values) if value not in values[:i]]
    if all(isinstance(value, str) for value in values):
        return "\n".join(values)
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [*chain.from_iterable(lists)]


def _unread(located_turns: Turns, media: RowMedia) -> Unread:
    """What no prompt includes: columns of the row, then keys of its turns and parts."""
    unread = Unread()
    unread.add(
        unread_names(located_turns.row, located_turns.read_columns | media.columns),
        located_turns.row,
    )
    if located_turns.read_columns.isdisjoint((MESSAGES, *CONVERSATIONS)):
        # A detail that became text of the question may be the path of an image.
        details = located_turns.read_columns.intersection(columns.DETAILS)
        in_order = [name for name in columns.DETAILS if name in details]
        unread.look_into(in_order, located_turns.row)
    unread.extend(media.unread)
    return unread


def _require_nothing_unseen(row: Columns) -> None:
    """BadRowError if a row has sound or a document beside its text."""
    for name in UNSEEN:
        if isinstance(row.get(name), str | bytes | list | Mapping) and row[name]:
            reason = name.removesuffix("s")
            raise BadRowError(reason, f"'{name}': prompts have images and videos")


def _require_nothing_hidden(
    row: Columns, unread: Unread, reader: MessageReader
) -> None:
    """Refuse a row that seems to have images or videos, where none was read.

    HiddenMediaError if a column that was not read holds one, or if a column is named after one; BadRowError
    if such a column names a file of sound or a document, or if the text has a placeholder.
    """
    if unread.hidden:
        name, kind = next(iter(unread.hidden.items()))
        raise HiddenMediaError(kind, name)
    for name, value in row.items():
        named = kind_of_column(str(name), value) or kind_of_keys(value)
        if name == "id":  # which is never unread
            named = named or media_kind(value)
        if named:
            raise HiddenMediaError(named, str(name))
    has_context = any(has_content(row.get(name)) for name in columns.DETAILS)
    for name in unread.names:
        kind = names_unseen(name, row.get(name))
        if kind == "audio" or (kind and not has_context):
            advice = "prompts have images and videos; if its text is here, remove it"
            raise BadRowError(kind, f"'{name}': {advice}")
    if reader.unplaced:
        raise without_media(reader.unplaced[0])


def without_media(placeholder: str) -> BadRowError:
    """The problem of a text with a placeholder, in a row without images and videos."""
    return BadRowError(
        "image count", f"the text has {placeholder}, and the row no media"
    )


def _trimmed(messages: list[Message], unread: Unread) -> Conversation:
    """The conversation without assistant turns before the first question.

    BadRowError if roles do not alternate, or if a system turn comes late.
    """
    system = [message for message in messages if message["role"] == "system"]
    spoken = [message for message in messages if message["role"] != "system"]
    if system and messages[: len(system)] != system:
        raise BadRowError("late system turn")
    roles = [message["role"] for message in spoken]
    first_question = roles.index("user")
    before = [part for turn in spoken[:first_question] for part in turn["content"]]
    if any(part["type"] in KINDS for part in before):
        raise BadRowError(
            "image before the first question",
            "the assistant shows it: give it to a user",
        )
    kept = spoken[first_question:]
    require_alternating(kept)
    return Conversation(
        messages=system + kept,
        trimmed=first_question > 0,
        unread=tuple(unread.names),
        hidden=tuple(unread.hidden),
    )


def _turns_in(row: Columns, name: str) -> list[Any]:
    """The turns in a column; a pair of user and assistant is two turns."""
    items = _list_of_turns(row, name) or []
    return [turn for item in items for turn in _turns_of_item(item)]


def _list_of_turns(row: Columns, name: str) -> list[Any] | None:
    """The list in a column that holds turns; None if the column holds something else.

    An empty list has turns, of which there are none, unless the column may hold something else. BadRowError
    if text in the place of turns looks like them, and is no JSON.
    """
    items = _decoded(name, row.get(name))
    if not isinstance(items, list):
        return None
    if not items:
        return None if name in OTHER_TURNS else items
    has_objects = any(isinstance(item, Mapping) for item in items)
    return items if has_objects else None


def _decoded(name: str, value: Any) -> Any:
    """The turns that JSON text, or one object of lists, stands for; any other value as it is.

    `datasets` writes a list of objects as one object, with a list for each key.
    """
    if isinstance(value, Mapping) and value.keys() & TURN_KEYS:
        return _objects_of_lists(value)
    if not (isinstance(value, str) and re.match(r"\s*\[\s*\{", value)):
        return value
    try:
        turns = loads(value)
    except (ValueError, RecursionError) as error:
        if name in OTHER_TURNS and not _is_python_of_turns(value):
            return value
        raise BadRowError(
            "conversation is text",
            f"the column {name} is text that is not JSON ({one_line(error)}): write it as JSON",
        ) from None
    return turns if all(_is_turn(turn) for turn in turns) else value


def _is_python_of_turns(text: str) -> bool:
    """Whether text is a list of turns as Python writes it, as pandas does in a CSV file."""
    try:
        items = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return isinstance(items, list) and all(map(_is_turn, items))


def _is_turn(item: Any) -> bool:
    return isinstance(item, Mapping) and bool(item.keys() & TURN_KEYS)


def _objects_of_lists(lists: Columns) -> Any:
    """One object for each place of the lists in an object; any other value as it is."""
    if not all(isinstance(items, list) for items in lists.values()):
        return lists
    if len({len(items) for items in lists.values()}) > 1:
        raise BadRowError(
            "conversation of lists", f"the lists of {', '.join(lists)} differ in length"
        )
    rows = zip(*lists.values(), strict=True)
    return [dict(zip(lists, items, strict=True)) for items in rows]


def _turns_of_item(item: Any) -> list[Any]:
    """The turns of one item: a turn, or a pair such as {"user": ..., "assistant": ...}."""
    if not isinstance(item, Mapping) or "assistant" not in item:
        return [item]
    if item.keys() & {"role", "from"}:
        return [item]
    speakers = ("user", "human", "assistant")
    question = {name: value for name, value in item.items() if name not in speakers}
    question |= {"role": "user", "content": item.get("user", item.get("human"))}
    return [question, {"role": "assistant", "content": item["assistant"]}]
