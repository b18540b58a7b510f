"""Import conversations of any supported format as prompts into one Parquet file.

A prompt is a conversation up to an assistant turn. Its key is a hash of its roles, texts, image and video
bytes, and video sampling. So a second import adds only new prompts, and moving the images changes nothing.
Where an image has changed, its new prompts replace the old ones. `splitting.py` says which are held out.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlmdistill.pipelines.data.prompts import augment, formats
from vlmdistill.pipelines.data.prompts.augment import Augmentation, Message
from vlmdistill.pipelines.data.prompts.folders import UnreadFileError, walk
from vlmdistill.pipelines.data.prompts.formats import (
    Conversation,
    Format,
    NoRowsError,
)
from vlmdistill.pipelines.data.prompts.hidden_media import HiddenMediaError
from vlmdistill.pipelines.data.prompts.prompt_table import (
    TRAFFIC,
    Prompt,
    Split,
    load,
    media_parts,
    read,
    write,
)
from vlmdistill.pipelines.data.prompts.row import Row, has_content, located
from vlmdistill.pipelines.data.prompts.row_media import (
    MOST_SAMPLED,
    Sampling,
    has_media_columns,
)
from vlmdistill.pipelines.data.prompts.sources import read as read_rows
from vlmdistill.pipelines.data.prompts.splitting import (
    Sides,
    content_of,
    require_share,
    ties_of,
)
from vlmdistill.pipelines.media.frames import SAMPLING
from vlmdistill.pipelines.media.images import large_images
from vlmdistill.pipelines.media.resolver import BadRowError, MediaResolver
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash

MOST_TEXT = 2**32  # characters of prompts from a source that has far fewer bytes
MOST_RATIO = 200  # of characters of prompts to bytes of a source, if they are that many
CHUNK_ROWS = 256  # whose images are checked together
CHUNK_BYTES = 2**28  # of texts, and of images in the rows themselves
MOST_FORMS = 1000  # of rows that are told apart
STORED_KEYS = ("type", "text", "path", "digest", *SAMPLING)  # of a part

NO_ROWS = "no rows"  # of one of several sources, such as a shard after a filter
DUPLICATE = "duplicate"  # why a prompt is left out that was made already
RENAME = "name the column image or video, or images or videos for several"

Turns = Literal["first", "all", "last"]
Source = tuple[str, Iterator[Row], Format]
"""The name of a source, its rows and their format."""
Talk = tuple[Row, Conversation | None]
"""A row and its conversation, if it can be used."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How rows become prompts."""

    images: Path | None = None
    fps: float | None = None  # of every video; None: the row's, else the target's
    frames: int | None = None  # of every video, instead of `fps`
    limit: int | None = None  # prompts to import
    turns: Turns = "first"
    ask: str | None = None  # about images and videos without a question
    augment: Sequence[str] = ("none",)
    """Names of augmentations: one for each prompt with images or videos."""
    augment_text: Sequence[str] = ("none",)
    """The same for text-only prompts."""
    eval_share: float = 0.05
    split: Split | None = None  # of all prompts, instead of `eval_share`
    by_dataset: bool = False  # the same prompt in two datasets is two prompts
    images_only: str = ""  # the family of a target that reads no videos
    media: str = "images"
    """The folder beside the file that keeps media of the rows themselves."""
    private: bool = False  # list no skipped rows

    @property
    def sampling(self) -> Sampling:
        """The sampling of all videos; empty: the row's, else the target's."""
        if self.fps is not None:
            return {"fps": self.fps}
        return {} if self.frames is None else {"frames": self.frames}

    def check(self) -> None:
        """DataError if a value is out of range."""
        if self.limit is not None and self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        require_share(self.eval_share)
        if self.fps is not None and self.frames is not None:
            raise DataError(
                f"--fps {self.fps} and --frames {self.frames}: give one of them"
            )
        for option, value in (("--fps", self.fps), ("--frames", self.frames)):
            if value is not None and not 0 < value <= MOST_SAMPLED:
                raise DataError(
                    f"{option} {value}: give a number above 0, at most {MOST_SAMPLED}"
                )
        if self.images and not self.images.is_dir():
            raise DataError(f"--images {self.images}: the folder does not exist")
        if self.ask is not None and not self.ask.strip():
            raise DataError(
                "--ask is empty: give the question about the images and videos"
            )
        for name in self.augment:
            augment.find(name)
        for name in self.augment_text:
            augment.find_for_text(name)


