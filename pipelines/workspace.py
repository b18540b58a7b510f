"""The workspace of one target.

runs/<model>/prompts.parquet    imported prompts (prompts.skipped.jsonl: rows that were skipped)
             responses/         the target's responses
             features/          the feature store
             drafters/<name>/   trained drafters
             reports/           evaluations, those of servers in served/, and the report
             served/            what `eval --engine vllm` exports, and the logs of its servers
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmdistill.pipelines.targets.checkpoints.registry import hub_id
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.stores.backends.local import sync
from vlmdistill.stores.errors import DataError, lone_surrogate

RUNS_VARIABLE = "VLMDISTILL_RUNS"
NAME = re.compile(r"\w[\w.-]*")  # of a drafter or an evaluation: a file, never in another folder


@dataclass(frozen=True)
class Workspace:
    """The folder of one target. It is created by the first command that writes into it."""

    model: str
    root: Path

    @classmethod
    def of(cls, model: str, runs: Path | None = None) -> "Workspace":
        """The workspace of a target: a name, a hub id, or a checkpoint folder, whose name is used.

        `runs` defaults to the variable VLMDISTILL_RUNS, then to `runs` in the current folder. TargetError if
        there is neither a target nor a workspace of that name.
        """
        if not model:
            raise DataError("--model is empty: give a name, a hub id or a checkpoint folder")
        base = (runs or Path(os.environ.get(RUNS_VARIABLE) or "runs")).expanduser()
        if str(base).partition("/")[0].endswith(":"):
            url = str(base).replace(":/", "://", 1)
            raise DataError(f"--runs {url}: give a folder; --store and --checkpoints take URLs")
        folder = checkpoint_folder(model)
        for path in (str(base.absolute()), str(folder or model)):
            if lone_surrogate(path):  # neither records nor messages take it
                raise DataError(f"the name of {path!a} is not UTF-8: rename it")
        name = folder.name if folder else model.strip("/").replace("/", "--")
        if folder is None and model not in EMBEDDED and not (base / name).is_dir():
            hub_id(model, (path.name for path in base.glob("*/")))
        return cls(model, base / name)

    @property
    def prompts(self) -> Path:
        """The imported prompts, one Parquet file."""
        return self.root / "prompts.parquet"

    @property
    def responses(self) -> Path:
        """The target's responses, a folder of Parquet files."""
        return self.root / "responses"

    @property
    def features(self) -> Path:
        """The feature store."""
        return self.root / "features"

    @property
    def reports(self) -> Path:
        """The evaluations, and the report on them."""
        return self.root / "reports"

    def drafter(self, name: str) -> Path:
        """The folder of one trained drafter; DataError if that cannot be its name."""
        if not NAME.fullmatch(name):
            raise DataError(f"'{name}' is no drafter's name: use letters, digits, '_', '.' and '-'")
        return self.root / "drafters" / name

    def trained(self, drafter: str) -> Path:
        """The folder of a drafter, given by its name in this workspace or by a path."""
        path = Path(drafter).expanduser()
        if "/" in drafter and not path.is_dir():
            raise DataError(f"there is no folder {drafter}: give the name of a drafter, or its folder")
        named = NAME.fullmatch(drafter) and self.drafter(drafter).is_dir()
        return path if path.is_dir() and not named else self.drafter(drafter)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: the yielded temporary path is synced and renamed to `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def absolute_model(model: str) -> str:
    """The model with a local folder as an absolute path, which another process finds too."""
    folder = checkpoint_folder(model)
    return str(folder) if folder else model


def checkpoint_folder(model: str) -> Path | None:
    """The local folder of a model; None for a name, even if a folder of that name exists here."""
    path = Path(model).expanduser()
    named = path.name == model and not (path / "config.json").is_file()
    return path.resolve() if path.is_dir() and not named else None


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock `folder` until this process ends; DataError if another run holds the lock.

    It prevents that two runs pay for the same work. The lock file lies next to the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another run is writing to {folder}: wait until it ends, or stop it") from None
        yield
