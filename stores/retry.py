"""Trying again what may succeed on another attempt, such as a race that another process has won."""

import functools
import random
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vlmdistill.stores.errors import RacedError

TIMES = 9
P = ParamSpec("P")
T = TypeVar("T")


def retried(
    times: int = TIMES,
    on: type[BaseException] | tuple[type[BaseException], ...] = RacedError,
    wait: float = 0,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: while it raises one of `on`, call it again, up to `times` times in all.

    The last error is raised. `wait` seconds precede the second call, twice as many each further one, and up
    to as many more at random, so that processes that have met do not meet again.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> T:
            for attempt in range(times - 1):
                try:
                    return function(*given, **named)
                except on:
                    time.sleep(wait * 2**attempt * random.uniform(1, 2))
            return function(*given, **named)

        return call

    return decorate
