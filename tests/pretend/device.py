"""A pretend GPU: its tensors say that they are on `cuda:0` and compute on the CPU.

`tests.pretend.process` makes a process one that has it. What it sees, as a GPU would or more strictly:
operands of two devices (`MixedDevicesError`), a CPU tensor that is indexed by a GPU tensor, `numpy()` and
`pin_memory()` of a GPU tensor, and every operation for which the CPU waits until the GPU has come so far
(`waits`): values read, results whose size hangs on values, and copies that are not both pinned and
non-blocking.

What it cannot see: which kernel attention takes, CUDA graphs, streams and the order of their work, time and
memory, for which device a generator is, and copies inside a kernel. `inference_mode` is `no_grad`.
DeepSpeed replaces the data of weights, which these tensors do not allow: it does not run here.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = f"{Path(__file__).parents[2] / 'src' / 'vlmdistill'}/"
SIZED_BY_VALUES = (
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
"""Operations whose result has a size that the GPU must tell first."""
INDEXING = (
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
)
"""Operations that take CPU tensors as indices of a GPU tensor, and copy them."""
ON_THE_HOST = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "_has_compatible_shallow_copy_type",
)
"""Operations whose result is a number of Python's."""
plain_to, plain_tensor, plain_new_tensor = (
    torch.Tensor.to,
    torch.tensor,
    torch.Tensor.new_tensor,
)
plain_generator = torch.Generator


class MixedDevicesError(RuntimeError):
    """An operation on tensors of two devices."""


@dataclass(frozen=True)
class Wait:
    """What waits for the GPU, and the nearest line of the project that asks for it."""

    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.line}"


@dataclass
class Waits:
    """The waits of some work, by where they come from."""

    times: Counter[Wait] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.times.total()

    def __str__(self) -> str:
        return "\n".join(
            f"{count:5} {wait}" for wait, count in self.times.most_common()
        )

    def at(self, file: str) -> int:
        """Those of one file of the project, as `drafters/core/losses.py`."""
        return sum(
            count
            for wait, count in self.times.items()
            if wait.line.startswith(f"{file}:")
        )


_open: list[Waits] = []
_pinned: dict[int, StorageWeakRef] = {}


@contextmanager
def waits() -> Iterator[Waits]:
    """The waits while it is open."""
    counted = Waits()
    _open.append(counted)
    try:
        yield counted
    finally:
        _open[:] = [one for one in _open if one is not counted]


def wait(operation: str) -> None:
    """The CPU waits for the GPU."""
    if _open:
        cause = Wait(operation, _line())
        for counted in _open:
            counted.times[cause] += 1


def _line() -> str:
    """The innermost line of the project that is running, and of another package that it has called."""
    frame: FrameType | None = sys._getframe(1)
    package = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}{package}"
        _, installed, inside = file.partition("site-packages/")
        if installed and not package and not inside.startswith("torch/"):
            package = f" (in {inside}:{frame.f_lineno})"
        frame = frame.f_back
    return f"no line of the project{package}"


def is_gpu(device: torch.device | str | int | None) -> bool:
    """Whether that names the GPU; a bare number does."""
    return device is not None and torch.device(device).type == "cuda"


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def pin(tensor: Tensor) -> Tensor:
    """The same tensor, from now on in pinned memory."""
    storage = _storage(tensor)
    _pinned[storage.cdata] = storage
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether its memory is pinned."""
    storage = _pinned.get(_storage(tensor).cdata)
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Move:
    """The arguments of `Tensor.to`."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    copy: bool

    @classmethod
    def of(cls, arguments: Sequence[Any], named: Mapping[str, Any]) -> "Move":
        """Read them as torch does."""
        device, dtype, rest = named.get("device"), named.get("dtype"), list(arguments)
        if rest and isinstance(rest[0], Tensor):
            like = rest.pop(0)
            device, dtype = like.device, like.dtype
        if rest and (rest[0] is None or isinstance(rest[0], str | torch.device | int)):
            device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
        non_blocking = bool(rest[0]) if rest else bool(named.get("non_blocking"))
        place = None if device is None else torch.device(device)
        return cls(place, dtype, non_blocking, bool(named.get("copy")))

    def arrives(self, source: Tensor) -> Tensor:
        """A tensor of the CPU on the GPU."""
        if not (self.non_blocking and is_pinned(source)):
            wait("copy to the GPU")
        changes = self.dtype is not None and self.dtype != source.dtype
        taken = plain_to(source, self.dtype) if changes else source.clone()
        arrived: Tensor = _Arrive.apply(taken)  # type: ignore[no-untyped-call]
        return arrived


