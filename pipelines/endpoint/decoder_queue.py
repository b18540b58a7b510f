"""One decoder for several clients: requests wait in a bounded queue, and one at a time is decoded."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


class QueueFullError(Exception):
    """As many requests wait as are allowed to."""


class DecoderQueue:
    """Runs generators in one thread, first come, first served. `limit` of them may wait."""

    def __init__(self, limit: int) -> None:
        self.limit, self.waiting = limit, 0
        self.turn = asyncio.Lock()  # held while a generator runs; asyncio's lock is fair
        self._thread = ThreadPoolExecutor(1, "decoder")

    async def stream(
        self, items: Generator[Item], abandoned: threading.Event | None = None
    ) -> AsyncGenerator[Item]:
        """The items of a generator that runs in the decoder's thread; QueueFullError when too many wait.

        The generator does not wait for a slow reader. It is closed after its current step when the reader
        closes this stream or is cancelled; a reader that still waits for its turn gives it up. `abandoned` is
        set then, for a generator that works for long without an item.
        """
        if self.turn.locked() and self.waiting >= self.limit:
            raise QueueFullError
        self.waiting += 1
        try:
            await self.turn.acquire()
        finally:
            self.waiting -= 1
        loop, abandoned = asyncio.get_running_loop(), abandoned or threading.Event()
        arrived: asyncio.Queue[Item | None] = asyncio.Queue()

        def work() -> None:
            try:
                for item in items:
                    if abandoned.is_set():
                        break
                    loop.call_soon_threadsafe(arrived.put_nowait, item)
            finally:
                items.close()
                loop.call_soon_threadsafe(self.turn.release)
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        done = loop.run_in_executor(self._thread, work)
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the reader may be gone
        try:
            while (item := await arrived.get()) is not None:
                yield item
            await done  # raises what the generator raised
        finally:
            abandoned.set()
