"""Checkpoints of an unfinished run, from which any number of ranks can continue.

    <run>.training/checkpoint.json      position and settings of the run; sealed, written last
                   step<N>.safetensors  weights, Adam's moments and steps, buffers; see `deepspeed_engine`
                   metrics.jsonl        figures of each step and validation; see `progress`

A copy, in another folder or at a URL, is a part with versions (see `stores.sharing.mirror`): of two machines
that go on from the same version, the second one is told so and changes nothing.

Rank 0 writes it; the others get it from the rank that has it. Nothing in it can run code, and all of it is
checked before use: a checkpoint may come from someone else.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

from blake3 import blake3
from msgspec import Meta
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmdistill.drafters.training.deepspeed_engine import MOMENTS, STEP, PartEntry
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import LostError, StoreError, TrainingError, one_line
from vlmdistill.stores.input_files import read_bytes, regular
from vlmdistill.stores.manifest import Record, seal, unseal
from vlmdistill.stores.retry import retried
from vlmdistill.stores.schema import SCHEMA_VERSION
from vlmdistill.stores.sharing.mirror import Mirror

log = logging.getLogger(__name__)
RECORD = "checkpoint.json"
RANKS = 2**16  # the most that a run may have had

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measurement on held-out samples."""

    stage: str
    step: Count
    held_out_agreement: list[
        float
    ]  # by hop, the share of rows whose best token is the target's
    predicted_tau: float = 0.0  # of a chain as long as the drafter's tree is deep


@dataclass(frozen=True, kw_only=True)
class StageDone:
    """A stage that a run has done."""

    name: str
    steps: Count  # of the optimizer
    passes: float  # over the samples of the run: those that it read, a sample as often as it was read


@dataclass
class Position:
    """How far a run has come."""

    stage: Count = 0
    epoch: Count = 0
    taken: Count = 0  # optimizer steps of the stage
    begun: Count = 0  # of those, done when the epoch began
    total: Count = 0  # optimizer steps done in all
    reader: dict[str, Any] | None = (
        None  # how far the epoch has been read, see `Epoch.state`
    )
    passes: float = 0.0  # of the stage, of the epochs before this one, see `StageDone`
    part: float = 0.0  # of this epoch
    done: list[StageDone] = field(default_factory=list)
    history: list[HeldOut] = field(default_factory=list)

    @property
    def best(self) -> HeldOut | None:
        """The measurement with the highest predicted tau, the first of equal ones."""
        return max(self.history, key=lambda one: one.predicted_tau, default=None)