class GpuTensor(Tensor):
    """A tensor of the pretend GPU, around the CPU tensor `held`; for C++ it is one of the CPU too."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool | None = None) -> "GpuTensor":
        made: GpuTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CPU,
            requires_grad=inner.requires_grad
            if requires_grad is None
            else requires_grad,
        )
        made.held = inner
        return made

    def __init__(self, inner: Tensor, requires_grad: bool | None = None) -> None:
        pass

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({tuple(self.held.shape)}, {self.held.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def to(self, *arguments: Any, **named: Any) -> Tensor:
        move, moved = Move.of(arguments, named), cast(Tensor, self)
        if move.dtype is not None and move.dtype != self.dtype:
            moved = plain_to(self, move.dtype)
        elif move.copy and (move.device is None or is_gpu(move.device)):
            moved = self.clone()
        if move.device is None or is_gpu(move.device):
            return moved
        if move.device.type == "meta":
            return torch.empty_like(_inner(moved), device="meta")
        left: Tensor = _Leave.apply(moved)  # type: ignore[no-untyped-call]
        if move.non_blocking:
            return pin(left)  # as torch does: the caller waits for it
        wait("copy to the CPU")
        return left

    def cpu(self, *arguments: Any, **named: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *arguments: Any, **named: Any) -> Tensor:
        return self

    def numpy(self, *arguments: Any, **named: Any) -> Any:
        raise MixedDevicesError("numpy() of a tensor of the GPU")

    def __array__(self, *arguments: Any, **named: Any) -> Any:
        raise MixedDevicesError("an array of a tensor of the GPU")

    def pin_memory(self, *arguments: Any, **named: Any) -> Tensor:
        raise MixedDevicesError("pin_memory() of a tensor of the GPU")

    def is_pinned(self, *arguments: Any, **named: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        pass

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def type(self, dtype: Any = None, *arguments: Any, **named: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{self.held.type().rpartition('.')[2]}"
        if isinstance(dtype, str):
            return GpuTensor(self.held.type(dtype.replace("torch.cuda.", "torch.")))
        return Tensor.type(self, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = GpuTensor(self.held.detach().clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def _value(self, operation: str) -> Tensor:
        """Wait for the value."""
        wait(operation)
        return self.held.detach()

    def tolist(self) -> Any:
        return self._value("tolist()").tolist()

    def item(self) -> Any:
        return self._value("item()").item()

    def __bool__(self) -> bool:
        return bool(self._value("bool()"))

    def __int__(self) -> int:
        return int(self._value("int()"))

    def __float__(self) -> float:
        return float(self._value("float()"))

    def __index__(self) -> int:
        return self._value("index()").__index__()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        return GpuTensor(source.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _inner(grads[0])


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: GpuTensor) -> Tensor:
        return source.held.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return GpuTensor(grads[0])


class Generator(plain_generator):
    """A generator of the CPU that says for which device it was made."""

    place: torch.device

    def __new__(cls, device: torch.device | str | int = "cpu") -> "Generator":
        made: Generator = plain_generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made.place = GPU if is_gpu(device) else CPU
        return made

    def __init__(self, device: torch.device | str | int = "cpu") -> None:
        pass

    device = property(lambda self: self.place)


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, tensors can be made on the GPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run an operation as a GPU would: raise where devices mix, note what waits."""
    name, given = func.overloadpacket.__name__, _tensors((args, named))
    on_gpu = [part for part in given if isinstance(part, GpuTensor)]
    on_cpu = [part for part in given if not isinstance(part, GpuTensor)]
    if name == "is_pinned":
        return is_pinned(args[0])
    if name == "_pin_memory":
        return pin(args[0].clone())
    named, to_gpu = dict(named), bool(on_gpu)
    if (asked := named.get("device")) is not None and torch.device(asked).type in (
        "cpu",
        "cuda",
    ):
        # For C++ a tensor of the GPU is one of the CPU: what is made like it is asked for there.
        to_gpu |= is_gpu(asked)
        named["device"] = CPU
    if named.pop("pin_memory", None):
        if to_gpu:
            raise MixedDevicesError(f"{name} in pinned memory of the GPU at {_line()}")
        return pin(func(*args, **named))
    if name == "copy_":
        later = args[2] if len(args) > 2 else named.get("non_blocking", False)
        return _copied_into(args[0], args[1], later)
    if name == "_to_copy" and to_gpu and not on_gpu:
        if not (named.get("non_blocking") and is_pinned(args[0])):
            wait("copy to the GPU")
    elif on_gpu and on_cpu:
        _check_places(name, args, on_cpu)
    if on_gpu:
        _note_waits(name, args, named)
    result = func(*tree_map(_inner, args), **tree_map(_inner, named))
    if not to_gpu or name in ON_THE_HOST:
        return result
    return tree_map(_wrapper({id(part.held): part for part in on_gpu}), result)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in tree_flatten(value)[0] if isinstance(part, Tensor)]


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def _wrapper(given: Mapping[int, GpuTensor]) -> Any:
    """A function that puts results on the GPU; what an operation has changed in place stays itself."""

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, GpuTensor):
            return value
        same = given.get(id(value))
        if same is not None and (same.shape, same.stride()) == (
            value.shape,
            value.stride(),
        ):
            return same
        return GpuTensor(value)

    return wrapped


