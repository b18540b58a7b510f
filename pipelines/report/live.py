"""The page of a workspace that changes: trainings and evaluations under way, and those that have ended."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmdistill.pipelines.report import selection, trainings
from vlmdistill.pipelines.report.page import GroupView, evaluated, of
from vlmdistill.pipelines.report.results import ServerResult
from vlmdistill.pipelines.report.templates import script_hash
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.schema import content_hash

EVERY = 60.0  # seconds between two looks at a workspace at a URL


@dataclass(frozen=True)
class PageVersion:
    """The page at one moment."""

    html: str
    script: str  # its hash, as a policy names it
    tag: str  # of what it shows


class LiveReport:
    """The page of a workspace, made anew when a file that it shows has changed.

    What is evaluated is drawn again only when there is another evaluation. Threads may share it.
    """

    def __init__(self, workspace: Workspace, where: Sequence[str] = ()) -> None:
        """DataError or StoreError if `where` selects nothing, or has a mistake."""
        self._workspace, self._where = workspace, where
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._seen: tuple[object, object] = (
            None,
            None,
        )  # what the evaluations, and all else, were made of
        self._evaluated: tuple[list[GroupView], list[ServerResult]] = ([], [])
        self._trouble = ""
        self._version: PageVersion | None = None
        if where:
            selection.latest(workspace.reports, workspace.model, where)

    def version(self) -> PageVersion:
        """The page of now."""
        with self._lock:
            self._refresh()
            reports = self._workspace.reports
            ended = _stamp(
                [
                    *reports.glob("*.json"),
                    *reports.glob("served/*.json"),
                    self._workspace.prompts,
                ]
            )
            running = _stamp(
                [*reports.glob(".*.unfinished"), *trainings.files(self._workspace)]
            )
            if self._version is None or self._seen != (ended, running):
                if self._version is None or self._seen[0] != ended:
                    self._evaluate()
                page = replace(
                    of(self._workspace, *self._evaluated),
                    live=True,
                    trouble=self._trouble,
                )
                tag = content_hash([ended, running])
                self._version = PageVersion(page.html, script_hash(page.script), tag)
                self._seen = ended, running
            return self._version

    def _evaluate(self) -> None:
        try:
            self._evaluated = evaluated(self._workspace, self._where)
            self._trouble = ""
        except (DataError, StoreError) as error:  # what was shown stays
            self._trouble = str(error)

    def _refresh(self) -> None:
        """Let a workspace at a URL bring its parts up to date when they are asked for next."""
        if self._workspace.parts and time.monotonic() - self._looked > EVERY:
            self._workspace.close()
            self._looked = time.monotonic()


def _stamp(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What changes when a file does."""
    found = []
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # it is not there, or not any more
            continue
        found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return sorted(found)
