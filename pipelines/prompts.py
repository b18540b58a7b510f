"""Import prompts: conversations of any known format into one Parquet file.

A prompt is what the target is asked: the conversation up to an assistant turn. Its key is a hash of
its content (roles, texts, the bytes of its images and videos, and how a video is to be sampled), so
importing twice changes nothing, moving the images changes nothing, and the same prompt from two files
is kept once. A second import into the same file adds what is new.

Held-out prompts are chosen by a hash of the images (of the first question, where there are none):
an image is never on both sides, whatever is imported when.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines import augment, importers
from vlmdistill.pipelines.augment import Message
from vlmdistill.pipelines.importers import MOST, BadRowError, Conversation, Format, Row
from vlmdistill.pipelines.media import Shelf
from vlmdistill.pipelines.workspace import written_aside
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash

Split = Literal["train", "eval"]
CHUNK = 256  # rows whose images are checked together
SAMPLING = ("fps", "frames")  # what a part may say about its video


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is asked; the field order is the column order of the file."""

    key: str
    dataset: str
    split: Split
    messages: list[Message]  # parts: {"type": "text", "text"} or {"type": "image"|"video", "path"}
    augmentation: str
    augmentation_text: str
    reference: str | None  # the dataset's own answer
    source: str
    row: int
    turn: int  # which assistant turn of the row it asks for, from 1

    @property
    def files(self) -> list[str]:
        """The images and videos that are part of it."""
        parts = [part for message in self.messages for part in message["content"]]
        return [part["path"] for part in parts if part["type"] != "text"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How rows become prompts."""

    images: Path | None = None
    fps: float | None = None  # of every video, whatever its row says; without any, the target's own
    frames: int | None = None  # the same by a number of frames
    limit: int | None = None  # prompts of this import
    turns: Literal["first", "all"] = "first"
    augment: Sequence[str] = ("none",)  # one prompt each, for rows with images or videos
    augment_text: Sequence[str] = ("none",)  # the same for rows of text alone
    eval_share: float = 0.05
    split: Split | None = None  # all of them, instead of by share

    def check(self) -> None:
        """DataError on a value that makes no sense."""
        if self.limit is not None and self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if not 0 <= self.eval_share < 1:
            raise DataError(f"--eval-share {self.eval_share}: give a share from 0 to below 1")
        if self.fps is not None and self.frames is not None:
            raise DataError(f"--fps {self.fps} --frames {self.frames}: give one of them")
        for name, value in (("--fps", self.fps), ("--frames", self.frames)):
            if value is not None and not 0 < value <= MOST:
                raise DataError(f"{name} {value}: give a number above 0, at most {MOST}")
        if self.images and not self.images.is_dir():
            raise DataError(f"--images {self.images}: there is no such folder")
        for name in (*self.augment, *self.augment_text):
            augment.find(name)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an import did, and what the file holds after it."""

    out: Path
    skipped_file: Path
    added: int
    present: int  # rows of this import that the file held already
    trimmed: int  # conversations whose assistant spoke before the first question: that turn was left out
    skipped: Counter[str]  # by reason
    total: int
    train: int
    eval: int
    datasets: Counter[str]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {**vars(self), "out": str(self.out), "skipped_file": str(self.skipped_file)}


def schema() -> Any:
    """The Arrow schema of the prompts file."""
    import pyarrow as pa

    part = pa.struct(
        [
            ("type", pa.string()),
            ("text", pa.string()),
            ("path", pa.string()),
            ("fps", pa.float64()),  # how a video is to be sampled; both null: as the target does by itself
            ("frames", pa.int32()),
        ]
    )
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    return pa.schema(
        [
            ("key", pa.string()),
            ("dataset", pa.string()),
            ("split", pa.string()),
            ("messages", pa.list_(message)),
            ("augmentation", pa.string()),
            ("augmentation_text", pa.string()),
            ("reference", pa.string()),
            ("source", pa.string()),
            ("row", pa.int64()),
            ("turn", pa.int32()),
        ],
        metadata={"vlmdistill.prompts": "1"},
    )


def read(path: Path, model: str = "M") -> list[Prompt]:
    """The prompts of a file, in its order; DataError when it is missing or of another kind.

    `model` is what the error tells the user to import prompts for.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(
            f"there are no prompts at {path}: import yours with `vlmdistill prompts FILE... -m {model}`, "
            f"or the demo's with `vlmdistill prompts demo -m {model}`"
        )
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    missing = [name for name in schema().names if name not in table.column_names]
    if missing:
        raise DataError(f"{path} is not a file of prompts: it has no column {', '.join(missing)}")
    rows = table.select(schema().names).to_pylist()
    for row in rows:
        for message in row["messages"]:
            message["content"] = [{k: v for k, v in p.items() if v is not None} for p in message["content"]]
    return [Prompt(**row) for row in rows]


def select(prompts: Sequence[Prompt], split: str = "all", limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of one split (train, eval or all); DataError when there are none."""
    chosen = [prompt for prompt in prompts if split in ("all", prompt.split)][:limit]
    if not chosen:
        raise DataError(
            f"none of the {len(prompts)} prompts is in the split '{split}': see --eval-share and --split"
        )
    return chosen


def import_prompts(
    sources: Sequence[str],
    out: Path,
    kind: Format = "auto",
    choices: Choices | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Summary:
    """Import `sources` into the prompts file `out`, adding to what it holds.

    Rows that cannot be used are listed with their reason beside it, in `<name>.skipped.jsonl`.
    DataError when no row of the sources can be used. `progress` hears how many rows were read.
    """
    choices = choices or Choices()
    choices.check()
    kinds = [importers.detect(source, kind) for source in sources]  # all, before the first is read
    prompts = {prompt.key: prompt for prompt in read(out)} if out.exists() else {}
    job = _Import(choices, Shelf(choices.images, out.parent / "images"), progress)
    for source, its_kind in zip(sources, kinds, strict=True):
        job.read(source, its_kind)
    skipped_file = out.with_suffix(".skipped.jsonl")
    _write_skipped(skipped_file, job.skipped, job.sources)
    reasons = Counter(entry["reason"] for entry in job.skipped)
    if not job.made:
        told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()) or "no rows at all"
        more = f"; row by row in {skipped_file}" if job.skipped else ""
        raise DataError(f"nothing to import from {', '.join(sources)}: {told}{more}")
    present = len(prompts.keys() & job.made.keys())
    for key, prompt in job.made.items():
        old = prompts.get(key)
        # What was held out stays held out; what is asked is the same, but files may have moved.
        prompts[key] = prompt if old is None else dataclasses.replace(prompt, split=old.split)
    _write(out, prompts.values())
    splits = Counter(prompt.split for prompt in prompts.values())
    return Summary(
        out=out,
        skipped_file=skipped_file,
        added=len(job.made) - present,
        present=present,
        trimmed=job.trimmed,
        skipped=reasons,
        total=len(prompts),
        train=splits["train"],
        eval=splits["eval"],
        datasets=Counter(prompt.dataset for prompt in prompts.values()),
    )


class _Import:
    """One import as it goes: prompts made, rows skipped."""

    def __init__(self, choices: Choices, shelf: Shelf, progress: Callable[[int], None]) -> None:
        self.choices = choices
        self.shelf = shelf
        self.progress = progress
        self.made: dict[str, Prompt] = {}
        self.skipped: list[dict[str, Any]] = []
        self.sources: set[str] = set()
        self.trimmed = 0
        self.rows = 0

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.choices.limit is not None and len(self.made) >= self.choices.limit

    def read(self, source: str, kind: Format) -> None:
        """Take the rows of one source, until the limit."""
        rows = importers.read(source, kind)
        while not self.full and (chunk := list(islice(rows, CHUNK))):
            talks = [self._conversation(row, kind) for row in chunk]
            self.shelf.fetch(
                (part, Path(row.source).parent)
                for row, talk in zip(chunk, talks, strict=True)
                if talk
                for part in _media_parts(talk.messages)
            )
            for row, talk in zip(chunk, talks, strict=True):
                self.sources.add(row.source)
                if talk and not self.full:
                    self._take(row, talk)
            self.rows += len(chunk)
            self.progress(self.rows)

    def _conversation(self, row: Row, kind: Format) -> Conversation | None:
        try:
            return importers.conversation(row, kind)
        except BadRowError as error:
            self._skip(row, error)
            return None

    def _skip(self, row: Row, error: BadRowError) -> None:
        entry = {"source": row.source, "row": row.number, "line": row.line}
        self.skipped.append({**entry, "reason": error.reason, "detail": error.detail})

    def _take(self, row: Row, talk: Conversation) -> None:
        """Make the prompts of one conversation."""
        try:
            digests = [
                self.shelf.place(part, Path(row.source).parent) for part in _media_parts(talk.messages)
            ]
        except BadRowError as error:
            self._skip(row, error)
            return
        for part in _media_parts(talk.messages):
            self._sample(part)
        self.trimmed += talk.trimmed
        names = self.choices.augment if digests else self.choices.augment_text
        first = next(message for message in talk.messages if message["role"] == "user")
        held = self._split(digests or _content([first]))
        for turn, (asked, reference) in enumerate(_questions(talk.messages, self.choices.turns), 1):
            for name in names:
                augmentation = augment.find(name)
                messages = augmentation.apply(asked)
                prompt = Prompt(
                    key=content_hash(_content(messages)),
                    dataset=row.dataset,
                    split=held,
                    messages=[_bare(message) for message in messages],
                    augmentation=name,
                    augmentation_text=augmentation.text,
                    reference=reference,
                    source=row.source,
                    row=row.number,
                    turn=turn,
                )
                earlier = self.made.setdefault(prompt.key, prompt)
                if earlier is not prompt:
                    where = f"the same prompt as row {earlier.row} of {Path(earlier.source).name}"
                    self._skip(row, BadRowError("duplicate", where))
                if self.full:
                    return

    def _sample(self, part: dict[str, Any]) -> None:
        """Let the choice for all videos stand over what a row says about its own."""
        wanted = {name: getattr(self.choices, name) for name in SAMPLING}
        if part["type"] == "video" and any(wanted.values()):
            for name, value in wanted.items():
                part.pop(name, None)
                if value is not None:
                    part[name] = value

    def _split(self, origin: Any) -> Split:
        if self.choices.split:
            return self.choices.split
        return "eval" if int(content_hash(origin), 16) < self.choices.eval_share * 2**64 else "train"


def _media_parts(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """The parts that are images or videos, in order."""
    for message in messages:
        yield from (part for part in message["content"] if part["type"] != "text")


def _content(messages: Iterable[Message]) -> list[Any]:
    """What a prompt is, wherever its files lie."""
    return [
        [
            message["role"],
            [
                [part["type"], part.get("digest") or part["text"], *_told(part, SAMPLING).items()]
                for part in message["content"]
            ],
        ]
        for message in messages
    ]


def _bare(message: Message) -> Message:
    """The message as it is stored: type with text or path, and how a video is sampled."""
    parts = [_told(part, ("type", "text", "path", *SAMPLING)) for part in message["content"]]
    return {"role": message["role"], "content": parts}


def _told(part: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: part[name] for name in names if name in part}


def _questions(
    messages: Sequence[Message], which: Literal["first", "all"]
) -> Iterator[tuple[list[Message], str | None]]:
    """Each prompt of a conversation, with the answer that the dataset gives."""
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        answer = messages[index + 1]["content"] if index + 1 < len(messages) else []
        text = "\n".join(part["text"] for part in answer if part["type"] == "text")
        yield list(messages[: index + 1]), text or None
        if which == "first":
            return


def _write(out: Path, prompts: Iterable[Prompt]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([vars(prompt) for prompt in prompts], schema())
    with written_aside(out) as aside:
        pq.write_table(table, aside, compression="zstd")


def _write_skipped(path: Path, skipped: list[dict[str, Any]], sources: set[str]) -> None:
    """Replace what the side file says about `sources`; what it says about others stays."""
    lines = path.read_text().splitlines() if path.is_file() else []
    kept = [entry for entry in map(json.loads, lines) if entry["source"] not in sources]
    with written_aside(path) as aside:
        aside.write_text("".join(json.dumps(entry) + "\n" for entry in [*kept, *skipped]))
