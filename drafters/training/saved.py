"""Checkpoints of an unfinished run as files, from which any number of ranks can continue.

    <run>.training/checkpoint.json      position and settings of the run; sealed, written last
                   step<N>.safetensors  weights, Adam's moments and steps, buffers; see `deepspeed_engine`
                   metrics.jsonl        figures of each step and validation; see `progress`

A copy in another folder or at a URL has versions (see `stores.sharing.mirror`): of two machines that
continue from the same version, the second one gets an error and changes nothing.

Rank 0 writes the files; the other ranks get them from the rank that has them. A checkpoint may come from
someone else: nothing in it can run code, and all of it is checked before use.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

from blake3 import blake3
from msgspec import Meta, Struct
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmdistill.drafters.training.deepspeed_engine import MOMENTS, STEP, PartEntry
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import LostError, StoreError, TrainingError, one_line
from vlmdistill.stores.input_files import decode, read_bytes, regular
from vlmdistill.stores.manifest import Record, seal, unseal
from vlmdistill.stores.retry import retried
from vlmdistill.stores.schema import SCHEMA_VERSION
from vlmdistill.stores.sharing.mirror import Mirror, Version

log = logging.getLogger(__name__)
RECORD = "checkpoint.json"
FORMAT = 2
"""Of checkpoints. Development versions wrote 1; nothing reads it."""
MOST_RANKS = 2**16

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measurement on held-out samples."""

    stage: str
    step: Count
    held_out_agreement: list[float]
    """By hop, the share of rows whose most likely token is the target's."""
    predicted_tau: float
    """Of a chain that is as long as the drafter's tree is deep."""


@dataclass(frozen=True, kw_only=True)
class StageDone:
    """A stage that a run has finished."""

    name: str
    steps: Count  # of the optimizer
    passes: float  # samples read, divided by the samples of the run


@dataclass
class Position:
    """How far a run has come."""

    total: Count = 0  # optimizer steps of the run
    stage: Count = 0
    stage_steps: Count = 0  # optimizer steps of the stage
    epoch: Count = 0  # of the stage
    steps_before_epoch: Count = 0  # of those of the stage
    reader: dict[str, Any] | None = None  # `Epoch.state` of the epoch
    passes: float = 0.0  # of the stage before the epoch, see `StageDone`
    epoch_passes: float = 0.0  # of the epoch so far
    stages_done: list[StageDone] = field(default_factory=list)
    history: list[HeldOut] = field(default_factory=list)
    seconds: float = 0.0  # of the steps
    cpu_seconds: float = 0.0  # of the steps, over all ranks

    @property
    def best(self) -> HeldOut | None:
        """The measurement with the highest predicted tau, the first of equal ones."""
        return max(self.history, key=lambda entry: entry.predicted_tau, default=None)

    def end_step(self, reader: dict[str, Any], epoch_passes: float) -> None:
        """Count an optimizer step, and how far the epoch has been read after it."""
        self.total += 1
        self.stage_steps += 1
        self.reader = reader
        self.epoch_passes = epoch_passes

    def end_epoch(self) -> None:
        """Go on to the next epoch of the stage."""
        self.epoch += 1
        self.steps_before_epoch = self.stage_steps
        self.reader = None
        self.passes += self.epoch_passes
        self.epoch_passes = 0.0

    def end_stage(self, name: str) -> None:
        """Record the stage as done and go on to the next one."""
        passes = round(self.passes + self.epoch_passes, 3)
        self.stages_done.append(
            StageDone(name=name, steps=self.stage_steps, passes=passes)
        )
        self.stage += 1
        self.stage_steps = 0
        self.epoch = 0
        self.steps_before_epoch = 0
        self.reader = None  # a checkpoint may be of the last step of the stage
        self.passes = 0.0
        self.epoch_passes = 0.0


class Saved(Record, frozen=True, kw_only=True):
    """The record of a checkpoint."""

    MOST: ClassVar[int] = 1 << 24  # bytes: it has all measurements of the run

    schema: Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    signature: str
    settings: dict[str, Any]  # by name, to tell which of them differ
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    dtype: str
    position: Position
    checksum: str = ""  # of the file of tensors

    @property
    def file(self) -> str:
        """The name of the file of tensors; never read from the record itself."""
        return f"step{self.position.total}.safetensors"

    def wrong(self, name: str) -> str | None:
        """Check the part of the position that has no type: the state of the reader."""
        if self.position.reader is None:
            return None
        legs = self.position.reader.get("history", ())
        if not all(map(_is_leg, legs)):
            return "its position is not one of a run"
        return None


def _is_leg(leg: Any) -> bool:
    """Whether this is a leg of an epoch: tokens of a batch, ranks, and batches that each rank read."""
    if not isinstance(leg, list | tuple) or len(leg) != 3:
        return False
    if not all(type(count) is int for count in leg):
        return False
    batch_tokens, ranks, batches = leg
    return bool(batch_tokens > 0 and 0 < ranks <= MOST_RANKS and batches >= 0)