def _copied_into(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """`copy_`, between any devices; a number of the CPU is an argument of a kernel."""
    arrives = isinstance(target, GpuTensor) and not isinstance(source, GpuTensor)
    leaves = isinstance(source, GpuTensor) and not isinstance(target, GpuTensor)
    host = target if leaves else source
    if (leaves or (arrives and source.dim() and source.numel())) and not (
        non_blocking and is_pinned(host)
    ):
        wait("copy to the CPU" if leaves else "copy to the GPU")
    _inner(target).copy_(_inner(source))
    return target


def _check_places(name: str, args: Sequence[Any], on_cpu: Sequence[Tensor]) -> None:
    """MixedDevicesError where CUDA has one: numbers of the CPU, and its indices, are allowed."""
    changed = args[0]
    strange = [part for part in on_cpu if part.dim()]
    if name in INDEXING:
        indices = {id(part) for part in _tensors(args[1])}
        strange = [part for part in strange if id(part) not in indices]
        if any(id(part) in indices for part in on_cpu):
            wait("indices to the GPU")
    on_host = isinstance(changed, Tensor) and not isinstance(changed, GpuTensor)
    if on_host and (name in INDEXING or name.endswith("_")):
        raise MixedDevicesError(
            f"{name} of a CPU tensor by one of the GPU at {_line()}"
        )
    if strange:
        shapes = [tuple(part.shape) for part in strange]
        raise MixedDevicesError(
            f"{name} on the GPU with CPU tensors {shapes} at {_line()}"
        )


def _note_waits(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Note what waits for values of the GPU."""
    sized = name == "repeat_interleave" and named.get("output_size") is None
    if sized or name in SIZED_BY_VALUES or name == "equal":
        wait(name)
    elif name == "_local_scalar_dense":
        wait("item()")
    elif name in INDEXING and any(
        part.dtype in (torch.bool, torch.uint8) for part in _tensors(args[1])
    ):
        # One number of the CPU is written where the mask is, without looking for these places.
        number = (
            len(args) > 2
            and not isinstance(args[2], GpuTensor)
            and args[2].numel() == 1
        )
        if not number:
            wait("indexing by a mask")
