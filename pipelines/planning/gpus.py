"""GPU classes and their memory and speed, by the data sheets of their makers.

Arithmetic is that of dense bfloat16 products, without sparsity.
"""

import re
from dataclasses import dataclass
from types import MappingProxyType

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class GpuClass:
    """The memory and speed of a GPU."""

    gib: int
    """GiB of memory."""
    flops: float
    """Floating-point operations per second."""
    bandwidth: float
    """Bytes of memory per second."""


CLASSES = MappingProxyType(
    {
        "B200": GpuClass(180, 2250 * TERA, 7700 * GIGA),
        "H200": GpuClass(141, 989 * TERA, 4800 * GIGA),
        "H100": GpuClass(80, 989 * TERA, 3350 * GIGA),
        "A100": GpuClass(80, 312 * TERA, 2040 * GIGA),
        "A100-40GB": GpuClass(40, 312 * TERA, 1560 * GIGA),
        "L40S": GpuClass(48, 362 * TERA, 864 * GIGA),
        "A6000": GpuClass(48, 155 * TERA, 768 * GIGA),
        "RTX5090": GpuClass(32, 210 * TERA, 1790 * GIGA),
        "RTX4090": GpuClass(24, 165 * TERA, 1010 * GIGA),
        "A10": GpuClass(24, 125 * TERA, 600 * GIGA),
        "L4": GpuClass(24, 121 * TERA, 300 * GIGA),
    }
)

_TEXT = re.compile(r"(?:(\d+)\s*x\s*)?([\w-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpus:
    """GPUs of one class."""

    count: int
    name: str

    @classmethod
    def parse(cls, text: str) -> "Gpus":
        """Of a text such as `2xH100` or `H100`; DataError on others."""
        match = _TEXT.fullmatch(text.strip())
        count, name = match.groups() if match else (None, text)
        by_letters = {known.upper(): known for known in CLASSES}
        gpu_class = by_letters.get(name.upper())
        if gpu_class is None or count == "0":
            near = did_you_mean(name.upper(), CLASSES)
            raise DataError(
                f"--gpus {text}: unknown{near}; write a number and one of "
                f"{', '.join(CLASSES)}, such as 2xH100"
            )
        return cls(int(count or 1), gpu_class)

    @classmethod
    def here(cls) -> "Gpus | None":
        """The GPUs of this machine; None if it has none, or if their class is unknown."""
        import torch  # after the name of a GPU was checked

        if not torch.cuda.is_available():
            return None
        model = torch.cuda.get_device_name(0).upper().replace(" ", "")
        by_length = sorted(CLASSES, key=len, reverse=True)
        name = next((name for name in by_length if name.upper() in model), None)
        return cls(torch.cuda.device_count(), name) if name else None

    @property
    def each(self) -> GpuClass:
        """The memory and speed of one GPU."""
        return CLASSES[self.name]