class Saved(Record, frozen=True, kw_only=True):
    """The record of a checkpoint."""

    MOST: ClassVar[int] = 1 << 24  # bytes: it has all measurements of the run

    schema: Annotated[int, Meta(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    format: Literal[1] = 1
    signature: str
    settings: dict[str, Any]  # by name, to tell which of them differ
    ranks: Annotated[int, Meta(ge=1, le=RANKS)]
    dtype: str
    position: Position
    checksum: str = ""  # of the tensors' file

    @property
    def file(self) -> str:
        """The name of its tensors' file: never taken from the record itself."""
        return f"step{self.position.total}.safetensors"

    def wrong(self, name: str) -> str | None:
        """Check the part of the position that has no type: the reader."""
        legs = (
            self.position.reader.get("history", ())
            if self.position.reader is not None
            else ()
        )
        return None if all(map(_is_leg, legs)) else "its position is not one of a run"


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
                shutil.rmtree(
                    old
                ) if old.is_dir() and not old.is_symlink() else old.unlink()


class RemoteRun:
    """The checkpoints and logs of a run, published to another folder or a URL."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        record = folder.with_name(f".{folder.name}.version.json")
        self._copy = Mirror(
            open_backend(url), folder, record, lambda name: not name.startswith(".")
        )

    def begin(self, signature: str, force: bool = False) -> None:
        """Take over the copy if it is further than the checkpoint here; with `force`, it will be replaced.

        TrainingError when it is of a run of another signature, or damaged.
        """
        try:
            self._begin(signature, force)
        except StoreError:
            raise _damaged(self.url) from None

    @retried(
        on=FileNotFoundError
    )  # a newer checkpoint has replaced the one that was being read
    def _begin(self, signature: str, force: bool) -> None:
        latest = self._copy.remote.latest()
        stored = latest.files.get(RECORD) if latest else None
        there = None
        if stored and not force:
            with TemporaryDirectory() as aside:
                self._copy.remote.download(stored, Path(aside) / RECORD)
                there = read(Path(aside))
            here = read(self.folder)
            if there and there.signature != signature:
                raise TrainingError(
                    f"{self.url} holds the checkpoint of a run with other settings or data: give this "
                    "one a --name of its own, or --force to start over"
                )
            if there and (here is None or here.position.total < there.position.total):
                self._copy.update()
                return
        self._copy.adopt(latest)

    def send(self) -> str:
        """Publish what is in the folder; why that failed, which is also logged: the next one tries again.

        TrainingError when another machine has gone on with the run.
        """
        try:
            self._copy.publish()
        except LostError as error:
            latest = self._copy.remote.latest()
            theirs = sorted(
                name
                for name in (latest.files if latest else ())
                if name.startswith("step")
            )
            mine = sorted(path.name for path in self.folder.glob("step*"))
            raise TrainingError(
                f"another machine has gone on with this run: it has {', '.join(theirs) or 'no checkpoint'}, "
                f"this machine {', '.join(mine) or 'none'}; {one_line(error)}"
            ) from None
        except (OSError, StoreError) as error:
            why = f"no checkpoint can be copied to {self.url} ({one_line(error)})"
            log.warning("%s: the next one is tried again", why)
            return why
        return ""


def read(folder: Path) -> Saved | None:
    """The record of the checkpoint in a folder, if any; TrainingError when it is damaged."""
    file = folder / RECORD
    try:
        return unseal(read_bytes(file), Saved, RECORD)
    except FileNotFoundError:
        return None
    except (OSError, StoreError, ValueError):
        raise _damaged(file) from None


def tensors(
    folder: Path, saved: Saved, expected: Mapping[str, PartEntry]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint: all that a drafter needs, and none that it does not have.

    TrainingError when they are damaged, or of another drafter.
    """
    file = folder / saved.file
    try:
        if _hash(regular(file)) != saved.checksum:
            raise _damaged(file)
        values = load_file(file)
    except (OSError, SafetensorError, ValueError):
        raise _damaged(file) from None
    found = {
        key: PartEntry(key, tuple(value.shape), value.dtype)
        for key, value in values.items()
    }
    needed = {key for key in expected if not key.startswith((STEP, *MOMENTS))}
    if needed - set(found) or any(
        expected.get(key) != entry for key, entry in found.items()
    ):
        raise TrainingError(
            f"{file} is not a checkpoint of this drafter: --force starts over"
        )
    return values


def _is_leg(leg: Any) -> bool:
    """A part of an epoch: the tokens of a batch, the ranks, and the batches that each rank took."""
    counts = (
        isinstance(leg, list | tuple)
        and len(leg) == 3
        and all(type(one) is int for one in leg)
    )
    return counts and leg[0] > 0 and 0 < leg[1] <= RANKS and leg[2] >= 0


def _hash(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _damaged(file: Path | str) -> TrainingError:
    return TrainingError(
        f"the checkpoint {file} is damaged: --force starts the run over"
    )


def where(done: int, planned: int, saved: int) -> str:
    """How many steps of a run are done and saved, as text."""
    now = f"{done} of {max(planned, done)} steps are done"
    if not saved:
        return f"{now} and none is saved: the same command starts again"
    kept = "all of them saved" if saved == done else f"the first {saved} of them saved"
    return f"{now}, {kept}: the same command goes on from there"
