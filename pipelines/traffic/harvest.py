"""Harvest: logs of a server become prompts and responses of the workspace, as a policy allows.

    <workspace>/prompts.parquet, responses/   as `prompts` and `responses` write them
                harvested/                    images and videos of the logs, named by their hash
                traffic/audit.jsonl           a line for each harvest: what was kept, and dropped why
                        sources.json          log files that are read

Responses are written before their prompts, so no prompt lacks a response. After a kill, the next harvest
restores the prompts of responses that have none. Nothing is kept of what is dropped.
"""

import io
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.data.prompts import formats, prompt_table
from vlmdistill.pipelines.data.prompts.formats import Format
from vlmdistill.pipelines.data.prompts.importing import Choices, ImportGate, import_rows
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.prompts.row import MOST_BYTES, Row
from vlmdistill.pipelines.data.prompts.turns import ROLES, is_open, role_of
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.pipelines.data.responses.quality import repetition
from vlmdistill.pipelines.media.frames import SAMPLING
from vlmdistill.pipelines.media.images import name_of, open_image
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.media.urls import address, is_url
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.checkpoints.template import MODE_OF, thinks
from vlmdistill.pipelines.traffic.dialects import Exchange
from vlmdistill.pipelines.traffic.logs import (
    BadLine,
    Log,
    LogFile,
    other_files_line,
    unread_line,
)
from vlmdistill.pipelines.traffic.policy import FUTURE, Policy
from vlmdistill.pipelines.traffic.tokens import (
    LoggedResponse,
    ResponseTokens,
    is_counted,
    require_same_prompt,
    require_whole,
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
CHAT: Format = "chat"
AUDIT, READ = "audit.jsonl", "sources.json"
KNOWN = "known"  # the reason of what an earlier harvest or an import has
API_ROLES = ("system", "developer", "user", "assistant")
EVAL_SHARE = 0.1
ROWS_PER_FILE = 256  # of responses
ELSEWHERE = (
    "no request",
    "several requests",
    "missing media",
    "media budget",
    FUTURE,
)
"""Reasons that are not the file's own fault: it is read again by the next harvest."""


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
    other_files: (
        str  # how many the folders have whose names end as no log's, and the first
    )
    train: int  # of the kept ones
    eval: int
    known: int  # kept by an earlier harvest
    dropped: dict[str, int]  # by reason
    tokens: dict[str, int]
    """Kept responses by where their tokens come from: ids, logprobs, text."""
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

    policy = policy or Policy()
    policy.check()
    start, now = time.monotonic(), datetime.now(UTC)
    round_name = round_name or now.strftime("%Y-%m-%d")
    if not NAME.fullmatch(round_name):
        raise DataError(
            f"--round '{round_name}': use letters, digits, '_', '.' and '-'"
        )
    choices = Choices(turns="last", eval_share=eval_share, media=MEDIA, private=True)
    choices.check()
    logs = Log.open(names, workspace)
    folder = workspace.traffic
    out = workspace.responses
    with only_writer(out) as responses_part, only_writer(folder) as traffic_part:
        earlier = _files_read(folder / READ, policy)
        files = [f for f in logs.files if earlier.get(f.name) != [*f.state]]
        dataset.check_settings(out, {"checkpoint": str(checkpoint(workspace.model))})
        sampling, _ = dataset.read_settings(out)
        target = load_encoder(workspace.model, sampling.thinking)
        # Of a harvest that was killed, or deleted by another machine.
        media_before = _sweep(workspace)
        job = _Harvest(
            workspace,
            target,
            policy,
            dataset_of(round_name),
            now.timestamp(),
            logs,
            progress,
            dict(media_before),
        )
        folder.mkdir(parents=True, exist_ok=True)
        if files:
            _write_settings(out, target)
        rows = (row for file in files for row in job.rows(file))
        try:
            source = (", ".join(names), rows, CHAT)
            summary = import_rows([source], workspace.prompts, choices, gate=job)
        finally:
            traffic_part.save()
            responses_part.save()
            media = _sweep(workspace)
        if not job.exchanges and all(file.name in logs.unread for file in logs.files):
            raise DataError(unread_line(logs.unread))
        train, held_out = job.split_counts(summary.out)
        dropped = job.dropped + summary.skipped
        known_count = dropped.pop(KNOWN, 0)
        harvested = Harvest(
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
            other_files=other_files_line(logs.other_files),
            train=train,
            eval=held_out,
            known=known_count,
            dropped=dict(dropped.most_common()),
            tokens=dict(job.origins),
            redacted=job.redacted,
            media=len(media.keys() - media_before.keys()),
            media_bytes=sum(media.values()),
            seconds=round(time.monotonic() - start, 3),
        )
        done = {file.name: file.state for file in files if file.name not in job.again}
        _note(workspace, harvested, {**earlier, **done}, policy)
    return harvested


@dataclass
class _Pending:
    """What is left to decide of a row once its prompt is made."""

    file: LogFile
    exchange: Exchange
    response: LoggedResponse
    text: str  # of the response, redacted
    messages_changed: bool  # by the redaction
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
    again: set[str] = field(default_factory=set)
    """Files of which more may be kept another time."""
    _pending: dict[tuple[str, int], _Pending] = field(default_factory=dict)
    _rows: list[ResponseRow] = field(default_factory=list)
    _added: set[str] = field(default_factory=set)  # media of the kept prompts

    def __post_init__(self) -> None:
        self._tokens = ResponseTokens(self.target)
        self._filters = dataset.read_settings(self.workspace.responses)[1]
        self._answered = dataset.keys(self.workspace.responses)
        present = _prompts(self.workspace)
        self._present = {prompt.key: prompt for prompt in present}
        self._near = {_near(prompt) for prompt in present}
        self._kept_media = set(self.media)
        self._used_bytes = sum(self.media.values())
        self._media_folders = _media_folders(self.workspace)

    def rows(self, file: LogFile) -> Iterator[Row]:
        """The conversations of a log file that the policy allows, with the bytes of their media."""
        for line in self._lines(file):
            self.exchanges += 1
            if self.exchanges % 100 == 0:
                self.progress(self.exchanges, 0)
            try:
                yield self._row(file, self._allowed(line))
            except BadRowError as error:
                self.dropped[error.reason] += 1
                if error.reason in ELSEWHERE:
                    self.again.add(file.name)

    def _lines(self, file: LogFile) -> Iterator[Exchange | BadLine]:
        """The lines of a log file, up to where it can be read."""
        try:
            yield from self.logs.read(file)
        except FOR_USER as error:
            self.logs.unread[file.name] = one_line(error)
            self.again.add(file.name)

    def _allowed(self, line: Exchange | BadLine) -> Exchange:
        """The exchange of a line; BadRowError if it is none, or the policy refuses it."""
        if isinstance(line, tuple):
            _, error = line
            raise error
        refusal = self.policy.refusal(line, self.now)
        if refusal:
            raise BadRowError(refusal)
        return line

    def _row(self, file: LogFile, exchange: Exchange) -> Row:
        require_whole(exchange)
        response = self._tokens.logged(exchange)
        messages, text = self.policy.redacted(exchange, response.text)
        turns = self._turns(file, exchange.row, messages)
        row = replace(exchange.row, value={"messages": turns}, dataset=self.dataset)
        self._pending[row.source, row.number] = _Pending(
            file,
            exchange,
            response,
            text,
            messages_changed=messages != exchange.messages,
            media=self._within_budget(turns),
        )
        return row

    def _turns(self, file: LogFile, row: Row, messages: Any) -> list[dict[str, Any]]:
        """The turns of messages of a row, media as bytes; BadRowError if they are no whole conversation."""
        if not isinstance(messages, list):
            raise BadRowError("no conversation")
        _require_as_it_is(messages)
        row = replace(row, value={"messages": messages})
        conversation = formats.conversation(row, CHAT)
        if conversation.trimmed:
            raise BadRowError("no question", "the conversation begins with a response")
        turns = [dict(message) for message in conversation.messages]
        if turns[-1]["role"] != "user":
            raise BadRowError(
                "no question", "the conversation does not end with a turn of the user"
            )
        self._fill_in_media(file, turns)
        return turns

    def _fill_in_media(self, file: LogFile, turns: Sequence[dict[str, Any]]) -> None:
        """Put the content of images and videos into the turns; BadRowError if memory cannot hold it."""
        room = MOST_BYTES
        for turn in turns:
            parts = []
            for part in turn["content"]:
                parts.append(self._part(file, part, room))
                room -= len(parts[-1].get("bytes", b""))
            turn["content"] = parts

    def _part(
        self, file: LogFile, part: Mapping[str, Any], room: int
    ) -> dict[str, Any]:
        """A part of a message as a row has it, media as bytes; BadRowError if they are more than `room`."""
        if part["type"] == "text":
            return dict(part)
        media = part["media"]
        content = media if isinstance(media, bytes) else file.media(media, room)
        sampling = {name: part[name] for name in SAMPLING if name in part}
        return {"type": part["type"], "bytes": content, **sampling}

    def _within_budget(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """The media of a conversation; BadRowError if they do not fit into the policy's bytes."""
        parts = [part for turn in turns for part in turn["content"] if "bytes" in part]
        media = {name_of(part["bytes"]): len(part["bytes"]) for part in parts}
        new_bytes = self._new_bytes(media)
        if new_bytes and self._used_bytes + new_bytes > self.policy.media_bytes:
            raise BadRowError(
                "media budget", f"{new_bytes} bytes more than {self.policy.media}"
            )
        self._count(media)
        return media

    def _new_bytes(self, media: Mapping[str, int]) -> int:
        """The bytes of the media that are not counted yet."""
        return sum(size for name, size in media.items() if name not in self.media)

    def _count(self, media: Mapping[str, int]) -> None:
        self._used_bytes += self._new_bytes(media)
        self.media |= media

    def skipped(self, row: Row) -> None:
        """Let go of a row that is not kept, and of its media unless a kept one has them."""
        pending = self._pending.pop((row.source, row.number), None)
        if pending is not None:
            for name in pending.media.keys() - self._kept_media:
                self._used_bytes -= self.media.pop(name, 0)

    def accept(self, row: Row, prompt: Prompt) -> Prompt:
        """Check and keep the response of a prompt; BadRowError if either cannot be kept."""
        pending = self._pending[row.source, row.number]
        earlier = self._present.get(prompt.key)
        is_imported = earlier is not None and earlier.time is None
        # The response to an imported prompt would not be traffic's, which is deleted.
        if is_imported or (earlier and prompt.key in self._answered):
            raise BadRowError(KNOWN)
        if earlier is None:
            time_of_request = pending.exchange.time
            if time_of_request is None or time_of_request > self.now:
                time_of_request = self.now
            prompt = replace(prompt, time=int(time_of_request))
        else:
            prompt = earlier
        has_response = prompt.key in self._answered  # of a harvest that was killed
        if not has_response:
            self._keep_response(prompt, pending, is_new=earlier is None)
        self.kept.add(prompt.key)
        del self._pending[row.source, row.number]
        self._kept_media |= pending.media.keys()
        self._count(pending.media)
        return prompt

    def _keep_response(self, prompt: Prompt, pending: _Pending, is_new: bool) -> None:
        """Keep the response of a prompt; BadRowError if it is unsure, or the prompt is nearly a kept one."""
        near = _near(prompt)
        if is_new and near in self._near:
            raise BadRowError("near-duplicate")
        response = self._response(prompt, pending)
        self._near.add(near)
        self._rows.append(response)
        names = [_harvested_name(self._media_folders, path) for path in prompt.files]
        self._added.update(f"{MEDIA}/{name}" for name in names if name)
        if len(self._rows) >= ROWS_PER_FILE:
            self._write()

    def _response(self, prompt: Prompt, pending: _Pending) -> ResponseRow:
        exchange, text = pending.exchange, pending.text
        if _has_video(prompt) and not is_counted(exchange):
            raise BadRowError(
                "another prompt", "servers choose the frames of a video: log the usage"
            )
        ids, origin = self._tokens.of(exchange, pending.response, text)
        try:
            encoded = self.target.encode(prompt.messages)
        except DataError as error:
            raise BadRowError("refused by the processor", one_line(error)) from None
        prompt_ids = encoded.ids_L.tolist()
        if is_counted(exchange):
            logged_ids = prompt_ids
            if pending.messages_changed:
                logged_ids = self._logged_ids(prompt, pending)
            require_same_prompt(exchange, logged_ids)
        self._tokens.require_reasoning(
            exchange,
            pending.response,
            prompt_ids,
            thinks(self.target.thinking, prompt.messages),
        )
        words = len(words_of(text))
        repeated = repetition(ids)
        length = encoded.length + len(ids)
        limit = min(self._filters.max_length or 2**31, self.target.info.max_position)
        refusal = self._filters.reason(words, repeated, length, limit)
        if refusal:
            raise BadRowError(refusal)
        self.origins[origin] += 1
        self.redacted += text != pending.response.text
        return ResponseRow(
            key=prompt.key,
            ids=ids,
            text=text,
            finish=str(exchange.choice.get("finish_reason")),
            prompt_tokens=encoded.length,
            visual_tokens=sum(span.length for span in encoded.spans),
            words=words,
            repetition=repeated,
            keep=True,
            temperature=_number(exchange.request.get("temperature"), 1.0),
            top_p=_number(exchange.request.get("top_p"), 1.0),
            max_new_tokens=max(len(ids), 1),
            target=str(self.target.fingerprint),
            time=prompt.time,
        )

    def _logged_ids(self, prompt: Prompt, pending: _Pending) -> list[int]:
        """The tokens of a prompt before its redaction; BadRowError if it cannot be encoded.

        Nothing of what the redaction has removed is kept.
        """
        exchange = pending.exchange
        kept_paths = {str(part.get("digest")): part["path"] for part in prompt.media}
        try:
            turns = self._turns(pending.file, exchange.row, exchange.messages)
        except BadRowError as error:  # its detail may quote the prompt
            raise BadRowError(error.reason) from None
        for turn in turns:
            turn["content"] = [_readable(part, kept_paths) for part in turn["content"]]
        # A mixed mode goes by the words, which the redaction has changed.
        is_thinking = thinks(self.target.thinking, prompt.messages)
        try:
            encoded = self.target.encode(turns, MODE_OF[is_thinking])
        except DataError:  # it may quote the prompt
            raise BadRowError("refused by the processor") from None
        ids: list[int] = encoded.ids_L.tolist()
        return ids

    def close(self) -> None:
        """Write the responses that are left, and let media go with the prompts to the URL."""
        self._write()
        if self.workspace.parts:
            self.workspace.parts.send_later(self._added)

    def _write(self) -> None:
        """Write the responses that are kept so far."""
        rows = self._rows
        self._rows = []
        name = content_hash(sorted(row.key for row in rows))
        dataset.write_part(self.workspace.responses, name, rows)

    def split_counts(self, file: Path) -> tuple[int, int]:
        """How many of the kept prompts are to train on, and held out."""
        if not self.kept:
            return 0, 0
        prompts = prompt_table.read(file)
        splits = Counter(prompt.split for prompt in prompts if prompt.key in self.kept)
        return splits["train"], splits["eval"]


def _require_as_it_is(messages: list[Any]) -> None:
    """BadRowError for turns that a dataset may have, and that a server reads otherwise."""
    if messages and is_open(messages[-1]):
        raise BadRowError("another prompt", "it ends with an empty response")
    roles = {role_of(turn) for turn in messages}
    of_datasets = roles.intersection(ROLES) - {*API_ROLES}
    if of_datasets:
        raise BadRowError("another prompt", f"a turn of '{min(of_datasets)}'")


def _readable(part: dict[str, Any], kept_paths: Mapping[str, str]) -> dict[str, Any]:
    """A part with its media as the target reads it; BadRowError if that needs a file that is not kept."""
    if "bytes" not in part:
        return part
    content = part.pop("bytes")
    digest = name_of(content)
    if digest in kept_paths:
        return {**part, "path": kept_paths[digest], "digest": digest}
    if part["type"] == "video":
        raise BadRowError("redaction removes a video")
    try:
        return {**part, "image": open_image(io.BytesIO(content))}
    except OSError:
        raise BadRowError("unreadable image") from None


def _has_video(prompt: Prompt) -> bool:
    return any(part["type"] == "video" for part in prompt.media)


def _near(prompt: Prompt) -> str:
    """Equal for conversations that differ in case, spaces and punctuation alone: same words, same media."""
    turns = []
    for turn in prompt.messages:
        parts = turn["content"]
        content = [part.get("digest") or _words(part.get("text", "")) for part in parts]
        turns.append([turn["role"], content])
    return content_hash(turns)


def _words(text: str) -> str:
    plain = "".join(letter if letter.isalnum() else " " for letter in text.casefold())
    return " ".join(plain.split())


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _write_settings(out: Path, target: "TargetModel") -> None:
    """Write the settings of a folder of responses that has none yet."""
    if (out / dataset.SETTINGS).is_file():
        return
    sampling, filters = dataset.read_settings(out)
    settings = {
        "target": str(target.fingerprint),
        "engine": "transformers",
        "checkpoint": str(checkpoint(target.name)),
        "sampling": asdict(sampling),
        "filters": asdict(filters),
    }
    dataset.write_settings(out, settings)


def _prompts(workspace: Workspace) -> list[Prompt]:
    """All prompts of a workspace, maybe none."""
    file = workspace.prompts
    return prompt_table.read(file) if file.is_file() else []


def _media_files(workspace: Workspace) -> dict[str, int]:
    """The files of harvested media on this machine and, of a workspace at a URL, there: names and bytes.

    Folders beside them are the user's.
    """
    paths = (workspace.root / MEDIA).glob("*")
    local = {path.name: path.stat().st_size for path in paths if not path.is_dir()}
    if not workspace.parts:
        return local
    listed = workspace.parts.remote.list_files(MEDIA)
    return {name: size for name, size in listed.items() if "/" not in name} | local


def _sweep(workspace: Workspace) -> dict[str, int]:
    """Remove harvested media that no prompt names; the hashes of those that are left, and their bytes."""
    with only_writer(workspace.prompts):
        unnamed(workspace, _prompts(workspace))
    files = _media_files(workspace)
    return {
        Path(name).stem: size
        for name, size in files.items()
        if not name.startswith(".")
    }


def unnamed(
    workspace: Workspace, prompts: Sequence[Prompt], dry_run: bool = False
) -> dict[str, int]:
    """Remove the harvested media that no prompt names; the names of these files, and their bytes.

    `prompts` are all prompts of the workspace.
    """
    folders = _media_folders(workspace)
    paths = [path for prompt in prompts for path in prompt.files]
    named = {_harvested_name(folders, path) for path in paths}
    # Where the folder was a link, prompts name its target, which may have moved here.
    named |= {Path(path).name for path in paths if _is_gone(path)}
    files = _media_files(workspace)
    removed = {name: size for name, size in files.items() if name not in named}
    if not dry_run:
        for name in removed:
            (workspace.root / MEDIA / name).unlink(missing_ok=True)
            if workspace.parts:
                workspace.parts.remote.remove(f"{MEDIA}/{name}")
    return removed


def _media_folders(workspace: Workspace) -> tuple[str, str]:
    """How prompts name the folder of harvested media, which may be a link."""
    return f"{address(workspace.root)}/{MEDIA}", address(workspace.root / MEDIA)


def _is_gone(path: str) -> bool:
    """Whether a path of this machine leads to nothing."""
    return not is_url(path) and not Path(path).exists()


def _harvested_name(folders: Collection[str], path: str) -> str:
    """The name of a file in one of the folders; empty for a file elsewhere."""
    folder, _, name = path.rpartition("/")
    return name if folder in folders else ""


def _files_read(file: Path, policy: Policy) -> dict[str, Any]:
    """The log files that an earlier harvest has read with this policy, and their state then."""
    noted = json.loads(file.read_text()) if file.is_file() else {}
    return dict(noted.get("files", {})) if noted.get("policy") == policy.hash else {}


def _note(
    workspace: Workspace, harvested: Harvest, read: Mapping[str, Any], policy: Policy
) -> None:
    """Add a line to the audit, then note what was read."""
    folder = workspace.traffic
    audited(folder, asdict(harvested))
    with atomic_write(folder / READ) as new:
        new.write_text(json.dumps({"policy": policy.hash, "files": read}) + "\n")


def audited(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the audit."""
    with naming(folder / AUDIT), (folder / AUDIT).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
