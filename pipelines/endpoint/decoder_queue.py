"""One decoder for several clients: requests wait in a bounded queue, and one at a time is decoded."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar

from vlmdistill.stores.errors import without_panics

Item = TypeVar("Item")


class QueueFullError(Exception):
    """The queue has as many waiting requests as it may have."""


class QueueClosedError(Exception):
    """The queue is closed: no request begins any more, or a running one has not ended in time."""


class DecoderQueue:
    """Runs generators in a decoder's thread, first come, first served. `limit` of them may wait."""

    def __init__(self, limit: int, thread: Executor) -> None:
        self.limit = limit
        self.turn = asyncio.Lock()
        """Held while a generator runs; asyncio's lock is fair."""
        self._thread = thread
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Queue[Any]] = set()

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return len(self._waiting)

    def close(self) -> None:
        """Begin no more requests: those that wait, and later ones, get QueueClosedError."""
        self._closed.set()
        for task in self._waiting:
            task.cancel()

    def give_up(self) -> None:
        """End the running request with QueueClosedError; its generator is closed after its current step."""
        for arrived in self._running:
            arrived.put_nowait(QueueClosedError())

    async def stream(
        self, items: Generator[Item], abandoned: threading.Event | None = None
    ) -> AsyncGenerator[Item]:
        """The items of a generator that runs in the decoder's thread.

        The generator does not wait for a slow reader. It is closed after its current step when the reader
        closes this stream or is cancelled; a reader that still waits for its turn gives it up. `abandoned` is
        set then, for a generator that works for long without an item.

        Raises:
            QueueFullError: Too many requests wait.
            QueueClosedError: After `close` or `give_up`.
        """
        if self.turn.locked() and self.waiting >= self.limit:
            raise QueueFullError
        await self._take_turn()
        loop = asyncio.get_running_loop()
        if abandoned is None:
            abandoned = threading.Event()
        arrived: asyncio.Queue[Item | QueueClosedError | None] = asyncio.Queue()

        def work() -> None:
            try:
                with without_panics():
                    for item in items:
                        if abandoned.is_set():
                            break
                        loop.call_soon_threadsafe(arrived.put_nowait, item)
            finally:
                items.close()
                loop.call_soon_threadsafe(self.turn.release)
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        done = loop.run_in_executor(self._thread, work)
        # The reader may be gone: an exception is looked up here, else asyncio logs it.
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._running.add(arrived)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, QueueClosedError):
                    raise item
                yield item
            await done  # raises what the generator raised
        finally:
            self._running.discard(arrived)
            abandoned.set()

    async def _take_turn(self) -> None:
        """Wait for the lock, which is then held."""
        if self._closed.is_set():
            raise QueueClosedError
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            await self.turn.acquire()
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            task.uncancel()
            raise QueueClosedError from None
        finally:
            self._waiting.discard(task)
