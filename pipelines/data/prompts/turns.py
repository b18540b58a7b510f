"""Turn the turns of a row into messages with known roles and checked parts.

A response may write <image> and shows none; anything else that is unknown raises BadRowError.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.json_rows import loads
from vlmdistill.pipelines.data.prompts.row import has_content
from vlmdistill.pipelines.data.prompts.row_media import (
    FILE_KEYS,
    FOREIGN_PLACEHOLDER,
    KINDS,
    ON_ITS_OWN_LINE,
    PLACEHOLDER,
    WORD_PLACEHOLDER,
    Kind,
    Part,
    RowMedia,
    placeholder_in,
    read_file,
    split_at_placeholders,
    unread_names,
)
from vlmdistill.pipelines.data.prompts.text_images import image_named_in
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import lone_surrogate

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"
    ),
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
CONTENT_KEYS = ("content", "value", "text")
TEMPLATED = re.compile(
    r"<\|im_start\|>(?:system|user|assistant)|<\|start_header_id\|>(?:system|user|assistant)"
    r"|<start_of_turn>(?:user|model)|\A\s*+(?:<s>\s*+)?\[INST\]|\[/INST\]"
    r"|<\|(?:im_)?(?:system|user|assistant)\|>|<\uFF5C(?:User|Assistant)\uFF5C>"
    r"|<\|start\|>(?:system|user|assistant)|<\|start_of_role\|>"
    r"|<\|START_OF_TURN_TOKEN\|>|<extra_id_\d>(?:System|User|Assistant)"
)
"""Where a text has turns, as chat templates write them: targets read their marks as the marks of turns."""
OPEN_END = re.compile(r"(?:\b(?:Assistant|ASSISTANT)|### Response):\s*+\Z")
"""The end of a prompt that a template without such marks wrote, if a question's beginning is before it."""
QUESTION_MARK = re.compile(r"\b(?:USER|Human|User):|### Instruction:")


def role_of(turn: Any) -> str:
    """The role of a turn in lower case; empty if it is not a turn."""
    if not isinstance(turn, Mapping):
        return ""
    return str(turn.get("role") or turn.get("from")).lower()


def is_open(turn: Any) -> bool:
    """Whether a turn is an assistant's without content: the response that is asked for."""
    if ROLES.get(role_of(turn)) != "assistant" or _calls_tools(turn):
        return False
    items = [item for key in CONTENT_KEYS for item in _content_items(turn.get(key))]
    texts = [item.get("text") if _part_kind(item) == "text" else item for item in items]
    return not any(map(has_content, texts))


def is_system(turn: Any) -> bool:
    """Whether a turn is a system prompt."""
    return ROLES.get(role_of(turn)) == "system"


