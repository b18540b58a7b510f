"""The memory and disk that a stage needs and a machine has, and the refusal to start a stage that cannot end.

The formulas are in docs/flow.md, "What a stage needs".
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.core.losses import CHUNK_BYTES, chunk_of
from vlmdistill.drafters.decoding import hardware
from vlmdistill.stores.errors import DataError, size
from vlmdistill.stores.schema import Feature, TargetInfo

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOATS = 4  # of each trained weight: itself, its gradient, Adam's two moments
SAVED = 2 * 3
"""Floats of a weight on the disk: itself and its moments, in a checkpoint and its successor."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one process at its peak."""

    dtype: str
    parts: Mapping[str, int]  # by what they hold
    halved: int  # of these, of batches, which are halved until they fit
    free: Sequence[int]
    """Of each GPU, or of this machine if it has none; empty: not known."""
    device: str  # GPU or machine
    spread: bool = False  # over several GPUs

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def lacking(self) -> str:
        """How much is missing, in a line; empty if it fits, or if the free memory is not known."""
        least = self.total - self.halved
        if not self.free or least <= self._available:
            return ""
        needed = f"{size(least)} of memory are needed in {self.dtype}"
        available = f"{size(self._available)} free"
        if len(self.free) == 1:
            return f"{needed}, and this {self.device} has {available}"
        each = "" if self.spread else " each"
        return f"{needed}, and {len(self.free)} GPUs have {available}{each}"

    @property
    def verdict(self) -> str:
        """Whether it fits, in a line."""
        if self.lacking:
            return self.lacking
        return "fits" if self.total <= self._available else "fits, in smaller batches"

    @property
    def _available(self) -> int:
        return sum(self.free) if self.spread else max(self.free, default=0)


def on_target(
    weights: int,
    dtype: str,
    *,
    batch: Mapping[str, int] | None = None,
    spread: bool = False,
    drafter: int = 0,
) -> Memory:
    """A process with a target of so many parameters.

    `batch` are the numbers of its batches, by what they hold, and `drafter` the parameters of drafters.
    """
    machine = _Machine.of(dtype)
    numbers = {"weights": weights}
    if drafter:
        numbers["drafter"] = drafter
    numbers |= batch or {}
    parts = {name: machine.width * count for name, count in numbers.items()}
    return Memory(
        dtype=machine.dtype,
        parts=parts,
        halved=sum(parts[name] for name in batch or {}),
        free=machine.free,
        device=machine.device,
        spread=spread,
    )


def kv_cache(info: TargetInfo, tokens: int) -> int:
    """The numbers in the keys and values of so many tokens."""
    return 2 * tokens * info.num_layers * info.num_kv_heads * info.head_dim


def rows(info: TargetInfo, tokens: int, features: Sequence[str]) -> int:
    """The numbers of one forward pass over so many tokens: a layer at work, and the states that are kept."""
    kept_states = len({Feature.parse(name).source for name in features})
    states = info.hidden_size * (kept_states + 4)
    return tokens * (states + 2 * info.intermediate_size)


def of_training(
    info: TargetInfo, weights: int, dtype: str, batch_tokens: int, features: int
) -> Memory:
    """One rank without ZeRO, which trains so many weights."""
    machine = _Machine.of(dtype)
    width = machine.width
    row = width * info.hidden_size
    has_gpu = machine.device == "GPU"
    chunk = chunk_of(min(machine.free)) if machine.free and has_gpu else CHUNK_BYTES
    logits = 4 * batch_tokens * info.vocab_size
    optimizer = 4 * FLOATS * weights
    if width < 4:  # the weights in half precision, beside the optimizer's own
        optimizer += width * weights
    parts = {
        "optimizer": optimizer,
        "tables": 2 * row * info.vocab_size,
        "batch": row * batch_tokens * features,
        "logits": 2 * min(chunk, logits),
    }
    return Memory(
        dtype=machine.dtype,
        parts=parts,
        halved=0,
        free=machine.free,
        device=machine.device,
    )


@dataclass(frozen=True)
class _Machine:
    """The device that computes here, and its free memory."""

    dtype: str  # never `auto`
    width: int  # bytes of a number
    device: str  # GPU or machine
    free: Sequence[int]  # bytes, as in `Memory`

    @classmethod
    def of(cls, dtype: str) -> "_Machine":
        """This machine, for a process in a dtype; `auto` is bfloat16 on a GPU, else float32."""
        gpus = range(torch.cuda.device_count())
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]
        device = "GPU" if free else "machine"
        if dtype == "auto":
            dtype = "bfloat16" if free else "float32"
        if not free:
            here = free_memory()
            free = [] if here is None else [here]
        if "RAY_ADDRESS" in os.environ:  # other machines do the work
            free = []
        return cls(dtype, WIDTHS[dtype], device, free)


def free_memory() -> int | None:
    """Bytes that a new process may use here; None where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"MemAvailable:\s*(\d+)", text)
    if match is None:
        return None
    available = int(match[1]) << 10
    limit = hardware.of(torch.device("cpu")).limits.memory
    return min(available, limit) if limit else available


def free_disk(path: str | Path) -> int | None:
    """Free bytes of the disk of a local path, which may not exist yet; None behind a URL."""
    if "://" in str(path):
        return None
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check(
    stage: str, memory: Memory | None, disk: int | None, path: str | Path, advice: str
) -> None:
    """DataError if a stage needs more disk or memory than there is: how much, and what to do."""
    free = free_disk(path)
    lacking = memory.lacking if memory else ""
    if disk is not None and free is not None and disk > free:
        lacking = f"{size(disk)} of disk are needed, and {path} has {size(free)} free"
    if lacking:
        raise DataError(
            f"{stage}: {lacking}: {advice}; --anyway (in Python anyway=True) starts all the same"
        )


def shown(memory: Memory) -> str:
    """The memory in a line."""
    parts = [
        f"{name.replace('_', ' ')} {size(count)}"
        for name, count in memory.parts.items()
    ]
    text = f"{size(memory.total)} in {memory.dtype} ({', '.join(parts)})"
    if memory.free:
        text += f"; free: {' and '.join(map(size, memory.free))}"
    return text


def facts(memory: Memory) -> dict[str, Any]:
    """As JSON."""
    return {
        "total": memory.total,
        "dtype": memory.dtype,
        **memory.parts,
        "free": [*memory.free],
    }
