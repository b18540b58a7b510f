"""The workspace of one target.

runs/<model>/prompts.parquet    imported prompts (prompts.skipped.jsonl: rows that were skipped)
             responses/         the target's responses
             features/          the feature store
             drafters/<name>/   trained drafters
             reports/           evaluations (of servers in served/) and the report
             served/            what `eval --engine vllm` exports, and the logs of its servers
             traffic/           the audit of harvests; harvested/ has their images
             staging/           files that a running command needs for a while; see `Workspace.staging`

`runs` may be a URL; see `parts`.
"""

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlmdistill.pipelines.media.urls import copy_of, is_url
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.fingerprint import config_hash
from vlmdistill.pipelines.targets.checkpoints.registry import hub_id
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace.parts import Parts, Publishing, parts, parts_of
from vlmdistill.stores.backends.backend import STAGING, writing
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.locks import locked
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import (
    DataError,
    StoppedError,
    VlmdistillError,
    lone_surrogate,
)
from vlmdistill.stores.lease import leased
from vlmdistill.stores.store import require_room

log = logging.getLogger("vlmdistill.pipelines")
MODEL_VARIABLE = "VLMDISTILL_MODEL"
RUNS_VARIABLE = "VLMDISTILL_RUNS"
NO_DRAFTER = (".rounds", ".adapt")
"""Ends of the names of folders that `adapt` keeps beside drafters."""
MOST_NAMED = 3  # workspaces in a line
NAME = re.compile(r"\w[\w.-]*")
"""The name of a drafter or an evaluation: that of a file, never a path into another folder."""


