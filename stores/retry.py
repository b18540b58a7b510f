"""Trying again after an error that another attempt may not meet, such as a lost race."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vlmdistill.stores.errors import RacedError

TIMES = 9
P = ParamSpec("P")
T = TypeVar("T")


def retried(
    times: int = TIMES, on: type[BaseException] = RacedError
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: while it raises one of `on`, call it again, up to `times` times in all.

    The last error is raised.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for _ in range(times - 1):
                with contextlib.suppress(on):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorate
