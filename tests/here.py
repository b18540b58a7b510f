"""Workers in this process, for tests that are not about Ray: they load a target in no time, and miss nothing.

A worker's process imports torch and transformers first, some seconds of a core. That processes start, die and
are replaced is tested in tests/pipelines/cluster and by the tests that kill a command.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from vlmdistill.pipelines.cluster import session as cluster
from vlmdistill.pipelines.cluster.queue import TaskDone
from vlmdistill.pipelines.data.features import capturer
from vlmdistill.pipelines.data.responses import responder


class Here:
    """The workers' pool without processes: one worker, in this one."""

    def __init__(self, make: Callable[[], Any], check: Callable[[], None], *_: Any, **__: Any) -> None:
        check()
        self._worker = make()

    def __class_getitem__(cls, item: Any) -> type["Here"]:
        return cls

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def facts(self) -> Any:
        return self._worker.facts()

    def run(self, tasks: Iterable[Any]) -> Iterator[TaskDone[Any, Any]]:
        for task in tasks:
            result = self._worker.work(task)
            yield TaskDone(task, result, dict(result.failed))


@contextmanager
def workers_here() -> Iterator[None]:
    """While it lasts, responses and features are made in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for stage in (responder, capturer):
            patch.setattr(stage, "ActorPool", Here)
        for opens in (responder, capturer, cluster):
            patch.setattr(opens, "session", nullcontext)
        yield