@dataclass(frozen=True)
class Workspace:
    """The folder of one target. It is created by the first command that writes into it."""

    model: str
    root: Path
    parts: Parts | None = None  # of a workspace at a URL, which `root` is a copy of

    @classmethod
    def of(
        cls, model: str | None = None, runs: str | Path | None = None
    ) -> "Workspace":
        """The workspace of a target: a name, a hub id, or a checkpoint folder, whose name is used.

        `model` is `default_model()` by default. `runs` is a folder or a URL; it defaults to the variable
        VLMDISTILL_RUNS, then to `runs` here. TargetError if there is neither a target nor a workspace of that
        name. DataError if the workspace is that of another embedded target, by its old name.
        """
        if model is None:
            model = default_model()
        if not model:
            raise DataError(
                "--model is empty: give a name, a hub id or a checkpoint folder"
            )
        runs = str(runs or os.environ.get(RUNS_VARIABLE) or "runs")
        if re.match(r"\w+:/[^/]", runs):  # a Path of a URL has lost a slash
            raise DataError(
                f"--runs {runs}: a URL has two slashes, as in s3://bucket/runs, and is no Path"
            )
        # A variable within the URL may have been empty.
        url = re.sub(r"(?<![:/])/+", "/", runs.rstrip("/"))
        backend = (
            open_backend(runs) if "://" in runs else Local(Path(runs).expanduser())
        )
        is_local = isinstance(backend, Local)
        if not is_local and not is_url(url):
            raise DataError(
                f"--runs {url} is not a writable URL: give a folder, s3://, gs:// or az://"
            )
        base = backend.root if isinstance(backend, Local) else copy_of(url)
        folder = checkpoint_folder(model)
        for path in (str(base.absolute()), str(folder or model)):
            if lone_surrogate(path):  # neither records nor messages can hold it
                raise DataError(f"the name of {path!a} is not UTF-8: rename it")
        name = folder.name if folder else model.strip("/").replace("/", "--")
        if folder is None and model not in (*EMBEDDED, packaged.NAME):
            existing = backend.list_names("")
            if name not in existing:
                hub_id(model, existing)
        if model in EMBEDDED:
            _check_name(model, base / name)
        parts_at_url = None if is_local else parts(f"{url}/{name}")
        return cls(model, base / name, parts_at_url)

    @property
    def prompts(self) -> Path:
        """The imported prompts, one Parquet file."""
        return self._part("prompts", "prompts.parquet")

    @property
    def responses(self) -> Path:
        """The target's responses, a folder of Parquet files."""
        return self._part("responses")

    @property
    def features(self) -> str:
        """The folder or URL of the feature store."""
        if self.parts:
            return f"{self.parts.url}/features"
        return str(self.root / "features")

    @property
    def reports(self) -> Path:
        """The evaluations, and the report on them."""
        return self._part("reports")

    @property
    def traffic(self) -> Path:
        """The audit of harvests."""
        return self._part("traffic")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder for a while, which `forget` removes if this process is killed."""
        backend = Local(self.root)
        folder = backend.workspace()
        try:
            yield folder
        finally:
            backend.release(folder)

    def clear_staging(self) -> list[Path]:
        """Remove the `staging` folders of killed processes; the folders of processes that still run.

        Also those of a feature store, which may have no record yet.
        """
        in_use = list[Path]()
        for backend in (Local(self.root), Local(self.root / "features")):
            for leaf in backend.list_names(STAGING):
                name = f"{STAGING}/{leaf}"
                folder = backend.root / name
                with backend.try_lock(name) as has_ended:
                    if has_ended:
                        backend.remove(name)
                    elif folder.exists():
                        in_use.append(folder)
        return in_use

    def rounds(self, name: str, again: bool = False) -> Path:
        """The records of a drafter's rounds; see `versions`. `again`: fetch those of other machines."""
        self.drafter(name)  # DataError if that cannot be a name
        if again and self.parts:
            self.parts.fetch(f"drafters/{name}.rounds", again=True)
        return self._part(f"drafters/{name}.rounds")

    def checkpoints(self, name: str) -> str | None:
        """The URL that gets the checkpoints of a drafter's training; None for a local workspace."""
        return f"{self.parts.url}/drafters/{name}.training" if self.parts else None

    def _part(self, part: str, name: str = "") -> Path:
        """Path within a part; the part is downloaded on first access."""
        if self.parts:
            self.parts.fetch(part)
        return self.root / (name or part)

    def beside(self) -> str:
        """The workspaces beside this one, in a line, if it is empty and local; else an empty text.

        Or that their folder does not exist.
        """
        if self.parts or _holds_work(self.root):
            return ""
        runs = self.root.parent
        if not runs.is_dir():
            return f"there is no folder {runs.absolute()}: give --runs, or change to its folder"
        folders = sorted(
            folder for folder in self.root.parent.iterdir() if _holds_work(folder)
        )
        lines = list[str]()
        for folder in folders[:MOST_NAMED]:
            other = Workspace(folder.name, folder)
            lines.append(f"{other.root} {other._contents()}: --model {other.model}")
        return ", ".join(lines)

    def _contents(self) -> str:
        names = ", ".join(self.drafters())
        return f"has {names}" if names else "is not empty"

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> None:
        exit_code = getattr(error, "code", 1)  # of a SystemExit
        failed = error is not None and exit_code not in (0, None)
        try:
            self.close()
        except VlmdistillError as unsent:
            if not failed:
                raise
            log.warning("%s", unsent)  # the error of the command itself comes after it
        except KeyboardInterrupt:
            unpublished = "not all was published in the workspace; the next command with this --runs does"
            raise StoppedError(unpublished, signal.SIGINT) from None

    def close(self) -> None:
        """Publish what is new, if the workspace is at a URL; see `Parts.close`."""
        if self.parts:
            self.parts.close()

    def drafter(self, name: str) -> Path:
        """The folder of one trained drafter; DataError if that cannot be its name."""
        if not NAME.fullmatch(name):
            raise DataError(
                f"invalid drafter name '{name}': use letters, digits, '_', '.' and '-'"
            )
        return self._part(f"drafters/{name}")

    def drafters(self) -> list[str]:
        """The names of the drafters that are trained, or whose training has begun."""
        backend = self.parts.remote if self.parts else Local(self.root)
        folders = backend.list_names("drafters")
        names = {folder.removesuffix(".training") for folder in folders}
        return sorted(
            name
            for name in names
            if NAME.fullmatch(name) and not name.endswith(NO_DRAFTER)
        )

    def trained(self, drafter: str) -> Path:
        """The folder of a drafter, given by its name in this workspace or by a path."""
        path = Path(drafter).expanduser()
        if "/" in drafter and not path.is_dir():
            raise DataError(
                f"there is no folder {drafter}: give the name of a drafter, or its folder"
            )
        is_name = NAME.fullmatch(drafter) and self.drafter(drafter).is_dir()
        if path.is_dir() and not is_name:
            return path
        return self.drafter(drafter)


