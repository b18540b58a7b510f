"""How many operations of torch a piece of code does."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
