"""The hardware that decodes: what is known of it, a readable name, and a hash of what its speed depends on.

The name of a CPU is not enough: virtual machines call four generations of processors "AMD EPYC". Linux (x86
and Arm) and macOS tell more; what a system does not tell stays empty.
"""

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdistill.stores.schema import content_hash

if TYPE_CHECKING:
    import torch

FLAGS = re.compile(
    r"avx|avx2|fma|f16c|avx512\w*|avx_\w+|amx_\w+|asimd\w*|neon|fphp|sve\w*|sme2?|bf16|i8mm|hypervisor"
)
WIDEST = (
    "amx_bf16",
    "avx512_bf16",
    "avx512f",
    "avx2",
    "sve2",
    "sve",
    "bf16",
    "asimd",
    "neon",
    "avx",
)
ARM = {
    "0x41": "Arm",
    "0x42": "Broadcom",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0xc0": "Ampere",
}
SYSCTL = (*("machdep.cpu", "hw"), *("hw.perflevel0", "hw.optional", "hw.optional.arm"))
UNLIMITED = 1 << 60  # bytes; version 1 of cgroups says so
SECONDS = 10  # for a command of the system


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A CPU, by the numbers that its vendor gives it; fields that the system does not tell are empty."""

    name: str
    vendor: str = ""
    family: str = ""
    model: str = ""  # of several kinds of cores, all, joined by +
    stepping: str = ""
    cores: int = 1
    threads: int = 1  # of all cores
    caches: tuple[str, ...] = ()  # level, type and size of those of the first core
    flags: tuple[
        str, ...
    ] = ()  # instruction sets for vectors and matrices; `hypervisor`: a virtual machine
    max_mhz: float | None = None
    governor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this process may use."""

    threads: int  # by its affinity
    cpus: float | None = None  # by the quota of its control group
    memory: int | None = None  # bytes, by its control group


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, by the numbers of its driver; power and clock only where the package pynvml is installed."""

    name: str
    memory: int  # bytes
    processors: int
    capability: str
    driver: str = ""
    power_watts: float | None = None  # the limit
    max_mhz: float | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine as one process sees it."""

    processor: Processor
    limits: Limits
    memory: int | None = None  # bytes
    mhz: float | None = None  # of the fastest core at that moment
    gpu: Gpu | None = None  # None: it decodes on the CPU

    @property
    def identity(self) -> str:
        """Eight hex digits over what speed depends on and what does not change from minute to minute."""
        limits = (self.limits.threads, self.limits.cpus)
        return content_hash(
            [asdict(self.processor), limits, self.gpu and asdict(self.gpu)]
        )[:8]

    @property
    def name(self) -> str:
        """What a reader recognizes, and the identity."""
        if self.gpu:
            power = f", {self.gpu.power_watts:.0f} W" if self.gpu.power_watts else ""
            return f"{self.gpu.name}, {self.gpu.memory / 2**30:.0f} GiB{power}, #{self.identity}"
        cpu = self.processor
        numbers = "/".join(filter(None, (cpu.family, cpu.model, cpu.stepping)))
        usable = min(self.limits.threads, self.limits.cpus or self.limits.threads)
        of = f" of {cpu.threads}" if usable < cpu.threads else ""
        parts = [
            f"CPU {cpu.name}{f' ({numbers})' if numbers else ''}",
            f"{usable:g}{of} CPUs",
            *[flag for flag in WIDEST if flag in cpu.flags][:1],
        ]
        return ", ".join([*parts, f"#{self.identity}"])

    @property
    def details(self) -> str:
        """The rest of what is known, in a line."""
        cpu = self.processor
        clock = [
            f"{at:.0f} MHz{now}"
            for at, now in ((cpu.max_mhz, " at most"), (self.mhz, ""))
            if at
        ]
        known = [
            *([f"CPU {cpu.name}"] if self.gpu else []),
            *([f"driver {self.gpu.driver}"] if self.gpu and self.gpu.driver else []),
            f"{cpu.cores} cores, {cpu.threads} threads",
            *cpu.caches,
            *clock,
            *([f"governor {cpu.governor}"] if cpu.governor else []),
            *([f"{self.memory / 2**30:.0f} GiB"] if self.memory else []),
            *(
                [f"limited to {self.limits.memory / 2**30:.1f} GiB"]
                if self.limits.memory
                else []
            ),
            " ".join(cpu.flags),
        ]
        return ", ".join(filter(None, known))


def of(device: "torch.device") -> Hardware:
    """The hardware that computes for this device."""
    gpu = _gpu(device) if device.type == "cuda" else None
    return mac(_sysctl(), gpu) if platform.system() == "Darwin" else linux(gpu=gpu)