def write(folder: Path, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint, then delete the one before.

    TrainingError when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / saved.file, alone=True) as new:
            save_file(dict(tensors), new)
            saved = replace(saved, checksum=_hash(new))
        with atomic_write(folder / RECORD, alone=True) as new:
            new.write_bytes(seal(saved))
    except (OSError, SafetensorError, StoreError) as error:
        raise TrainingError(
            f"no checkpoint can be written to {folder} ({one_line(error)})"
        ) from None
    for old in folder.glob("step*"):
        if old.name != saved.file:
            with suppress(OSError):
                _delete(old)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class RemoteRun:
    """The checkpoints and logs of a run, copied to another folder or a URL."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        record = folder.with_name(f".{folder.name}.version.json")
        self._mirror = Mirror(
            open_backend(url), folder, record, lambda name: not name.startswith(".")
        )

    def begin(self, signature: str, force: bool = False) -> None:
        """Download the copy if it is further than the local checkpoint; with `force`, it will be replaced.

        TrainingError when the copy is damaged, or of a run with another signature.
        """
        try:
            self._begin(signature, force)
        except StoreError:
            raise _damaged(self.url) from None

    # FileNotFoundError: a newer checkpoint has replaced the one that was being read.
    @retried(on=FileNotFoundError)
    def checkpoint(self) -> Saved | None:
        """The record of the copy, None if there is none; TrainingError when it is damaged."""
        try:
            return self._record_of(self._mirror.remote.latest())
        except StoreError:
            raise _damaged(self.url) from None

    def _record_of(self, version: Version | None) -> Saved | None:
        """The record of the checkpoint in a version of the copy."""
        stored = version.files.get(RECORD) if version else None
        if stored is None:
            return None
        with TemporaryDirectory() as folder:
            self._mirror.remote.download(stored, Path(folder) / RECORD)
            return read(Path(folder))

    @retried(on=FileNotFoundError)
    def _begin(self, signature: str, force: bool) -> None:
        latest = self._mirror.remote.latest()
        if not force:
            remote = self._record_of(latest)
            local = read(self.folder)
            if remote and remote.signature != signature:
                raise TrainingError(
                    f"{self.url} holds the checkpoint of a run with other settings or data: give this "
                    "one a --name of its own, or --force to start over"
                )
            if remote and _is_further(remote, local):
                self._mirror.update()
                return
        self._mirror.adopt(latest)

    def send(self) -> str:
        """Publish the files of the folder; returns why that failed, which is also logged.

        A failure is not final: the next call tries again. TrainingError when another machine has continued
        the run.
        """
        try:
            self._mirror.publish()
        except LostError as error:
            raise TrainingError(
                f"another machine has gone on with this run: it has {self._remote_steps()}, this machine "
                f"{self._local_steps()}; {one_line(error)}"
            ) from None
        except (OSError, StoreError) as error:
            reason = f"no checkpoint can be copied to {self.url} ({one_line(error)})"
            log.warning("%s: the next one is tried again", reason)
            return reason
        return ""

    def _remote_steps(self) -> str:
        latest = self._mirror.remote.latest()
        names = latest.files if latest else ()
        steps = sorted(name for name in names if name.startswith("step"))
        return ", ".join(steps) or "no checkpoint"

    def _local_steps(self) -> str:
        steps = sorted(path.name for path in self.folder.glob("step*"))
        return ", ".join(steps) or "none"


def _is_further(remote: Saved, local: Saved | None) -> bool:
    return local is None or local.position.total < remote.position.total


def read(folder: Path) -> Saved | None:
    """The record of the checkpoint in a folder, None if there is none.

    TrainingError when it is damaged, or of another format.
    """
    file = folder / RECORD
    try:
        return unseal(read_bytes(file), Saved, RECORD)
    except FileNotFoundError:
        return None
    except (OSError, StoreError, ValueError):
        if _is_older(file):
            raise TrainingError(
                f"the checkpoint {file} was written by a development version of vlmdistill: --force "
                "starts the run over"
            ) from None
        raise _damaged(file) from None


class _FormatNumber(Struct):
    format: int


def _is_older(file: Path) -> bool:
    """Whether a record that cannot be read is of an older format."""
    try:
        return decode(read_bytes(file, Saved.MOST), _FormatNumber).format < FORMAT
    except (OSError, ValueError):
        return False


def tensors(
    folder: Path, saved: Saved, expected: Mapping[str, PartEntry]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint: all that the drafter needs, and none that it does not have.

    TrainingError when they are damaged, or of another drafter.
    """
    file = folder / saved.file
    try:
        if _hash(regular(file)) != saved.checksum:
            raise _damaged(file)
        values = load_file(file)
    except (OSError, SafetensorError, ValueError):
        raise _damaged(file) from None
    entries = {
        key: PartEntry(key, tuple(value.shape), value.dtype)
        for key, value in values.items()
    }
    # A weight that has had no gradient yet has neither moments nor steps.
    needed = {key for key in expected if not key.startswith((STEP, *MOMENTS))}
    missing = needed - entries.keys()
    unexpected = [key for key, entry in entries.items() if expected.get(key) != entry]
    if missing or unexpected:
        raise TrainingError(
            f"{file} is not a checkpoint of this drafter: --force starts over"
        )
    return values


def _hash(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _damaged(file: Path | str) -> TrainingError:
    return TrainingError(
        f"the checkpoint {file} is damaged: --force starts the run over"
    )


def where(done: int, planned: int, saved: int) -> str:
    """How many steps of a run are done and saved, as text."""
    progress = f"{done} of {max(planned, done)} steps are done"
    if not saved:
        return f"{progress} and none is saved: the same command starts again"
    kept = "all of them saved" if saved == done else f"the first {saved} of them saved"
    return f"{progress}, {kept}: the same command goes on from there"
