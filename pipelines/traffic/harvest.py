"""Harvest: logs of a server become prompts and responses of the workspace, as a policy allows.

    <workspace>/prompts.parquet, responses/   as `prompts` and `responses` write them
                harvested/                    images and videos of the logs, named by their hash
                traffic/audit.jsonl           a line for each harvest: what was kept, and dropped why
                        sources.json          log files that are read
                        unlisted.txt          keys of responses whose prompts are not written yet

Responses come first, and a prompt without one is never written: a harvest that was killed is done again, and
finds the rest. Of what is dropped, nothing is kept.
"""

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.data.prompts import formats, prompt_table
from vlmdistill.pipelines.data.prompts.importing import Choices, ImportGate, import_rows
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, media_parts
from vlmdistill.pipelines.data.prompts.sources import MOST_BYTES, Row
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.pipelines.data.responses.quality import repetition
from vlmdistill.pipelines.media.images import name_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.media.urls import address
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.traffic.logs import Exchange, Log, LogFile, unread_line
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.traffic.tokens import (
    ResponseTokens,
    require_same_prompt,
    require_whole,
    response_text,
)
from vlmdistill.pipelines.workspace.workspace import NAME, Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import FOR_USER, DataError, naming, one_line
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash, utc
from vlmdistill.stores.views.text_stats import words_of

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.target_model import TargetModel

MEDIA = "harvested"
AUDIT, READ, UNLISTED = "audit.jsonl", "sources.json", "unlisted.txt"
EVAL_SHARE = 0.1
WRITTEN = 256  # responses of a file
ELSEWHERE = (
    "no request",
    "several requests",
    "missing media",
    "media budget",
)  # not the file's own fault


def dataset_of(round_name: str) -> str:
    """The dataset that the samples of a round are of, by which views select them."""
    return f"{prompt_table.TRAFFIC}{round_name}"


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """What a harvest did: a line of the audit."""

    when: str
    round: str
    dataset: str
    sources: tuple[str, ...]
    policy: str  # hash
    files: int  # of logs, read now
    unchanged: int  # that an earlier harvest with this policy has read
    exchanges: int  # read now
    kept: int
    unread: dict[str, str]  # files and folders that could not be read -> why
    train: int  # of those
    eval: int
    known: int  # kept by an earlier harvest
    dropped: dict[str, int]  # by reason
    tokens: dict[
        str, int
    ]  # kept responses by where their tokens come from: ids, logprobs, text
    redacted: int  # kept responses that the redaction has changed
    media: int  # images and videos that were added
    media_bytes: int  # of all that are kept
    seconds: float


def harvest(
    workspace: Workspace,
    names: Sequence[str],
    policy: Policy | None = None,
    *,
    round_name: str | None = None,
    eval_share: float = EVAL_SHARE,
    progress: Progress = silent,
) -> Harvest:
    """Take what the policy allows from logs into the workspace; `round_name` defaults to today's date (UTC).

    `eval_share` of the conversations is held out. `progress` gets the number of exchanges read. DataError if
    no log can be read, if the responses of the workspace are another target's, or if another run is
    writing to it. A file that cannot be read is named in `unread`, and the others are harvested. What was
    kept before stays as it is.
    """
    from vlmdistill.pipelines.targets.loading import load_encoder

    policy, start, now = policy or Policy(), time.monotonic(), datetime.now(UTC)
    policy.check()
    round_name = round_name or now.strftime("%Y-%m-%d")
    if not NAME.fullmatch(round_name):
        raise DataError(
            f"--round '{round_name}': use letters, digits, '_', '.' and '-'"
        )
    choices = Choices(turns="last", eval_share=eval_share, media=MEDIA, private=True)
    choices.check()
    logs = Log.open(names, workspace)
    folder = workspace.traffic
    with only_writer(workspace.responses) as part, only_writer(folder) as noted:
        read = _read_before(folder / READ, policy)
        files = [file for file in logs.files if read.get(file.name) != [*file.state]]
        target = load_encoder(workspace.model)
        out = workspace.responses
        dataset.check_settings(out, {"checkpoint": str(checkpoint(workspace.model))})
        before = _sweep(
            workspace
        )  # of a harvest that was killed, or deleted by another machine
        job = _Harvest(
            workspace,
            target,
            policy,
            dataset_of(round_name),
            now.timestamp(),
            logs,
            progress,
            dict(before),
        )
        folder.mkdir(parents=True, exist_ok=True)
        if files:
            _start(out, target)
        rows = (row for file in files for row in job.rows(file))
        try:
            summary = import_rows(
                [(", ".join(names), rows, "chat")], workspace.prompts, choices, gate=job
            )
        finally:
            noted.save()  # first: it says which responses have no prompt yet
            part.save()
            media = _sweep(workspace)
        if not job.exchanges and all(file.name in logs.unread for file in logs.files):
            raise DataError(unread_line(logs.unread))
        made = Harvest(
            when=utc(now.timestamp()),
            round=round_name,
            dataset=dataset_of(round_name),
            sources=tuple(names),
            policy=policy.hash,
            files=len(files),
            unchanged=len(logs.files) - len(files),
            exchanges=job.exchanges,
            kept=len(job.kept),
            unread=logs.unread,
            **job.sides(summary.out),
            known=summary.skipped.pop(KNOWN, 0),
            dropped=dict((job.dropped + summary.skipped).most_common()),
            tokens=dict(job.origins),
            redacted=job.redacted,
            media=len(media.keys() - before.keys()),
            media_bytes=sum(media.values()),
            seconds=round(time.monotonic() - start, 3),
        )
        done = {file.name: file.state for file in files if file.name not in job.again}
        _note(workspace, made, {**read, **done}, policy)
    return made


