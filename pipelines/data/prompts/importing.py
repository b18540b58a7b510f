"""Import conversations of any supported format as prompts into one Parquet file.

A prompt is a conversation up to an assistant turn. Its key is a hash of its roles, texts, image and video
bytes, and video sampling. So a second import adds only new prompts, and moving the images changes nothing.
Where an image has changed, its new prompts replace the old ones.

The train/eval split is a hash of an image, or of the first question if that has none. Prompts that share an
image or such a question are on one side, whatever imported them, and so are those that share one with any of
these: the later turns of a conversation are on the side of the first, as its requests in a log are.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.data.prompts import augment, formats
from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.formats import MOST, Conversation, Format
from vlmdistill.pipelines.data.prompts.prompt_table import (
    Prompt,
    Split,
    load,
    media_parts,
    read,
    write,
)
from vlmdistill.pipelines.data.prompts.sources import Row, walk
from vlmdistill.pipelines.data.prompts.sources import read as read_rows
from vlmdistill.pipelines.media.images import large_images
from vlmdistill.pipelines.media.resolver import BadRowError, MediaResolver
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash

CHUNK, CHUNK_BYTES = (
    256,
    2**28,
)  # rows whose images are checked together, and those in the rows themselves
SAMPLING = ("fps", "frames")  # what a part may say about its video


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How rows become prompts."""

    images: Path | None = None
    fps: float | None = None  # of every video; None: the row's, else the target's
    frames: int | None = None  # of every video, instead of `fps`
    limit: int | None = None  # prompts to import
    turns: Literal["first", "all", "last"] = "first"
    ask: str | None = None  # about images and videos without a question
    augment: Sequence[str] = (
        "none",
    )  # one prompt each, for rows with images or videos
    augment_text: Sequence[str] = ("none",)  # the same for text-only rows
    eval_share: float = 0.05
    split: Split | None = None  # of all prompts, instead of `eval_share`
    by_dataset: bool = False  # the same prompt in two datasets is two prompts
    images_only: str = ""  # the family of a target that reads no videos
    media: str = (
        "images"  # the folder beside the file that keeps media of the rows themselves
    )
    private: bool = False  # list no skipped rows

    @property
    def sampling(self) -> dict[str, float | int]:
        """The sampling of all videos; empty: the row's, else the target's."""
        return {
            name: getattr(self, name)
            for name in SAMPLING
            if getattr(self, name) is not None
        }

    def check(self) -> None:
        """DataError if a value is out of range."""
        if self.limit is not None and self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if not 0 <= self.eval_share < 1:
            raise DataError(
                f"--eval-share {self.eval_share}: give a share from 0 to below 1"
            )
        if self.fps is not None and self.frames is not None:
            raise DataError(
                f"--fps {self.fps} and --frames {self.frames}: give one of them"
            )
        for name, value in (("--fps", self.fps), ("--frames", self.frames)):
            if value is not None and not 0 < value <= MOST:
                raise DataError(
                    f"{name} {value}: give a number above 0, at most {MOST}"
                )
        if self.images and not self.images.is_dir():
            raise DataError(f"--images {self.images}: the folder does not exist")
        if self.ask is not None and not self.ask.strip():
            raise DataError(
                "--ask is empty: give the question about the images and videos"
            )
        for name in (*self.augment, *self.augment_text):
            augment.find(name)


@dataclass(frozen=True, kw_only=True)
class ImportSummary:
    """What an import did, and what the file holds after it."""

    out: Path
    skipped_file: Path
    added: int
    present: int  # prompts of this import that the file already held
    outdated: int  # prompts that were removed, since their images or videos have other content now
    trimmed: int  # conversations without the assistant turn before their first question
    skipped: Counter[str]  # by reason
    unread_columns: Counter[
        str
    ]  # columns with text, and keys of media parts, that were not used
    hidden_media: Counter[str]  # those of them that hold or name images or videos
    total: int
    train: int
    eval: int
    datasets: Counter[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **vars(self),
            "out": str(self.out),
            "skipped_file": str(self.skipped_file),
        }


def import_prompts(
    sources: Sequence[str],
    out: Path,
    kind: Format = "auto",
    choices: Choices | None = None,
    progress: Progress = silent,
) -> ImportSummary:
    """Import `sources` into the prompts file `out`, adding to what it holds.

    Rows that cannot be used are listed with the reason in `<name>.skipped.jsonl`. DataError if no row can be
    used. `progress` gets the number of rows read.
    """
    choices = choices or Choices()
    choices.check()
    kinds = [
        formats.detect(source, kind, choices.ask) for source in sources
    ]  # all, before any is read
    asked = choices.ask is not None
    named = [
        (source, read_rows(source, asked), its)
        for source, its in zip(sources, kinds, strict=True)
    ]
    return import_rows(named, out, choices, progress)


