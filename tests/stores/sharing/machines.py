"""Machines that share a store: one of them stops at a request, or loses a reply, and the others go on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vlmdistill.stores.backends.backend import Backend

REQUESTS = (
    "read",
    "read_range",
    "create",
    "replace",
    "list_files",
    "list_names",
    "size",
    "remove",
)


class Line:
    """The requests of one machine, counted; one of them may be stopped or lose its reply."""

    def __init__(self, *watched: Backend) -> None:
        self.count = 0
        self._at: Callable[[int, str], None] = lambda number, moment: None
        self._lock = threading.Lock()
        for there in watched:
            self.watch(there)

    def watch(self, there: Backend) -> None:
        """Count the requests to a backend, too."""
        for name in REQUESTS:
            setattr(there, name, self._counted(getattr(there, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def request(*given: Any) -> Any:
            with self._lock:
                self.count += 1
                number = self.count
            self._at(number, "before")
            result = call(*given)
            self._at(number, "after")
            return result

        return request

    def lose_reply(self, wanted: int) -> None:
        """From now on, the request of this number is done, and its reply is lost."""

        def lost(number: int, moment: str) -> None:
            if number == wanted and moment == "after":
                self.count += 10**6  # once
                raise ConnectionError("the reply was lost")

        self.count, self._at = 0, lost

    @contextmanager
    def asleep(
        self, work: Callable[[], None], wanted: int, moment: str
    ) -> Iterator[bool]:
        """`work` runs until a request, and goes on at the end; whether it has such a request."""
        reached, go_on, errors = (
            threading.Event(),
            threading.Event(),
            list[BaseException](),
        )

        def sleep(number: int, now: str) -> None:
            if (number, now) == (wanted, moment):
                reached.set()
                go_on.wait(60)

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001
                errors.append(error)
            finally:
                reached.set()

        self.count, self._at = 0, sleep
        thread = threading.Thread(target=run)
        thread.start()
        assert reached.wait(60)
        slept = thread.is_alive()
        try:
            yield slept
        finally:
            go_on.set()
            thread.join(60)
            self._at = lambda number, moment: None
        if errors:
            raise errors[0]
