"""What the operations on tensors are, and a clock that counts them instead of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells every operation on a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def tell(self, func: Any, args: Sequence[Any]) -> None:
        """An operation begins."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.tell(func, args)
        return func(*args, **(kwargs or {}))


class Ticks(Operations):  # type: ignore[no-untyped-call]
    """Advances by one second at every operation on a tensor, and at nothing else."""

    now = 0

    def tell(self, func: Any, args: Sequence[Any]) -> None:
        self.now += 1

    def thread_time(self) -> float:
        return float(self.now)

    def process_time(self) -> float:
        return self.thread_time()

    def ready_seconds(self) -> float:
        """Of the thread, without a CPU."""
        return self.now - self.thread_time()

    def perf_counter(self) -> float:
        return float(self.now)

    def time(self) -> float:
        return float(self.now)