def import_rows(
    named: Sequence[tuple[str, Iterator[Row], Format]],
    out: Path,
    choices: Choices,
    progress: Progress = silent,
    gate: "ImportGate | None" = None,
) -> ImportSummary:
    """The same with rows that were read before, by the name of their source.

    With a `gate`, that no prompt passes is no error.
    """
    with only_writer(out), large_images():
        prompts = {prompt.key: prompt for prompt in read(out)} if out.exists() else {}
        resolver = MediaResolver(choices.images, out.parent / choices.media)
        job = _Import(choices, resolver, progress, prompts, gate or ImportGate())
        for _, rows, its_kind in named:
            if job.left:
                job.read(rows, its_kind)
        skipped_file = out.with_suffix(".skipped.jsonl")
        _write_skipped(
            skipped_file, [] if choices.private else job.skipped, job.sources
        )
        reasons = Counter(entry["reason"] for entry in job.skipped)
        if not (job.made or gate):
            counts = (
                ", ".join(
                    f"{reason} ({count})" for reason, count in reasons.most_common()
                )
                or "no rows"
            )
            cure = "; ".join(
                text for reason, text in _cures(choices).items() if reason in reasons
            )
            more = (f"; row by row in {skipped_file}" if job.skipped else "") + (
                cure and f"; {cure}"
            )
            raise DataError(
                f"nothing to import from {', '.join(name for name, *_ in named)}: {counts}{more}"
            )
        present = len(prompts.keys() & job.made.keys())
        now = {
            part["path"]: part["digest"]
            for made, _ in job.made.values()
            for part in made.media
        }
        outdated = {
            key
            for key in prompts.keys() - job.made.keys()
            for part in prompts[key].media
            if part["path"] in now
            and part.get("digest")
            not in (None, now[part["path"]])  # None in older files
        }
        prompts = {
            key: prompt for key, prompt in prompts.items() if key not in outdated
        }
        for key, (prompt, tie) in job.made.items():
            earlier = prompts.get(key)
            if (
                earlier and earlier.time is not None
            ):  # its response is traffic's, and deleted with it
                continue
            # The split stays; the paths may have changed.
            split = earlier.split if earlier else job.sides.of(tie, choices.eval_share)
            prompts[key] = dataclasses.replace(prompt, split=split)
        job.gate.close()
        write(out, prompts.values())
    splits = Counter(prompt.split for prompt in prompts.values())
    return ImportSummary(
        out=out,
        skipped_file=skipped_file,
        added=len(job.made) - present,
        outdated=len(outdated),
        present=present,
        trimmed=job.trimmed,
        skipped=reasons,
        unread_columns=job.unread,
        hidden_media=job.hidden,
        total=len(prompts),
        train=splits["train"],
        eval=splits["eval"],
        datasets=Counter(prompt.dataset for prompt in prompts.values()),
    )


class ImportGate:
    """Decides which prompts of an import are kept; this one keeps all."""

    def accept(self, row: Row, prompt: Prompt) -> Prompt:
        """A new prompt of a row, maybe changed; BadRowError if it is skipped."""
        return prompt

    def skipped(self, row: Row) -> None:
        """A row, or a prompt of it, is not kept."""

    def close(self) -> None:
        """All rows are read, and the prompts are written next."""


def _cures(choices: Choices) -> dict[str, str]:
    """The options that may help, by the reason for which rows were left out."""
    spelling = "write names as they are on this disk, with / and without %20"
    cures = {f"{kind} of another spelling": spelling for kind in ("image", "video")}
    if choices.images_only:
        cures["video"] = (
            f"targets of the family {choices.images_only} support images alone: choose another"
        )
    if choices.images is None:
        cures["missing image"] = cures["missing video"] = (
            "if paths start at another folder, name it: --images DIR"
        )
    if choices.ask is None:
        cures["no conversation"] = (
            "images without a question need one: --ask 'Describe the image.'"
        )
    return cures


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """How prompts are split."""

    out: Path
    moved: int
    kept: int  # of the prompts in `fixed`, and those that share an image or a question with one
    train: int
    eval: int