KNOWN = "known"


@dataclass
class _Pending:
    """What is left to decide of a row once its prompt is made."""

    exchange: Exchange
    text: str
    changed: tuple[bool, bool]  # the messages, the response
    media: dict[str, int]  # hash -> bytes


@dataclass
class _Harvest(ImportGate):
    """The state of a harvest, and what decides on each prompt."""

    workspace: Workspace
    target: "TargetModel"
    policy: Policy
    dataset: str
    now: float
    logs: Log
    progress: Progress
    media: dict[str, int]  # hash -> bytes
    exchanges: int = 0
    redacted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    kept: set[str] = field(default_factory=set)
    again: set[str] = field(
        default_factory=set
    )  # files of which more may be kept another time
    _pending: dict[tuple[str, int], _Pending] = field(default_factory=dict)
    _rows: list[ResponseRow] = field(default_factory=list)
    _made: set[str] = field(default_factory=set)  # media of the kept prompts

    def __post_init__(self) -> None:
        self._tokens = ResponseTokens(self.target)
        self._sampling, self._filters = dataset.read_settings(self.workspace.responses)
        self._answered = dataset.keys(self.workspace.responses)
        file = self.workspace.prompts
        present = prompt_table.read(file) if file.is_file() else []
        self._present = {prompt.key: prompt for prompt in present}
        self._near = {_near(prompt) for prompt in present}
        self._held, self._used = (
            set(self.media),
            sum(self.media.values()),
        )  # media of kept prompts; bytes

    def rows(self, file: LogFile) -> Iterator[Row]:
        """The conversations of a log file that the policy allows, with the bytes of their media."""
        for found in self._lines(file):
            self.exchanges += 1
            if self.exchanges % 100 == 0:
                self.progress(self.exchanges, 0)
            try:
                if isinstance(found, tuple):
                    raise found[1]
                if why := self.policy.refusal(found, self.now):
                    raise BadRowError(why)
                yield self._row(file, found)
            except BadRowError as error:
                self.dropped[error.reason] += 1
                if error.reason in ELSEWHERE:
                    self.again.add(file.name)

    def _lines(self, file: LogFile) -> Iterator[Exchange | tuple[Row, BadRowError]]:
        """The lines of a log file, up to where it can be read."""
        try:
            yield from self.logs.read(file)
        except FOR_USER as error:
            self.logs.unread[file.name] = one_line(error)
            self.again.add(file.name)

    def _row(self, file: LogFile, exchange: Exchange) -> Row:
        require_whole(exchange)
        said = response_text(exchange)
        messages, text = self.policy.redacted(exchange, said)
        if not isinstance(messages, list):
            raise BadRowError("no conversation")
        row = replace(exchange.row, value={"messages": messages}, dataset=self.dataset)
        turns = [
            dict(message) for message in formats.conversation(row, "chat").messages
        ]
        if turns[-1]["role"] != "user":
            raise BadRowError(
                "no question", "the conversation does not end with a turn of the user"
            )
        room = MOST_BYTES  # for the media of a row, which memory holds
        for turn in turns:
            parts = []
            for part in turn["content"]:
                parts.append(self._part(file, part, room))
                room -= len(parts[-1].get("bytes", b""))
            turn["content"] = parts
        media = self._within_budget(turns)
        changed = messages != exchange.messages, text != said
        self._pending[row.source, row.number] = _Pending(exchange, text, changed, media)
        return replace(row, value={"messages": turns})

    def _part(
        self, file: LogFile, part: Mapping[str, Any], room: int
    ) -> dict[str, Any]:
        """A part of a message as a row has it, media as bytes; BadRowError if they are more than `room`."""
        if part["type"] == "text":
            return dict(part)
        media = part["media"]
        sampling = {name: part[name] for name in ("fps", "frames") if name in part}
        content = media if isinstance(media, bytes) else file.media(media, room)
        return {"type": part["type"], "bytes": content, **sampling}

    def _within_budget(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """The media of a conversation; BadRowError if they do not fit into the policy's bytes."""
        media = {
            name_of(part["bytes"]): len(part["bytes"])
            for turn in turns
            for part in turn["content"]
            if "bytes" in part
        }
        more = sum(size for name, size in media.items() if name not in self.media)
        if more and self._used + more > self.policy.media_bytes:
            raise BadRowError(
                "media budget", f"{more} bytes more than {self.policy.media}"
            )
        self._count(media)
        return media

    def _count(self, media: Mapping[str, int]) -> None:
        self._used += sum(
            size for name, size in media.items() if name not in self.media
        )
        self.media |= media

    def skipped(self, row: Row) -> None:
        """Let go of a row that is not kept, and of its media unless a kept one has them."""
        if found := self._pending.pop((row.source, row.number), None):
            for name in found.media.keys() - self._held:
                self._used -= self.media.pop(name, 0)

    def accept(self, row: Row, prompt: Prompt) -> Prompt:
        """Check and keep the response of a prompt; BadRowError if either cannot be kept."""
        found = self._pending[row.source, row.number]
        asked = found.exchange.time
        earlier = self._present.get(prompt.key)
        imported = earlier is not None and earlier.time is None
        if imported or (earlier and prompt.key in self._answered):
            raise BadRowError(
                KNOWN
            )  # its response would be no traffic's, which is deleted
        prompt = earlier or replace(
            prompt, time=int(self.now if asked is None else min(asked, self.now))
        )
        if prompt.key not in self._answered:  # else of a harvest that was killed
            near = _near(prompt)
            if near in self._near and not earlier:
                raise BadRowError("near-duplicate")
            response = self._response(prompt, found)
            self._near.add(near)
            self._rows.append(response)
            folders = _media_folders(self.workspace)
            names = [_harvested_name(folders, path) for path in prompt.files]
            self._made.update(f"{MEDIA}/{name}" for name in names if name)
            if len(self._rows) >= WRITTEN:
                self._write()
        self.kept.add(prompt.key)
        del self._pending[row.source, row.number]
        self._held |= found.media.keys()
        self._count(found.media)
        return prompt

    def _response(self, prompt: Prompt, found: _Pending) -> ResponseRow:
        ids, origin = self._tokens.of(found.exchange, found.text, found.changed[1])
        try:
            encoded = self.target.encode(prompt.messages)
        except DataError as error:
            raise BadRowError("refused by the processor", one_line(error)) from None
        if not found.changed[0]:
            require_same_prompt(found.exchange, encoded.ids_L.tolist())
        words, repeated = len(words_of(found.text)), repetition(ids)
        limit = min(self._filters.max_length or 2**31, self.target.info.max_position)
        if why := self._filters.reason(
            words, repeated, encoded.length + len(ids), limit
        ):
            raise BadRowError(why)
        self.origins[origin] += 1
        self.redacted += found.changed[1]
        asked = found.exchange.request
        return ResponseRow(
            key=prompt.key,
            ids=ids,
            text=found.text,
            finish=str(found.exchange.choice.get("finish_reason")),
            prompt_tokens=encoded.length,
            visual_tokens=sum(span.length for span in encoded.spans),
            words=words,
            repetition=repeated,
            keep=True,
            temperature=_number(asked.get("temperature"), 1.0),
            top_p=_number(asked.get("top_p"), 1.0),
            max_new_tokens=max(len(ids), 1),
            target=str(self.target.fingerprint),
        )

    def close(self) -> None:
        """Write the responses that are left, and let media go with the prompts to the URL."""
        self._write()
        if self.workspace.parts:
            self.workspace.parts.send_later(self._made)

    def _write(self) -> None:
        """Write the responses that are kept so far."""
        rows, self._rows = self._rows, []
        listed = self.workspace.traffic / UNLISTED
        with naming(listed), listed.open("a") as file:
            file.writelines(f"{row.key}\n" for row in rows)
        name = content_hash(sorted(row.key for row in rows))
        dataset.write_part(self.workspace.responses, name, rows)

    def sides(self, file: Path) -> dict[str, int]:
        """How many of the kept prompts are to train on, and held out."""
        if not self.kept:
            return {"train": 0, "eval": 0}
        splits = Counter(
            one.split for one in prompt_table.read(file) if one.key in self.kept
        )
        return {"train": splits["train"], "eval": splits["eval"]}


def _near(prompt: Prompt) -> str:
    """Equal for conversations that differ in case, spaces and punctuation alone: same words, same media."""
    return content_hash(
        [
            [
                turn["role"],
                [
                    part.get("digest") or _words(part.get("text", ""))
                    for part in turn["content"]
                ],
            ]
            for turn in prompt.messages
        ]
    )


def _words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _start(out: Path, target: "TargetModel") -> None:
    """Write the settings of a folder of responses that has none yet."""
    sampling, filters = dataset.read_settings(out)
    if not (out / dataset.SETTINGS).is_file():
        facts = {"target": str(target.fingerprint), "engine": "transformers"}
        more = {
            "checkpoint": str(checkpoint(target.name)),
            "sampling": asdict(sampling),
        }
        dataset.write_settings(out, {**facts, **more, "filters": asdict(filters)})


def _media(workspace: Workspace) -> dict[str, int]:
    """The harvested images and videos: the hash of each, and its bytes."""
    return {
        Path(name).stem: size
        for name, size in _files(workspace).items()
        if not name.startswith(".")
    }


def _files(workspace: Workspace) -> dict[str, int]:
    """The files of harvested media on this machine and, of a workspace at a URL, there: names and bytes."""
    folder = workspace.root / MEDIA
    here = {
        one.name: one.stat().st_size
        for one in (folder.iterdir() if folder.is_dir() else ())
    }
    return {
        **(workspace.parts.remote.list_files(MEDIA) if workspace.parts else {}),
        **here,
    }


def _sweep(workspace: Workspace) -> dict[str, int]:
    """Remove harvested media that no prompt names; those that are left."""
    with only_writer(workspace.prompts):
        unnamed(
            workspace,
            prompt_table.read(workspace.prompts) if workspace.prompts.is_file() else [],
        )
    return _media(workspace)


def unnamed(
    workspace: Workspace, prompts: Sequence[Prompt], dry_run: bool = False
) -> dict[str, int]:
    """Remove the harvested media that these prompts, all there are, do not name; the files, their bytes."""
    folders = _media_folders(workspace)
    named = {
        name
        for prompt in prompts
        for part in media_parts(prompt.messages)
        if (name := _harvested_name(folders, part["path"]))
    }
    gone = {name: size for name, size in _files(workspace).items() if name not in named}
    for name in () if dry_run else gone:
        (workspace.root / MEDIA / name).unlink(missing_ok=True)
        if workspace.parts:
            workspace.parts.remote.remove(f"{MEDIA}/{name}")
    return gone


def _media_folders(workspace: Workspace) -> tuple[str, str]:
    """How prompts name the folder of harvested media, which may be a link."""
    return f"{address(workspace.root)}/{MEDIA}", address(workspace.root / MEDIA)


def _harvested_name(folders: Collection[str], path: str) -> str:
    """The name of a file in one of the folders; empty for a file elsewhere."""
    folder, _, name = path.rpartition("/")
    return name if folder in folders else ""


def unlisted(workspace: Workspace, prompts: Sequence[Prompt]) -> set[str]:
    """The keys of responses that a harvest wrote which was killed before their prompts were.

    `prompts` are all there are. One that was imported since has the prompt, but says not when it was asked.
    """
    file = workspace.traffic / UNLISTED
    noted = set(file.read_text().split()) if file.is_file() else set[str]()
    return noted.difference(one.key for one in prompts if one.time is not None)


def _read_before(file: Path, policy: Policy) -> dict[str, Any]:
    """The log files that an earlier harvest has read with this policy, and their state then."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    return dict(found.get("files", {})) if found.get("policy") == policy.hash else {}


def _note(
    workspace: Workspace, made: Harvest, read: Mapping[str, Any], policy: Policy
) -> None:
    """Add a line to the audit, then note what was read, and what an earlier harvest has left unlisted."""
    folder, prompts = workspace.traffic, workspace.prompts
    audited(folder, asdict(made))
    left = unlisted(workspace, prompt_table.read(prompts) if prompts.is_file() else [])
    with atomic_write(folder / UNLISTED) as new:
        new.write_text("".join(f"{key}\n" for key in sorted(left)))
    if not left:
        (folder / UNLISTED).unlink()
    with atomic_write(folder / READ) as new:
        new.write_text(json.dumps({"policy": policy.hash, "files": read}) + "\n")


def audited(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the audit."""
    with naming(folder / AUDIT), (folder / AUDIT).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
