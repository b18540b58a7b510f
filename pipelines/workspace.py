"""Where everything about one target lives: `runs/<model>/`.

runs/<model>/prompts.parquet    what to ask (prompts.skipped.jsonl: what could not be imported)
             responses/         what the target answered
             features/          the store of hidden states
             drafters/<name>/   trained drafters
             reports/           evaluations
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vlmdistill.stores.errors import DataError

RUNS_VARIABLE = "VLMDISTILL_RUNS"


@dataclass(frozen=True)
class Workspace:
    """The folder of one target; nothing is created before something is written into it."""

    model: str
    root: Path

    @classmethod
    def of(cls, model: str, runs: Path | None = None) -> "Workspace":
        """The workspace of a target given by name, hub id or local folder (whose own name is used).

        `runs` defaults to the variable VLMDISTILL_RUNS, then to `runs` in the current folder.
        """
        if not model:
            raise DataError("the model's name is empty: give a name, a hub id or a checkpoint folder")
        base = (runs or Path(os.environ.get(RUNS_VARIABLE) or "runs")).expanduser()
        folder = checkpoint_folder(model)
        name = folder.name if folder else model.strip("/").replace("/", "--")
        return cls(model, base / name)

    @property
    def prompts(self) -> Path:
        """The imported prompts, one Parquet file."""
        return self.root / "prompts.parquet"

    @property
    def responses(self) -> Path:
        """The target's answers, a folder of Parquet parts."""
        return self.root / "responses"

    @property
    def features(self) -> Path:
        """The feature store."""
        return self.root / "features"

    @property
    def reports(self) -> Path:
        """Evaluations and the page made of them."""
        return self.root / "reports"

    def drafter(self, name: str) -> Path:
        """The folder of one trained drafter."""
        return self.root / "drafters" / name

    def trained(self, drafter: str) -> Path:
        """The folder of a drafter given by its name here, or by a folder anywhere."""
        return Path(drafter) if Path(drafter).is_dir() else self.drafter(drafter)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Write to the path this yields: it becomes `path` at the end, whole and on disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        aside.unlink(missing_ok=True)


def absolute(model: str) -> str:
    """A model as another process finds it: a local folder by its absolute path, else as it is."""
    folder = checkpoint_folder(model)
    return str(folder) if folder else model


def checkpoint_folder(model: str) -> Path | None:
    """The local folder that a model is; None for a name, even where its workspace lies here."""
    path = Path(model).expanduser()
    named = path.name == model and not (path / "config.json").is_file()
    return path.resolve() if path.is_dir() and not named else None


def _lock_file(folder: Path, what: str) -> IO[str]:
    """A lock beside the folder, not in it: what the folder holds is for its owner to say."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return (folder.parent / f".{folder.name}.{what}").open("w")


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` for one run, as long as the process lives; DataError when another run holds it."""
    with _lock_file(folder, "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another run is writing to {folder}: wait for it to end, or stop it") from None
        yield


def working_in(folder: Path) -> IO[str]:
    """Say that this process writes into `folder`, until it closes the file or ends."""
    file = _lock_file(folder, "workers")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def wait_for_workers(folder: Path, seconds: float = 60) -> None:
    """Wait until no worker of an earlier, killed run writes into `folder` any more.

    A worker outlives its killed driver by some seconds; planning before it has ended would give
    its unit out again.
    """
    end = time.monotonic() + seconds
    with _lock_file(folder, "workers") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DataError(
                        f"workers of an earlier run still write to {folder}: end them, then try again"
                    ) from None
                time.sleep(0.2)
            else:
                return