def resplit(out: Path, eval_share: float, fixed: Collection[str] = ()) -> SplitSummary:
    """Split the prompts of a file anew; those with a key in `fixed` stay on their side.

    DataError if there are no prompts, or if the share is out of range.
    """
    Choices(eval_share=eval_share).check()
    with only_writer(out):
        prompts = read(out)
        sides = _Sides([])
        ties = [_ties(prompt) for prompt in prompts]
        for prompt, its in zip(prompts, ties, strict=True):
            sides.join(its, prompt.split if prompt.key in fixed else None)
        new = [
            dataclasses.replace(prompt, split=sides.of(its[0], eval_share))
            for prompt, its in zip(prompts, ties, strict=True)
        ]
        write(out, new)
    splits = Counter(prompt.split for prompt in new)
    return SplitSummary(
        out=out,
        moved=sum(
            before.split != after.split
            for before, after in zip(prompts, new, strict=True)
        ),
        kept=sum(sides.known(its[0]) for its in ties),
        train=splits["train"],
        eval=splits["eval"],
    )


def _ties(prompt: Prompt) -> list[str]:
    """What a prompt shares with others that must be on its side: its media, and a question without."""
    digests = [part["digest"] for part in prompt.media if "digest" in part]
    return [*(digests or prompt.files), *_question(prompt.messages)]


def _question(messages: Sequence[Message]) -> list[str]:
    """The hash of the first question; none if it shows images or videos."""
    first = next(message for message in messages if message["role"] == "user")
    return [] if any(media_parts([first])) else [content_hash(_content([first]))]


