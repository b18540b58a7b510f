"""A clock that counts work instead of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ticks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Advances by one second at every operation on a tensor, and at nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.now += 1
        return func(*args, **(kwargs or {}))

    def thread_time(self) -> float:
        return float(self.now)

    def perf_counter(self) -> float:
        return float(self.now)