def default_model() -> str:
    """The target of a command without `--model`: the variable VLMDISTILL_MODEL, else `demo`."""
    return os.environ.get(MODEL_VARIABLE) or "demo"


def absolute_model(model: str) -> str:
    """The model with a local folder as an absolute path, which another process finds too."""
    folder = checkpoint_folder(model)
    return str(folder) if folder else model


def checkpoint_folder(model: str) -> Path | None:
    """The local folder of a model; None for a name, even if a folder of that name exists here."""
    path = Path(model).expanduser()
    is_name = path.name == model and not (path / "config.json").is_file()
    return path.resolve() if path.is_dir() and not is_name else None


def lock_file(folder: Path) -> Path:
    """The file by which processes of this machine lock a folder or file."""
    return folder.parent / f".{folder.name}.lock"


def being_written(folder: Path) -> DataError:
    """The error of a folder whose lock another run holds."""
    return DataError(
        f"another run is writing to {folder}: wait until it ends, or stop it"
    )


@contextmanager
def only_writer(where: str | Path, wait: bool = False) -> Iterator[Publishing]:
    """Lock a folder, or a store at a URL, until this process ends; DataError if another run holds the lock.

    So two runs never do the same work; with `wait`, this one waits for the other. The lock file lies next to
    the folder. In a workspace at a URL, other machines are locked out, too; the folder is updated first, and
    published at the end.
    """
    if is_url(where):
        store = open_backend(str(where))
        require_room(store)
        with ExitStack() as stack:
            with writing(store):
                stack.enter_context(leased(store, f"{STAGING}/writer", wait))
            yield Publishing()
        return
    folder = Path(where)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock_file(folder), wait))
        except BlockingIOError:
            raise being_written(folder) from None
        at_url = parts_of(folder)
        part = at_url.part_of(folder) if at_url else None
        if at_url is None or part is None:
            yield Publishing()
            return
        yield stack.enter_context(at_url.writing(part, wait))


def _check_name(model: str, root: Path) -> None:
    """DataError if a workspace was filled when `model` was the name of another embedded target."""
    other_targets = {
        config_hash(folder): name for name, folder in EMBEDDED.items() if name != model
    }
    for pattern in ("features/store.json", "drafters/*/config.json"):
        for file in root.glob(pattern):
            recorded_hash = _config_hash_in(file)
            if recorded_hash in other_targets:
                name = other_targets[recorded_hash]
                raise DataError(
                    f"{root} is a workspace of the target that is now called {name}: rename the folder to "
                    f"{root.with_name(name)}, or give another --runs"
                )


def _config_hash_in(record: Path) -> str | None:
    """The target's config hash in the record of a store or a drafter; None in a damaged one."""
    try:
        provenance = json.loads(record.read_bytes())["provenance"]
        return str(provenance["config_hash"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _holds_work(root: Path) -> bool:
    """Whether a workspace has prompts, features or drafters."""
    files = ("prompts.parquet", "features/store.json", "drafters/*/config.json")
    return any(next(root.glob(file), None) is not None for file in files)