class _Sides:
    """The split of each image, and of each first question without one: a forest of what belongs together.

    A tree with a known split has it as its root, `!train` or `!eval`, which sort before all hashes.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._above: dict[str, str] = {}
        for prompt in prompts:
            self.join(_ties(prompt), prompt.split)

    def join(self, ties: Iterable[str], split: Split | None = None) -> bool:
        """Put these on one side; False, and nothing is done, if they are on both."""
        roots = {self._root(tie) for tie in [*ties, *([f"!{split}"] if split else [])]}
        if roots >= {"!train", "!eval"}:
            return False
        lowest = min(roots)
        self._above |= dict.fromkeys(roots - {lowest}, lowest)
        return True

    def known(self, tie: str) -> bool:
        """Whether the side of an image or a question is given."""
        return self._root(tie).startswith("!")

    def of(self, tie: str, eval_share: float) -> Split:
        """The side of an image or a question."""
        root = self._root(tie)
        if root.startswith("!"):
            return "eval" if root == "!eval" else "train"
        return "eval" if int(content_hash([root]), 16) < eval_share * 2**64 else "train"

    def _root(self, tie: str) -> str:
        while above := self._above.get(tie):
            self._above[tie] = self._above.get(above, above)
            tie = above
        return tie


@dataclass
class _Import:
    """The state of an import: prompts made, rows skipped."""

    choices: Choices
    resolver: MediaResolver
    progress: Progress
    present: Mapping[str, Prompt]
    gate: ImportGate
    made: dict[str, tuple[Prompt, str]] = field(
        default_factory=dict
    )  # and an image of it, for the split
    skipped: list[dict[str, Any]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    unread: Counter[str] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    trimmed: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self.sides = _Sides(self.present.values())

    @property
    def left(self) -> int:
        """How many rows to read before the limit may be reached; a chunk of them at most."""
        limit = self.choices.limit
        return CHUNK if limit is None else max(0, min(CHUNK, limit - len(self.made)))

    def read(self, rows: Iterator[Row], kind: Format) -> None:
        """Take the rows of one source, until the limit."""
        for chunk in self._chunks((row, self._conversation(row, kind)) for row in rows):
            self.resolver.check_all(
                (part, row.folder)
                for row, talk in chunk
                if talk
                for part in media_parts(talk.messages)
            )
            for row, talk in chunk:
                self.sources.add(row.source)
                if talk and self.left:
                    self._take(row, talk)
            self.rows += len(chunk)
            self.progress(self.rows, 0)
            if not self.left:
                return

    def _conversation(self, row: Row, kind: Format) -> Conversation | None:
        try:
            talk = formats.conversation(
                row, kind, self.choices.sampling, self.choices.ask
            )
            if (family := self.choices.images_only) and any(
                part["type"] == "video" for part in media_parts(talk.messages)
            ):
                raise BadRowError(
                    "video",
                    f"targets of the family {family} support images, not videos",
                )
            return talk
        except BadRowError as error:
            self._skip(row, error)
            return None

    def _skip(self, row: Row, error: BadRowError) -> None:
        entry = {"source": row.source, "row": row.number, "line": row.line}
        self.skipped.append({**entry, "reason": error.reason, "detail": error.detail})
        self.gate.skipped(row)

    def _take(self, row: Row, talk: Conversation) -> None:
        """Make the prompts of one conversation."""
        try:
            digests = [
                self.resolver.resolve(part, row.folder)
                for part in media_parts(talk.messages)
            ]
        except BadRowError as error:
            self._skip(row, error)
            return
        self.trimmed += talk.trimmed
        self.unread.update(talk.unread)
        self.hidden.update(talk.hidden)
        names = self.choices.augment if digests else self.choices.augment_text
        ties = [*digests, *_question(talk.messages)]
        if self.choices.split and not digests:  # the user may put texts anywhere
            ties = [f"!{self.choices.split}"]
        agreed = self.sides.join(ties, self.choices.split)
        for turn, (asked, reference) in enumerate(
            _questions(talk.messages, self.choices.turns), 1
        ):
            for name in names:
                augmentation = augment.find(name)
                messages = augmentation.apply(asked)
                content = _content(messages)
                prompt = Prompt(
                    key=content_hash(
                        [row.dataset, content] if self.choices.by_dataset else content
                    ),
                    dataset=row.dataset,
                    split="train",  # decided when all rows are read
                    messages=[_bare(message) for message in messages],
                    augmentation=name,
                    augmentation_text=augmentation.text,
                    reference=reference,
                    source=row.source,
                    row=row.number,
                    turn=turn,
                )
                if not agreed and prompt.key not in self.present:
                    where = (
                        "train and eval"
                        if not self.choices.split
                        else f"not in {self.choices.split}"
                    )
                    self._skip(
                        row,
                        BadRowError(
                            "images of the other split", f"they are {where} already"
                        ),
                    )
                    continue
                if prompt.key in self.made:
                    earlier, _ = self.made[prompt.key]
                    where = f"the same prompt as row {earlier.row} of {Path(earlier.source).name}"
                    self._skip(row, BadRowError("duplicate", where))
                    continue
                try:
                    self.made[prompt.key] = self.gate.accept(row, prompt), ties[0]
                except BadRowError as error:
                    self._skip(row, error)
                if not self.left:
                    return

    def _chunks(
        self, rows: Iterator[tuple[Row, Conversation | None]]
    ) -> Iterator[list[tuple[Row, Conversation | None]]]:
        """Rows in chunks that fit into memory, which holds the images of some."""
        chunk: list[tuple[Row, Conversation | None]] = []
        size = 0
        for row, talk in rows:
            chunk.append((row, talk))
            media = (
                [part["media"] for part in media_parts(talk.messages)] if talk else []
            )
            size += sum(len(one) for one in media if isinstance(one, bytes))
            if len(chunk) >= self.left or size > CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _content(messages: Iterable[Message]) -> list[Any]:
    """The content that identifies a prompt, without the paths of its files."""
    return [
        [
            message["role"],
            [
                [
                    part["type"],
                    part.get("digest") or part["text"],
                    *_only(part, SAMPLING).items(),
                ]
                for part in message["content"]
            ],
        ]
        for message in messages
    ]


def _bare(message: Message) -> Message:
    """The message as stored: type, text or path, hash of the file, and video sampling."""
    parts = [
        _only(part, ("type", "text", "path", "digest", *SAMPLING))
        for part in message["content"]
    ]
    return {"role": message["role"], "content": parts}


def _only(part: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: part[name] for name in names if name in part}


def _questions(
    messages: Sequence[Message], which: Literal["first", "all", "last"]
) -> Iterator[tuple[list[Message], str | None]]:
    """Each prompt of a conversation, with the response of the dataset; `last` is one that ends with it."""
    for index, message in enumerate(messages):
        if message["role"] != "user" or (which == "last" and index < len(messages) - 1):
            continue
        reference = messages[index + 1]["content"] if index + 1 < len(messages) else []
        text = "\n".join(part["text"] for part in reference if part["type"] == "text")
        yield list(messages[: index + 1]), text or None
        if which == "first":
            return


def _write_skipped(
    path: Path, skipped: list[dict[str, Any]], sources: set[str]
) -> None:
    """Replace the entries of `sources` in the list of skipped rows; other entries stay."""
    lines = path.read_text().splitlines() if path.is_file() else []
    kept = [entry for entry in map(json.loads, lines) if entry["source"] not in sources]
    with atomic_write(path) as file:
        file.write_text(
            "".join(json.dumps(entry) + "\n" for entry in [*kept, *skipped])
        )


def media_of(prompts: Path, folder: Path | None = None) -> list[str]:
    """The images and videos of the prompts in a file, if there is one, or all files of a folder."""
    if folder is not None:
        return [str(path.absolute()) for path, _ in walk(folder)] or [
            str(folder.absolute())
        ]
    return [
        path
        for prompt in (load(prompts) if prompts.is_file() else ())
        for path in prompt.files
    ]
