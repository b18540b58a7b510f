"""What a stage needs of a machine, what the machine has, and the refusal to start what cannot end.

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
SAVED = (
    2 * 3
)  # floats of a weight on the disk: itself and its moments, in a checkpoint and its successor


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one process at its peak."""

    dtype: str
    parts: Mapping[str, int]  # by what they hold
    halved: int  # of these, of batches, which are halved until they fit
    free: Sequence[
        int
    ]  # of each GPU, or of this machine if it has none; empty: not known
    device: str  # GPU or machine
    spread: bool = False  # over several GPUs

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def lacking(self) -> str:
        """What is missing in a line; empty if it fits, or if it is not known what there is."""
        have, least = self._have, self.total - self.halved
        if not self.free or least <= have:
            return ""
        where = (
            f"{len(self.free)} GPUs have"
            if len(self.free) > 1
            else f"this {self.device} has"
        )
        each = "" if self.spread or len(self.free) == 1 else " each"
        return f"{size(least)} of memory are needed in {self.dtype}, and {where} {size(have)} free{each}"

    @property
    def verdict(self) -> str:
        """Whether it fits, in a line."""
        return self.lacking or (
            "fits" if self.total <= self._have else "fits, in smaller batches"
        )

    @property
    def _have(self) -> int:
        return sum(self.free) if self.spread else max(self.free, default=0)


def on_target(
    weights: int,
    dtype: str,
    *,
    batch: Mapping[str, int] | None = None,
    spread: bool = False,
    more: int = 0,
) -> Memory:
    """A process with a target of so many parameters; `batch` are its numbers, `more` those of a drafter."""
    dtype, width, device, free = _machine(dtype)
    numbers = {
        "weights": weights,
        **({"drafter": more} if more else {}),
        **(batch or {}),
    }
    parts = {name: width * count for name, count in numbers.items()}
    halved = sum(parts[name] for name in batch or {})
    return Memory(
        dtype=dtype, parts=parts, halved=halved, free=free, device=device, spread=spread
    )


def kv_cache(info: TargetInfo, tokens: int) -> int:
    """The numbers in the keys and values of so many tokens."""
    return 2 * tokens * info.num_layers * info.num_kv_heads * info.head_dim


def rows(info: TargetInfo, tokens: int, features: Sequence[str]) -> int:
    """The numbers of one forward pass over so many tokens: a layer at work, and the states that are kept."""
    kept = len({Feature.parse(name).source for name in features})
    return tokens * (info.hidden_size * (kept + 4) + 2 * info.intermediate_size)


def of_training(
    info: TargetInfo, weights: int, dtype: str, batch_tokens: int, features: int
) -> Memory:
    """One rank without ZeRO, which trains so many weights."""
    dtype, width, device, free = _machine(dtype)
    chunk = chunk_of(min(free)) if free and device == "GPU" else CHUNK_BYTES
    parts = {
        "optimizer": 4 * FLOATS * weights + (width * weights if width < 4 else 0),
        "tables": 2 * width * info.vocab_size * info.hidden_size,
        "batch": width * batch_tokens * info.hidden_size * features,
        "logits": 2 * min(chunk, 4 * batch_tokens * info.vocab_size),
    }
    return Memory(dtype=dtype, parts=parts, halved=0, free=free, device=device)


def _machine(dtype: str) -> tuple[str, int, str, Sequence[int]]:
    """The dtype that `auto` means here and its bytes, what computes, and its free bytes."""
    gpus = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    if dtype == "auto":
        dtype = "bfloat16" if gpus else "float32"
    free = gpus or [one for one in [free_memory()] if one is not None]
    return (
        dtype,
        WIDTHS[dtype],
        "GPU" if gpus else "machine",
        [] if "RAY_ADDRESS" in os.environ else free,
    )


def free_memory() -> int | None:
    """Bytes that a new process may use here; None where the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    limit = hardware.of(torch.device("cpu")).limits.memory
    return min(int(found[1]) << 10, limit or 1 << 60) if found else None


def free_disk(path: str | Path) -> int | None:
    """Free bytes of the disk of a local path, which may not exist yet; None behind a URL."""
    if "://" in str(path):
        return None
    folder = Path(path).absolute()
    return shutil.disk_usage(
        next(one for one in (folder, *folder.parents) if one.exists())
    ).free


def check(
    what: str, memory: Memory | None, disk: int | None, path: str | Path, advice: str
) -> None:
    """DataError if a stage needs more disk or memory than there is: what, how much, and what to do."""
    free = free_disk(path)
    short = memory.lacking if memory else ""
    if disk is not None and free is not None and disk > free:
        short = f"{size(disk)} of disk are needed, and {path} has {size(free)} free"
    if short:
        raise DataError(
            f"{what}: {short}: {advice}; --anyway (in Python anyway=True) starts all the same"
        )


def shown(memory: Memory) -> str:
    """The memory in a line."""
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size(count)}"
        for name, count in memory.parts.items()
    )
    free = "" if not memory.free else f"; free: {' and '.join(map(size, memory.free))}"
    return f"{size(memory.total)} in {memory.dtype} ({parts}){free}"


def facts(memory: Memory) -> dict[str, Any]:
    """As JSON."""
    return {
        "total": memory.total,
        "dtype": memory.dtype,
        **memory.parts,
        "free": [*memory.free],
    }
