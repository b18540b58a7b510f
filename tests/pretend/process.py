"""A process with the pretend GPU, for good: `python -m pytest -p tests.pretend.process FILE`.

torch is changed before the project is imported, whose modules keep some of its functions; each test then
runs with the device on. It is a plugin of pytest, so that no other test meets it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretend.device import (
    GPU,
    Device,
    Generator,
    GpuTensor,
    Move,
    is_gpu,
    plain_new_tensor,
    plain_tensor,
    plain_to,
    wait,
)

MEMORY = 80 << 30
NAME = "NVIDIA H100 80GB HBM3"
COUNTERS = (
    "max_memory_allocated",
    "memory_allocated",
    "max_memory_reserved",
    "memory_reserved",
    "reset_peak_memory_stats",
    "ipc_collect",
    "empty_cache",
    "set_device",
    "manual_seed",
    "manual_seed_all",
    "current_device",
)
"""Functions of `torch.cuda` that do nothing here, or answer 0."""


class Event:
    """An event that has passed at once."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None:
        wait("event.synchronize()")

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass


class Stream:
    """A stream; all work of all streams is done at once."""

    device, stream_id, cuda_stream = GPU, 0, 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        wait("stream.synchronize()")

    def query(self) -> bool:
        return True


class Chosen:
    """`torch.cuda.device`: there is one."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> "Chosen":
        return self

    def __exit__(self, *failure: object) -> None:
        pass


def install() -> None:
    """Give this process the GPU."""
    _change(torch.cuda, **{name: lambda *arguments, **named: 0 for name in COUNTERS})
    _change(
        torch.cuda,
        _lazy_init=lambda: None,
        _initialized=True,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        mem_get_info=lambda device=None: (MEMORY * 9 // 10, MEMORY),
        synchronize=lambda device=None: wait("torch.cuda.synchronize()"),
        Event=Event,
        Stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: Stream(),
        default_stream=lambda device=None: Stream(),
        device=Chosen,
        _DeviceGuard=Chosen,
        get_device_name=lambda device=None: NAME,
        get_device_capability=lambda device=None: (9, 0),
        is_current_stream_capturing=lambda: False,
        is_bf16_supported=lambda *arguments, **named: True,
        get_rng_state=lambda device="cuda": torch.random.get_rng_state(),
        set_rng_state=lambda state, device="cuda": None,
        get_device_properties=lambda device=None: SimpleNamespace(
            name=NAME,
            total_memory=MEMORY,
            multi_processor_count=132,
            major=9,
            minor=0,
            uuid="0",
        ),
    )
    _change(torch, Generator=Generator, inference_mode=_inference_mode, tensor=_tensor)
    _change(torch._C, _get_accelerator=lambda *arguments: GPU)
    _change(
        Tensor,
        to=_to,
        cuda=lambda self, *arguments, **named: _to(self, "cuda"),
        new_tensor=_new_tensor,
    )
    _change(nn.Module, _apply=_apply)


def _change(owner: Any, **replacements: Any) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _inference_mode(mode: Any = True) -> Any:
    """`no_grad`: in the real one, no wrappers of views can be made."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else contextlib.nullcontext()


def _to(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
    if isinstance(self, GpuTensor):
        return GpuTensor.to(self, *arguments, **named)
    move = Move.of(arguments, named)
    return (
        move.arrives(self)
        if is_gpu(move.device)
        else plain_to(self, *arguments, **named)
    )


def _tensor(data: Any, *arguments: Any, device: Any = None, **named: Any) -> Tensor:
    with _disable_current_modes():
        made = plain_tensor(data, *arguments, **named)
    if not is_gpu(device):
        return made
    wait("torch.tensor() on the GPU")
    return GpuTensor(made)


def _new_tensor(self: Tensor, data: Any, **named: Any) -> Tensor:
    if isinstance(self, GpuTensor):
        return _tensor(data, **{"dtype": self.dtype, "device": GPU, **named})
    return plain_new_tensor(self, data, **named)


def _apply(
    self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace the weights, since their data cannot be; weights that modules share stay shared."""
    for child in self.children():
        _apply(child, change)
    for name, weight in list(self._parameters.items()):
        if weight is not None:
            self._parameters[name] = _changed(weight, change)
    for name, buffer in list(self._buffers.items()):
        if buffer is not None:
            self._buffers[name] = change(buffer)
    return self


def _changed(weight: nn.Parameter, change: Callable[[Tensor], Tensor]) -> nn.Parameter:
    earlier: nn.Parameter | None = getattr(weight, "moved_to", None)
    if earlier is not None:
        return earlier
    with torch.no_grad():
        moved = change(weight.detach())
    if (
        isinstance(moved, GpuTensor) == isinstance(weight, GpuTensor)
        and moved.dtype == weight.dtype
    ):
        return weight
    made = nn.Parameter(moved, requires_grad=weight.requires_grad)
    weight.moved_to = made  # type: ignore[attr-defined]
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test runs with the device on; its fixtures are made without."""
    with Device():  # type: ignore[no-untyped-call]
        return (yield)


install()