@dataclass
class RowForm:
    """Rows with values in the same columns, with images or videos or without, and their first prompt.

    A user sees by it what is missing: no rule knows all names of columns.
    """

    columns: tuple[str, ...]
    first: Prompt
    file: str
    """The file of its row."""
    prompts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        names = ("row", "messages", "reference")
        first = {name: getattr(self.first, name) for name in names}
        return {
            "prompts": self.prompts,
            "columns": self.columns,
            "file": self.file,
            **first,
        }


@dataclass(frozen=True, kw_only=True)
class ImportSummary:
    """The work of an import, and the contents of the file after it."""

    out: Path
    skipped_file: Path
    added: int
    present: int  # prompts of this import that the file already held
    outdated: int
    """Prompts that were removed, since their images or videos have other content now."""
    trimmed: int  # conversations without the assistant turn before their first question
    skipped: Counter[str]  # by reason
    sampled: Counter[str]
    """How many videos the rows themselves sample, by `fps` or `frames` and its value."""
    unread_columns: Counter[str]
    """Columns with text, and keys of turns and parts, that were not used."""
    row_forms: Sequence["RowForm"]
    """The forms of the rows, the most common first."""
    earlier: Counter[str]
    """Prompts of earlier imports that this one has not made, by the name of their source, read whole now."""
    unread_files: Sequence[str]
    """The names of files of the sources that were not read."""
    hidden_media: Counter[str]
    """Unread columns that hold or name images or videos, also of rows skipped for that reason."""
    total: int
    train: int
    eval: int
    datasets: Counter[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        paths = {"out": str(self.out), "skipped_file": str(self.skipped_file)}
        forms = [form.to_dict() for form in self.row_forms]
        return {**vars(self), **paths, "row_forms": forms}


class ImportGate:
    """Decides which prompts of an import are kept; this one keeps all."""

    def accept(self, row: Row, prompt: Prompt) -> Prompt:
        """A new prompt of a row, maybe changed; BadRowError if it is skipped."""
        if prompt.dataset.startswith(TRAFFIC):
            raise BadRowError(
                "name of traffic",
                f"'{prompt.dataset}' is as harvested datasets are called: rename the file or folder",
            )
        return prompt

    def skipped(self, row: Row) -> None:
        """A row, or a prompt of it, is not kept."""

    def close(self) -> None:
        """All rows are read, and the prompts are written next."""


def import_prompts(
    sources: Sequence[str],
    out: Path,
    kind: Format = "auto",
    choices: Choices | None = None,
    progress: Progress = silent,
) -> ImportSummary:
    """Import `sources` into the prompts file `out`, adding to what it holds.

    Rows that cannot be used are listed with the reason in `<name>.skipped.jsonl`. DataError if no row of a
    source can be used, after the others are imported; one of several may be empty. `progress` gets the
    number of rows read.
    """
    choices = choices or Choices()
    choices.check()
    # All formats before any source is read: a wrong name fails at once.
    named = [_source(name, kind, choices, single=len(sources) == 1) for name in sources]
    return import_rows(named, out, choices, progress)


def _source(name: str, kind: Format, choices: Choices, *, single: bool) -> Source:
    """A source, to be read later. An empty one is a row with that problem, unless it is `single`."""
    try:
        its_kind = formats.detect(name, kind, choices.ask)
    except NoRowsError:
        if single:
            raise
        path, _ = located(name)
        problem = BadRowError(NO_ROWS, path.name)
        rows = [Row(str(path.resolve()), path.name, 1, None, problem=problem)]
        return name, iter(rows), kind
    return name, read_rows(name, choices.ask is not None), its_kind


def import_rows(
    sources: Sequence[Source],
    out: Path,
    choices: Choices,
    progress: Progress = silent,
    gate: ImportGate | None = None,
) -> ImportSummary:
    """The same with rows that were read before.

    With a `gate`, that no prompt of a source passes is no error.
    """
    with only_writer(out), large_images():
        prompts = {prompt.key: prompt for prompt in read(out)} if out.exists() else {}
        resolver = MediaResolver(choices.images, out.parent / choices.media)
        job = _Import(choices, resolver, progress, prompts, gate or ImportGate())
        for name, rows, kind in sources:
            if job.room:
                job.read(name, rows, kind)
        skipped_file = out.with_suffix(".skipped.jsonl")
        listed = [] if choices.private else job.skipped
        _write_skipped(skipped_file, listed, job.sources)
        if gate is None and not job.new:
            raise _nothing(sources, job, skipped_file)
        outdated = _outdated(prompts, job.new)
        present = len(prompts.keys() & job.new.keys())
        for key in outdated:
            del prompts[key]
        prompts |= job.split_prompts(prompts)
        job.gate.close()
        write(out, prompts.values())
    if job.unusable and gate is None:
        raise _nothing(sources, job, skipped_file)
    splits = Counter(prompt.split for prompt in prompts.values())
    return ImportSummary(
        out=out,
        skipped_file=skipped_file,
        added=len(job.new) - present,
        outdated=len(outdated),
        present=present,
        trimmed=job.trimmed,
        skipped=job.reasons,
        sampled=job.sampled,
        unread_columns=job.unread,
        row_forms=job.row_forms,
        earlier=job.earlier(prompts.values()),
        unread_files=job.unread_files,
        hidden_media=job.hidden,
        total=len(prompts),
        train=splits["train"],
        eval=splits["eval"],
        datasets=Counter(prompt.dataset for prompt in prompts.values()),
    )


def _outdated(
    prompts: Mapping[str, Prompt], new: Mapping[str, "_NewPrompt"]
) -> list[str]:
    """The keys of prompts whose images or videos were imported again with other content."""
    digests = {
        part["path"]: part["digest"]
        for entry in new.values()
        for part in entry.prompt.media
    }
    return [
        key
        for key in prompts.keys() - new.keys()
        if any(_has_changed(part, digests) for part in prompts[key].media)
    ]


def _has_changed(part: Mapping[str, Any], digests: Mapping[str, str]) -> bool:
    digest = part.get("digest")
    return digest is not None and digests.get(part["path"], digest) != digest


def _nothing(
    sources: Sequence[Source], job: "_Import", skipped_file: Path
) -> DataError:
    """The error that no row of some sources, or of all, can be used: why, and what may help."""
    reasons = sum(job.unusable.values(), Counter[str]())
    counts = [f"{reason} ({count})" for reason, count in reasons.most_common()]
    clauses = [", ".join(counts) or NO_ROWS]
    if job.skipped:
        clauses.append(f"row by row in {skipped_file}")
    if job.hidden and not job.new:
        clauses.append(f"images and videos in {', '.join(job.hidden)}: {RENAME}")
    cures = _cures(job.choices)
    clauses += [text for reason, text in cures.items() if reason in reasons]
    if job.new:
        clauses.append("the prompts of the other sources are imported")
    names = [*job.unusable] if job.new else [name for name, *_ in sources]
    return DataError(f"nothing to import from {', '.join(names)}: {'; '.join(clauses)}")


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


@dataclass(frozen=True)
class _NewPrompt:
    """A prompt of this import, and what decides its split: an image of it, or its first question."""

    prompt: Prompt
    tie: str


@dataclass
class _Import:
    """The state of an import: new prompts, skipped rows."""

    choices: Choices
    resolver: MediaResolver
    progress: Progress
    present: Mapping[str, Prompt]
    gate: ImportGate
    new: dict[str, _NewPrompt] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    sampled: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    unread_files: list[str] = field(default_factory=list)
    unusable: dict[str, Counter[str]] = field(default_factory=dict)
    """The sources without a row that can be used, and why; duplicates can be."""
    trimmed: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self._sides = Sides(self.present.values())
        self._texts = Counter[str]()  # source -> characters of its prompts
        self._forms: dict[tuple[tuple[str, ...], bool], RowForm] = {}

    @property
    def room(self) -> int:
        """The number of rows that can be read before the limit is reached, at most a chunk."""
        limit = self.choices.limit
        if limit is None:
            return CHUNK_ROWS
        return max(0, min(CHUNK_ROWS, limit - len(self.new)))

    @property
    def reasons(self) -> Counter[str]:
        """How many rows were skipped, by reason."""
        return Counter(entry["reason"] for entry in self.skipped)

    @property
    def row_forms(self) -> list[RowForm]:
        """The forms of the rows that became prompts, the most common first."""
        forms = self._forms.values()
        return sorted(forms, key=lambda form: form.prompts, reverse=True)

    def earlier(self, prompts: Iterable[Prompt]) -> Counter[str]:
        """Prompts that this import has not made of its sources, by their names; none if it ended early."""
        if not self.room:
            return Counter()
        others = (prompt for prompt in prompts if prompt.key not in self.new)
        sources = (prompt.source for prompt in others if prompt.time is None)
        return Counter(Path(name).name for name in sources if name in self.sources)

    def read(self, source: str, rows: Iterator[Row], kind: Format) -> None:
        """Take the rows of one source, until the limit."""
        new, skipped = len(self.new), len(self.skipped)
        self._take_all(rows, kind)
        reasons = Counter(entry["reason"] for entry in self.skipped[skipped:])
        is_usable = len(self.new) > new or reasons.keys() & {DUPLICATE, NO_ROWS}
        if reasons and not is_usable:
            self.unusable[source] = reasons

    def _take_all(self, rows: Iterator[Row], kind: Format) -> None:
        talks = ((row, self._conversation(row, kind)) for row in rows)
        for chunk in self._chunks(self._unshown_last(talks)):
            self.resolver.check_all(
                (part, row.folders)
                for row, talk in chunk
                if talk
                for part in media_parts(talk.messages)
            )
            for row, talk in chunk:
                self.sources.add(row.source)
                if talk and self.room:
                    self._take(row, talk)
            self.rows += len(chunk)
            self.progress(self.rows, 0)
            if not self.room:
                return

    def _unshown_last(self, talks: Iterator[Talk]) -> Iterator[Talk]:
        """The rows of a source. Last come those with placeholders as text: in a source with images, or with
        videos, they miss one.
        """
        waiting = []
        has_media = False
        for row, talk in talks:
            columns = row.value if isinstance(row.value, Mapping) else {}
            shows_by_tag = talk is not None and talk.shows_by_tag
            has_media = has_media or shows_by_tag or has_media_columns(columns)
            if talk and talk.unshown:
                waiting.append((row, talk))
                self._texts[row.source] += _text_length(talk.messages)
                self._require_memory(row.source)
            else:
                yield row, talk
        for row, talk in waiting:
            if has_media:
                self._skip(row, formats.without_media(talk.unshown[0]))
            yield row, None if has_media else talk

    def split_prompts(self, prompts: Mapping[str, Prompt]) -> dict[str, Prompt]:
        """The new prompts with their split, which stays for those that are in the file.

        Left out are those that traffic has in the file: their responses are deleted with it.
        """
        split_prompts = {}
        for key, entry in self.new.items():
            earlier = prompts.get(key)
            if earlier is None:
                split = self._sides.of(entry.tie, self.choices.eval_share)
            elif earlier.time is not None:
                continue
            else:
                split = earlier.split
            split_prompts[key] = dataclasses.replace(entry.prompt, split=split)
        return split_prompts

    def _conversation(self, row: Row, kind: Format) -> Conversation | None:
        """The conversation of a row; None if it is skipped."""
        sampling, ask = self.choices.sampling, self.choices.ask
        try:
            talk = formats.conversation(row, kind, sampling, ask)
            self._require_readable(talk)
        except BadRowError as error:
            self._skip(row, error)
            if isinstance(error, HiddenMediaError):
                self.hidden[error.column] += 1
            if isinstance(error, UnreadFileError):
                self.unread_files.append(error.detail)
            return None
        return talk

    def _require_readable(self, talk: Conversation) -> None:
        """BadRowError if the target cannot read the videos of a conversation."""
        family = self.choices.images_only
        if not family:
            return
        if any(part["type"] == "video" for part in media_parts(talk.messages)):
            raise BadRowError(
                "video", f"targets of the family {family} support images, not videos"
            )

    def _skip(self, row: Row, error: BadRowError) -> None:
        self.skipped.append(
            {
                "source": row.source,
                "row": row.number,
                "line": row.line,
                "reason": error.reason,
                "detail": error.detail,
            }
        )
        self.gate.skipped(row)

    def _take(self, row: Row, talk: Conversation) -> None:
        """Make the prompts of one conversation."""
        try:
            digests = [
                self.resolver.resolve(part, *row.folders)
                for part in media_parts(talk.messages)
            ]
        except BadRowError as error:
            self._skip(row, error)
            return
        if not self.choices.sampling:
            self.sampled.update(_samplings(talk.messages))
        self.trimmed += talk.trimmed
        self.unread.update(talk.unread)
        self.hidden.update(talk.hidden)
        ties = ties_of(digests, talk.messages)
        if self.choices.split and not digests:  # the user may put texts anywhere
            ties = [f"!{self.choices.split}"]
        agrees = self._sides.join(ties, self.choices.split)
        for prompt in self._prompts(row, talk):
            try:
                self._require_new(prompt, agrees)
                accepted = self.gate.accept(row, prompt)
                self.new[prompt.key] = _NewPrompt(accepted, ties[0])
                self._count(row, prompt)
                self._texts[row.source] += _text_length(prompt.messages)
            except BadRowError as error:
                self._skip(row, error)
            if not self.room:
                return
        self._require_memory(row.source)

    def _count(self, row: Row, prompt: Prompt) -> None:
        """Count a prompt for the form of its row."""
        columns = row.value if isinstance(row.value, Mapping) else {}
        filled = (str(name) for name in columns if has_content(columns[name]))
        names = tuple(sorted(filled))
        key = (names, bool(prompt.media))
        if key not in self._forms and len(self._forms) == MOST_FORMS:
            return
        form = RowForm(names, prompt, row.file or row.source)
        self._forms.setdefault(key, form).prompts += 1

    def _require_memory(self, source: str) -> None:
        """DataError if memory may not hold the texts of a source: rows may repeat one that it has once."""
        characters = self._texts[source]
        if characters > MOST_TEXT and characters > MOST_RATIO * _bytes_of(source):
            raise DataError(
                f"{source}: its prompts have more than {MOST_TEXT} characters, {MOST_RATIO} times its bytes, "
                "since rows repeat texts: import fewer, --limit"
            )

    def _prompts(self, row: Row, talk: Conversation) -> Iterator[Prompt]:
        """The prompts of a conversation: of its turns, with each augmentation."""
        questions = _questions(talk, self.choices.turns)
        for turn, (messages, reference) in enumerate(questions, 1):
            has_media = any(media_parts(messages))  # which may come in a later turn
            names = self.choices.augment if has_media else self.choices.augment_text
            for name in names:
                augmentation = augment.find(name)
                yield self._prompt(row, turn, messages, reference, augmentation)

    def _prompt(
        self,
        row: Row,
        turn: int,
        messages: list[Message],
        reference: str | None,
        augmentation: Augmentation,
    ) -> Prompt:
        messages = augmentation.apply(messages)
        content = content_of(messages)
        identity = [row.dataset, content] if self.choices.by_dataset else content
        return Prompt(
            key=content_hash(identity),
            dataset=row.dataset,
            split="train",  # decided when all rows are read
            messages=[_stored(message) for message in messages],
            augmentation=augmentation.name,
            augmentation_text=augmentation.text,
            reference=reference,
            source=row.source,
            row=row.number,
            turn=turn,
        )

    def _require_new(self, prompt: Prompt, agrees: bool) -> None:
        """BadRowError if a prompt was made already, or its images are on the other side of the split."""
        if not agrees and prompt.key not in self.present:
            split = self.choices.split
            where = f"not in {split}" if split else "train and eval"
            raise BadRowError("images of the other split", f"they are {where} already")
        if prompt.key in self.new:
            earlier = self.new[prompt.key].prompt
            raise BadRowError(
                DUPLICATE,
                f"the same prompt as row {earlier.row} of {Path(earlier.source).name}",
            )

    def _chunks(self, talks: Iterator[Talk]) -> Iterator[list[Talk]]:
        """Rows in chunks that fit into memory, which holds the images of some."""
        chunk: list[Talk] = []
        size = 0
        for row, talk in talks:
            chunk.append((row, talk))
            for part in media_parts(talk.messages if talk else ()):
                if isinstance(part["media"], bytes):
                    size += len(part["media"])
            size += _text_length(talk.messages if talk else ())
            if len(chunk) >= self.room or size > CHUNK_BYTES:
                yield chunk
                chunk = []
                size = 0
        if chunk:
            yield chunk


def _samplings(messages: Iterable[Message]) -> Iterator[str]:
    """The sampling of each video that has one."""
    for part in media_parts(messages):
        yield from (f"{name} {part[name]:g}" for name in SAMPLING if name in part)


def _text_length(messages: Iterable[Message]) -> int:
    """The characters of messages."""
    parts = (part for message in messages for part in message["content"])
    return sum(len(part.get("text", "")) for part in parts)


def _bytes_of(source: str) -> float:
    """The bytes of a file or folder; infinity if they are not known."""
    path, _ = located(source)
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else math.inf
    files = (file for file, error in walk(path) if not error)
    return sum(file.stat().st_size for file in files if file.is_file())


def _stored(message: Message) -> Message:
    """The message as stored: type, text or path, hash of the file, and video sampling."""
    parts = [
        {key: part[key] for key in STORED_KEYS if key in part}
        for part in message["content"]
    ]
    return {"role": message["role"], "content": parts}


def _questions(
    talk: Conversation, which: Turns
) -> Iterator[tuple[list[Message], str | None]]:
    """Each prompt of a conversation, with the response of the dataset; `last` is one that ends with it.

    The first question of a row that has a history is the one behind it.
    """
    messages = talk.messages
    ends = [end for end, turn in enumerate(messages, 1) if turn["role"] == "user"]
    if which == "first":
        ends = ends[-1:] if talk.has_history else ends[:1]
    elif which == "last":
        ends = [end for end in ends if end == len(messages)]
    for end in ends:
        response = messages[end]["content"] if end < len(messages) else []
        texts = [part["text"] for part in response if part["type"] == "text"]
        yield messages[:end], "\n".join(texts) or None


def _write_skipped(
    path: Path, skipped: Iterable[dict[str, Any]], sources: set[str]
) -> None:
    """Replace the entries of `sources` in the list of skipped rows; other entries stay."""
    lines = path.read_text().splitlines() if path.is_file() else []
    entries = [json.loads(line) for line in lines]
    kept = [entry for entry in entries if entry["source"] not in sources]
    with atomic_write(path) as file:
        text = "".join(json.dumps(entry) + "\n" for entry in [*kept, *skipped])
        file.write_text(text)


def media_of(prompts: Path, folder: Path | None = None) -> list[str]:
    """The images and videos of the prompts in a file, if there is one, or all files of a folder."""
    if folder is not None:
        files = [str(path.absolute()) for path, _ in walk(folder)]
        return files or [str(folder.absolute())]
    if not prompts.is_file():
        return []
    return [path for prompt in load(prompts) for path in prompt.files]