@dataclass
class MessageReader:
    """Reads the turns of one row."""

    media: RowMedia
    is_chat: bool = False
    """Whether parts show the images, and texts are as a server reads them; else `<image 1>` needs one."""
    numbered: list[str] = field(default_factory=list)
    """Placeholders with a number, of a row without images and videos."""
    lines: list[str] = field(default_factory=list)
    """Placeholders that are the first or the last line of a text, where no column has images or videos."""
    unshown: list[str] = field(default_factory=list)
    """Placeholders that are ordinary text, since the row has no column for media."""
    shows_by_tag: bool = False
    """Whether a placeholder shows an image or a video."""

    @property
    def unplaced(self) -> list[str]:
        """Placeholders that need an image or a video, also in a row that shows none."""
        return [*self.lines, *self.numbered]

    def message(self, turn: Any) -> Message:
        """The message of a turn of either style: from/value or role/content."""
        if not isinstance(turn, Mapping):
            raise BadRowError("not an object", f"a turn is {type(turn).__name__}")
        role = _known_role(turn)
        filled = (key for key in CONTENT_KEYS if turn.get(key) is not None)
        content_key = next(filled, "content")
        media = self.media.of_turn(turn)
        parts = []
        for item in _content_items(turn.get(content_key)):
            parts += self._parts(item, media, role)
        own_columns = set[str]()
        if media is not self.media:
            media.place_numbered()
            parts = media.parts_without_placeholder() + parts
            self.media.unread.extend(media.unread)
            own_columns = media.columns
        read = {"role", "from", content_key, *own_columns}
        self.media.unread.add(unread_names(turn, read), turn, "turn.")
        _require_content(role, parts)
        return {"role": role, "content": parts}

    def _parts(self, item: Any, media: RowMedia, role: str) -> list[Part]:
        """The parts of one item of a content: several if its text has placeholders."""
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        kind = _part_kind(item)
        if kind == "text":
            return self._parts_of_text(item, media, role)
        for known in KINDS:
            if kind == known:
                return [_media_part(item, known, media)]
        raise BadRowError("unknown part", kind or type(item).__name__)

    def _parts_of_text(
        self, item: Mapping[str, Any], media: RowMedia, role: str
    ) -> list[Part]:
        is_response = role == "assistant"
        text = item.get("text")
        other_keys = unread_names(item, {"type", "text"})
        media.unread.add(other_keys, item, "text.")
        if text is None:
            if any(isinstance(item.get(name), str) for name in other_keys):
                raise BadRowError(
                    "text part without text", f"it has {', '.join(other_keys)}"
                )
            return []
        if not isinstance(text, str):
            raise BadRowError("text is not a string", type(text).__name__)
        if position := lone_surrogate(text):
            raise BadRowError(
                "text is not Unicode", f"unpaired surrogate at character {position}"
            )
        mark = TEMPLATED.search(text)
        if role == "user" and not self.is_chat:
            mark = mark or _open_end(text)
        if mark:
            raise BadRowError(
                "chat template in the text", f"{mark[0]}: write turns with roles"
            )
        if is_response and not self.media.tag_in_response:
            self.media.tag_in_response = placeholder_in(text)
        if is_response or not any(sign in text for sign in "<[{&"):
            return [{"type": "text", "text": text}] if text else []
        return self._parts_at_placeholders(text, media)

    def _parts_at_placeholders(self, text: str, media: RowMedia) -> list[Part]:
        """The texts and media of a text; all but its placeholders stays as it is, with its indentation."""
        if named := image_named_in(text):
            advice = "write <image>, and the path in a column image"
            raise BadRowError("image in the text", f"{named[:80]}: {advice}")
        foreign = FOREIGN_PLACEHOLDER.search(text)
        if not (self.shows_by_tag or PLACEHOLDER.search(text)):
            foreign = foreign or WORD_PLACEHOLDER.search(text)
        if foreign and media.tagged and media:
            raise BadRowError("foreign placeholder", f"{foreign[0]}: write <image>")
        if not media.tagged:
            lines = ON_ITS_OWN_LINE.finditer(text)
            self.lines += [line[1] or line[2] for line in lines]
        parts: list[Part] = []
        pending = ""  # text before the next placeholder that shows something
        for piece in split_at_placeholders(text):
            if isinstance(piece, str):
                pending += piece
            elif not self._shows(piece, media):
                pending += piece[0]
            else:
                if pending.strip():
                    parts.append({"type": "text", "text": pending})
                pending = ""
                kind: Kind = "image" if "image" in piece[0].lower() else "video"
                parts.append(media.part_of_placeholder(kind, piece["number"]))
        is_whole = not parts
        if pending.strip() or (pending and is_whole):
            parts.append({"type": "text", "text": pending})
        return parts

    def _shows(self, placeholder: re.Match[str], media: RowMedia) -> bool:
        """Whether a placeholder shows an image or a video; else it is ordinary text."""
        is_numbered = placeholder["number"] is not None
        if media or (media.tagged and not is_numbered):
            self.shows_by_tag = True
            return True
        is_text = not media.tagged and (self.is_chat or not is_numbered)
        named = self.unshown if is_text else self.numbered
        named.append(placeholder[0].strip())
        return False