def linux(root: Path = Path("/"), gpu: Gpu | None = None) -> Hardware:
    """From the files below `root` that the kernel of Linux offers; another system has none of them."""
    seen = _columns(_text(root / "proc/cpuinfo"))
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    affinity = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    implementer = _joined(seen, "CPU implementer")
    name = _joined(seen, "model name") or " ".join(
        filter(None, (ARM.get(implementer), platform.machine()))
    )
    places = set(
        zip(seen.get("physical id", ()), seen.get("core id", ()), strict=False)
    )
    threads = len(seen.get("processor", ())) or os.cpu_count() or 1
    clock = [float(one) for one in seen.get("cpu MHz", ())]
    clock += [one / 1e3 for one in _numbers([cpu0 / "cpufreq/scaling_cur_freq"])]
    memory = re.search(r"MemTotal:\s*(\d+)", _text(root / "proc/meminfo"))
    return Hardware(
        processor=Processor(
            name=name,
            vendor=_joined(seen, "vendor_id") or implementer,
            family=_joined(seen, "cpu family") or _joined(seen, "CPU architecture"),
            model=_joined(seen, "model") or _joined(seen, "CPU part"),
            stepping=_joined(seen, "stepping") or _joined(seen, "CPU revision"),
            cores=len(places) or threads,
            threads=threads,
            caches=tuple(_caches(cpu0 / "cache")),
            flags=_flags(
                (seen.get("flags") or seen.get("Features") or [""])[0].split()
            ),
            max_mhz=next(
                (one / 1e3 for one in _numbers([cpu0 / "cpufreq/cpuinfo_max_freq"])),
                None,
            ),
            governor=_text(cpu0 / "cpufreq/scaling_governor") or None,
        ),
        limits=_limits(root, affinity),
        memory=int(memory[1]) << 10 if memory else None,
        mhz=max(clock, default=None),
        gpu=gpu,
    )


def mac(said: Mapping[str, str], gpu: Gpu | None = None) -> Hardware:
    """From the settings that `sysctl` prints on macOS, by name."""
    kinds = {
        "L1d": "l1dcachesize",
        "L1i": "l1icachesize",
        "L2": "l2cachesize",
        "L3": "l3cachesize",
    }
    sizes = {
        kind: said.get(f"hw.perflevel0.{at}") or said.get(f"hw.{at}")
        for kind, at in kinds.items()
    }
    present = (
        at.rpartition(".")[2].lower() for at, value in said.items() if value == "1"
    )
    features = {one.removeprefix("feat_") for one in present}
    features |= set(said.get("machdep.cpu.features", "").lower().split())
    features |= set(said.get("machdep.cpu.leaf7_features", "").lower().split())
    threads = int(said.get("hw.logicalcpu", 0)) or os.cpu_count() or 1
    return Hardware(
        processor=Processor(
            name=said.get("machdep.cpu.brand_string") or platform.machine(),
            vendor=said.get("machdep.cpu.vendor", ""),
            family=said.get("machdep.cpu.family") or said.get("hw.cpufamily", ""),
            model=said.get("machdep.cpu.model", ""),
            stepping=said.get("machdep.cpu.stepping", ""),
            cores=int(said.get("hw.physicalcpu", 0)) or threads,
            threads=threads,
            caches=tuple(
                f"{kind} {int(size) >> 10}K" for kind, size in sizes.items() if size
            ),
            flags=_flags(features),
        ),
        limits=Limits(threads=threads),
        memory=int(said["hw.memsize"]) if "hw.memsize" in said else None,
        gpu=gpu,
    )


def _sysctl() -> dict[str, str]:
    """What `sysctl` prints, by name; empty if it does not run."""
    command = ["sysctl", *SYSCTL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@cache
def _gpu(device: "torch.device") -> Gpu:
    """What torch says of a GPU, the file of its driver, and pynvml where it is installed."""
    import torch

    seen = torch.cuda.get_device_properties(device)
    driver = re.search(r"\d+\.\d+[.\d]*", _text(Path("/proc/driver/nvidia/version")))
    power = clock = None
    with contextlib.suppress(
        Exception
    ):  # one of many errors of a driver: the rest is known
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{seen.uuid}".encode())
        power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
        clock = float(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    return Gpu(
        name=seen.name,
        memory=seen.total_memory,
        processors=seen.multi_processor_count,
        capability=f"{seen.major}.{seen.minor}",
        driver=driver[0] if driver else "",
        power_watts=power,
        max_mhz=clock,
    )


def _columns(cpuinfo: str) -> dict[str, list[str]]:
    """The values of each fact, of one logical processor after another."""
    found: dict[str, list[str]] = {}
    for name, colon, value in (line.partition(":") for line in cpuinfo.splitlines()):
        if colon:
            found.setdefault(name.strip(), []).append(value.strip())
    return found


def _joined(seen: Mapping[str, list[str]], fact: str) -> str:
    return "+".join(sorted(set(seen.get(fact, ()))))


def _flags(features: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({one for one in features if FLAGS.fullmatch(one)}))


def _caches(folder: Path) -> Iterator[str]:
    for one in sorted(folder.glob("index*")):
        level, kind, size = (_text(one / fact) for fact in ("level", "type", "size"))
        yield f"L{level}{kind[:1].lower() if kind != 'Unified' else ''} {size}"


def _limits(root: Path, affinity: int) -> Limits:
    """The tightest limits of the control group and those above it, of version 2 or 1."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    groups = [line.split(":", 2) for line in lines if line.count(":") > 1]
    above = root / "sys/fs/cgroup"
    folders = [
        above / controllers / part
        for _, controllers, path in groups
        for part in (path.strip("/"), *map(str, Path(path.strip("/")).parents))
    ]
    quotas = [
        one.split()
        for one in map(_text, (folder / "cpu.max" for folder in folders))
        if one
    ]
    cpus = [int(quota) / int(period) for quota, period in quotas if quota.isdigit()]
    for folder in folders:
        old = _numbers([folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"])
        cpus += [old[0] / old[1]] if len(old) == 2 else []
    memory = _numbers(
        folder / name
        for folder in folders
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return Limits(
        threads=affinity,
        cpus=min(cpus, default=None),
        memory=min((one for one in memory if one < UNLIMITED), default=None),
    )


def _numbers(files: Iterable[Path]) -> list[int]:
    """The numbers in those of the files that hold one above 0."""
    return [int(text) for text in map(_text, files) if text.isdigit()]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
