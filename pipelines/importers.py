"""Read conversations from the formats people have: LLaVA JSON, ShareGPT JSON, chat JSONL, datasets.

A reader turns each row into a `Conversation`, or into the reason why it cannot: nothing is dropped
silently, and nothing is repaired by guessing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.augment import Message
from vlmdistill.stores.errors import DataError

Format = Literal["auto", "llava", "sharegpt", "chat", "hf"]
Media = str | bytes  # a path as the row gives it, or the file itself

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
TURNS = ("messages", "conversations", "conversation", "items")
QUESTIONS = ("question", "query", "prompt", "instruction", "problem")
COUNTS = ("frames", "nframes", "num_frames")  # names that rows give the number of frames of a video
MOST = 2**31 - 1  # frames of a video, or frames a second, that a prompt can ask for
ANSWERS = ("answer", "answers", "response", "output", "caption", "captions", "label")
TAG = re.compile(r"\s*<(image|video)>\s*")


class BadRowError(Exception):
    """A row that cannot be used: `reason` is counted, `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """One row of a source, or why it cannot be read. `number` and `line` (of a file) count from 1."""

    source: str
    dataset: str
    number: int
    value: Any
    line: int | None = None
    problem: BadRowError | None = None


def detect(source: str, wanted: Format = "auto") -> Format:
    """The format of a source; DataError when it does not exist or is of no known form."""
    path = Path(source).expanduser()
    if half_character(str(path.absolute())):
        raise DataError(f"{source}: its name is not UTF-8: rename it")
    if path.is_dir() or not path.exists():
        if path.is_dir() or (wanted == "hf" and not path.is_absolute()):
            return "hf"
        hint = " (a Hugging Face dataset by name: add --format hf)" if wanted == "auto" else ""
        raise DataError(f"there is no file {source}{hint}")
    if wanted != "auto":
        return wanted
    for row in read_json(path):
        value = row.value
        if not isinstance(value, Mapping):
            continue
        if "messages" in value:
            return "chat"
        if turns(value) is not None:
            return "llava" if value.keys() & {"image", "images", "video", "videos"} else "sharegpt"
    raise DataError(
        f"{source}: no row has 'conversations' (LLaVA, ShareGPT) or 'messages' (chat): "
        "see the formats with vlmdistill prompts --help"
    )


def read(source: str, kind: Format) -> Iterator[Row]:
    """Every row of a source, in order."""
    if kind == "hf":
        return read_dataset(source)
    return read_json(Path(source).expanduser())


def read_json(path: Path) -> Iterator[Row]:
    """The rows of a JSON array or of JSON lines; which one, the first character tells."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    source, dataset = str(path.resolve()), path.stem
    if not text.lstrip().startswith("["):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    value, problem = json.loads(line), None
                except json.JSONDecodeError as error:
                    value, problem = None, BadRowError("invalid JSON", f"{error.msg} at column {error.colno}")
                yield Row(source, dataset, number, value, number, problem)
        return
    for number, (value, line_number) in enumerate(_array(text, path), 1):
        yield Row(source, dataset, number, value, line_number)


def _array(text: str, path: Path) -> Iterator[tuple[Any, int]]:
    """The items of a JSON array with the line each begins on."""
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")

    def skip(at: int) -> int:
        match = blank.match(text, at)
        return match.end() if match else at

    at = skip(text.index("[") + 1)
    line, seen = 1, 0
    try:
        while text[at : at + 1] != "]":
            line, seen = line + text.count("\n", seen, at), at
            value, at = decoder.raw_decode(text, at)
            yield value, line
            at = skip(at)
            if text[at : at + 1] == ",":
                at = skip(at + 1)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error.msg} at line {error.lineno}") from None


def read_dataset(source: str) -> Iterator[Row]:
    """The rows of a Hugging Face dataset: `name`, `name:subset`, `...@split`, or a local folder."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"reading the dataset {source} needs the package datasets: pip install 'vlmdistill[hf]'"
        ) from None
    name, _, split = source.partition("@")
    name, _, subset = (name, "", "") if Path(name).exists() else name.partition(":")
    split = split or "train"
    try:
        folder = Path(name).expanduser()
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            data = loaded[split] if isinstance(loaded, Mapping) else loaded
        else:
            data = datasets.load_dataset(name, subset or None, split=split)
    except KeyError:
        raise DataError(f"the dataset {name} has no split '{split}': write {name}@<split>") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the dataset {name}: {reason}") from None
    # Arrow rows hold images as encoded bytes: the file itself, not a decoded copy.
    for number, table in enumerate(data.with_format("arrow").iter(batch_size=1), 1):
        yield Row(source, folder.name, number, table.to_pylist()[0])


@dataclass(frozen=True)
class Conversation:
    """Turns of known roles. Image and video parts hold `media` (path or bytes) until that is checked."""

    messages: list[Message]
    trimmed: bool = False  # assistant turns before the first question were left out


def turns(value: Mapping[str, Any]) -> Sequence[Any] | None:
    """The list of turns of a row, under whichever usual name."""
    for name in TURNS:
        if isinstance(value.get(name), list):
            return list(value[name])
    return None


def conversation(row: Row, kind: Format) -> Conversation:
    """The checked conversation of a row; BadRowError says why there is none."""
    if row.problem:
        raise row.problem
    value = row.value
    if not isinstance(value, Mapping):
        raise BadRowError("not an object", f"{type(value).__name__} instead of a JSON object")
    raw = turns(value)
    if raw is None:
        raw = _question(value)
    files = {
        "image": _listed(value, "image", "images"),
        "video": _listed(value, "video", "videos"),
    }
    tagged = kind == "llava" or bool(files["image"] or files["video"])  # else <image> is what someone wrote
    placed = {"image": 0, "video": 0}
    messages = [_message(turn, files, placed, tagged) for turn in raw]
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise BadRowError("no user turn")
    for what, given in files.items():
        if given and not placed[what]:  # LLaVA's own reader puts an untagged image first
            users[0]["content"] = [{"type": what, "media": media} for media in given] + users[0]["content"]
        elif len(given) != placed[what]:
            raise BadRowError(f"{what} count", f"{placed[what]} <{what}> in the text, {len(given)} given")
    return _ordered(messages)


def _ordered(messages: list[Message]) -> Conversation:
    """Check that user and assistant take turns; leave out what an assistant says before any question."""
    system = [message for message in messages if message["role"] == "system"]
    spoken = [message for message in messages if message["role"] != "system"]
    if system and messages[: len(system)] != system:
        raise BadRowError("late system turn")
    first = next(index for index, message in enumerate(spoken) if message["role"] == "user")
    kept = spoken[first:]
    for before, after in pairwise(kept):
        if before["role"] == after["role"]:
            raise BadRowError("roles do not alternate", f"two {after['role']} turns in a row")
    return Conversation(system + kept, trimmed=first > 0)


def _question(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turns made of question and answer columns."""
    question = next((value[name] for name in QUESTIONS if value.get(name)), None)
    if not isinstance(question, str):
        raise BadRowError("no conversation", f"columns: {', '.join(map(str, value))}")
    answer = next((value[name] for name in ANSWERS if value.get(name)), None)
    if isinstance(answer, list):
        answer = answer[0]
    made = [{"role": "user", "content": question}]
    if isinstance(answer, str) and answer.strip():
        made.append({"role": "assistant", "content": answer})
    return made


def _listed(value: Mapping[str, Any], *names: str) -> list[Media]:
    """The media a row gives beside its turns."""
    found: Any = next((value[name] for name in names if value.get(name)), [])
    return [_media(item) for item in (found if isinstance(found, list) else [found])]


def _media(item: Any) -> Media:
    """A path or the bytes of a file, from the ways rows hold them."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path") or item.get("url")
    if isinstance(item, str) and item:
        return item.removeprefix("file://")
    if isinstance(item, bytes):
        return item
    raise BadRowError("no media file", f"neither path nor bytes: {str(item)[:60]}")


def _message(turn: Any, files: Mapping[str, list[Media]], placed: dict[str, int], tagged: bool) -> Message:
    """One turn of either style: from/value or role/content."""
    if not isinstance(turn, Mapping):
        raise BadRowError("not an object", f"a turn is {type(turn).__name__}")
    said = str(turn.get("role", turn.get("from")))
    if said not in ROLES:
        raise BadRowError("unknown role", said)
    content = turn.get("content", turn.get("value", turn.get("text")))
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        parts += _parts(part, files, placed, tagged)
    if not parts or (ROLES[said] != "user" and not any(part["type"] == "text" for part in parts)):
        raise BadRowError("empty turn", said)
    return {"role": ROLES[said], "content": parts}


def _parts(
    part: Any, files: Mapping[str, list[Media]], placed: dict[str, int], tagged: bool
) -> list[dict[str, Any]]:
    """The parts that one content item stands for: several when its text holds <image> tags."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = str(part.get("type", "text")) if isinstance(part, Mapping) else ""
    what = kind.removeprefix("input_").removesuffix("_url")
    if what == "text":
        text = part.get("text")
        if text is None:
            return []
        if not isinstance(text, str):
            raise BadRowError("text is not a string", type(text).__name__)
        if place := half_character(text):
            raise BadRowError("text is not Unicode", f"half a character (surrogate) at {place}")
        made: list[dict[str, Any]] = []
        for index, piece in enumerate(TAG.split(text) if tagged else [text]):
            if index % 2:
                made.append({"type": piece, "media": _next(piece, files, placed)})
            elif piece.strip():
                made.append({"type": "text", "text": piece})
        return made
    if what not in ("image", "video"):
        raise BadRowError("unknown part", kind or type(part).__name__)
    given = next(
        (part[name] for name in (what, f"{what}_url", "path", "url", "bytes") if part.get(name)), None
    )
    sampling = _sampling(part) if what == "video" else {}
    media = _next(what, files, placed) if given is None else _media(given)
    return [{"type": what, "media": media, **sampling}]


def _sampling(part: Mapping[str, Any]) -> dict[str, float | int]:
    """How a row wants its video sampled: by frames per second or by a number of frames, if at all."""
    fps: Any = part.get("fps")
    count: Any = next((part[name] for name in COUNTS if part.get(name) is not None), None)
    if fps is None and count is None:
        return {}
    if fps is not None and count is not None:
        raise BadRowError("video sampling", f"fps {fps} and frames {count}: give one of them")
    try:
        sampling: dict[str, float | int] = {"frames": int(count)} if fps is None else {"fps": float(fps)}
    except (TypeError, ValueError, OverflowError):
        sampling = {}
    if not sampling or not 0 < min(sampling.values()) <= MOST:
        problem = f"fps {fps}, frames {count}: give a number above 0, at most {MOST}"
        raise BadRowError("video sampling", problem)
    return sampling


def half_character(text: str) -> int | None:
    """Where a surrogate without its other half stands, from 1: JSON can hold one, no file in UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start + 1
    return None


def _next(what: str, files: Mapping[str, list[Media]], placed: dict[str, int]) -> Media:
    """The next image or video of the row, for a tag or part that names none."""
    if placed[what] >= len(files[what]):
        raise BadRowError(f"{what} count", f"a <{what}> in the text, but only {len(files[what])} given")
    placed[what] += 1
    return files[what][placed[what] - 1]