def _open_end(text: str) -> re.Match[str] | None:
    """The mark of an assistant's turn at the end of a text that has that of a question, or a line for it."""
    end = OPEN_END.search(text)
    if end is None:
        return None
    before = text[: end.start()]
    has_own_line = before.rstrip(" \t").endswith("\n")
    return end if has_own_line or QUESTION_MARK.search(before) else None


def _known_role(turn: Mapping[str, Any]) -> str:
    """The role of a turn: system, user or assistant."""
    role = role_of(turn)
    if role in TOOLS or _calls_tools(turn):
        raise BadRowError("tool call", f"a turn of '{role}': prompts cannot call tools")
    if role not in ROLES:
        raise BadRowError(
            "unknown role", f"{role}, in a turn with {', '.join(map(str, turn))}"
        )
    return ROLES[role]


def _calls_tools(turn: Mapping[str, Any]) -> bool:
    return bool(turn.get("tool_calls") or turn.get("function_call"))


def _content_items(content: Any) -> list[Any]:
    """The items of a content: a list, a list written as JSON text, or one text."""
    parsed = _parsed_parts(content)
    return parsed if isinstance(parsed, list) else [{"type": "text", "text": parsed}]


def _parsed_parts(content: Any) -> Any:
    """The parts that JSON text as a whole content stands for; any other content as it is."""
    if not (isinstance(content, str) and re.match(r'\s*\[\s*\{\s*"', content)):
        return content
    try:
        parts = loads(content)
    except (ValueError, RecursionError):
        return content
    kinds = [
        _plain_kind(str(part.get("type"))) if isinstance(part, Mapping) else ""
        for part in parts
    ]
    is_parts = bool(kinds) and all(kind in ("text", *KINDS) for kind in kinds)
    return parts if is_parts else content


def _part_kind(item: Any) -> str:
    """The kind of a part. It may have no type, as in Qwen's examples: {"image": path}."""
    if not isinstance(item, Mapping):
        return ""
    if item.get("type"):
        return _plain_kind(str(item["type"]))
    named = (kind for kind in KINDS if item.get(kind) or item.get(f"{kind}_url"))
    return next(named, "text")


def _plain_kind(kind: str) -> str:
    return kind.removeprefix("input_").removeprefix("output_").removesuffix("_url")


def _media_part(item: Mapping[str, Any], kind: Kind, media: RowMedia) -> Part:
    """The part of an image or a video, which has a file of its own or shows one of the row."""
    keys = (kind, f"{kind}_url", *FILE_KEYS)
    key = next((key for key in keys if item.get(key)), None)
    if key is None:
        return media.part_without_file(kind, item)
    if isinstance(item.get("text"), str) and item["text"].strip():
        raise BadRowError(
            f"text beside the {kind} of a part",
            f"{item['text'][:40]!r}: write it as a part of its own",
        )
    content = item[key]
    value = {"bytes": content} if key == "bytes" else content
    other_keys = {name: item[name] for name in item if item[name] != content}
    return media.part_with_file(kind, other_keys, read_file(value, kind))


def _require_content(role: str, parts: list[Part]) -> None:
    """BadRowError if a message has no text, and does not show an image or a video of the user."""
    has_text = any(part["type"] == "text" and part["text"].strip() for part in parts)
    shows_media = role == "user" and any(part["type"] in KINDS for part in parts)
    if not has_text and not shows_media:
        raise BadRowError("empty turn", role)


def require_alternating(messages: list[Message]) -> None:
    """BadRowError if a role comes twice in a row."""
    for before, after in pairwise(messages):
        if before["role"] == after["role"]:
            raise BadRowError(
                "roles do not alternate", f"two {after['role']} turns in a row"
            )
