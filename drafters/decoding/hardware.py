"""The hardware that decodes: its facts, a readable name, and a hash of what its speed depends on.

The name of a CPU is not enough: virtual machines call four generations of processors "AMD
EPYC". Linux (x86 and Arm) and macOS know more; facts that a system does not offer stay empty.
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
"""Implementers of Arm processors, by their numbers in `/proc/cpuinfo`."""
SYSCTL = (
    "machdep.cpu",
    "hw",
    "hw.perflevel0",
    "hw.optional",
    "hw.optional.arm",
)
"""The groups of settings of macOS that are read."""
MAC_CACHES = {
    "L1d": "l1dcachesize",
    "L1i": "l1icachesize",
    "L2": "l2cachesize",
    "L3": "l3cachesize",
}
UNLIMITED = 1 << 60
"""Bytes from which a limit means none: version 1 of cgroups has a huge number for it."""
SECONDS = 10
"""The most that a command of the system may take."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A CPU, by the numbers that its vendor gives it; unknown fields are empty."""

    name: str
    vendor: str = ""
    family: str = ""
    model: str = ""  # of several kinds of cores: all of them, joined by +
    stepping: str = ""
    cores: int = 1
    threads: int = 1  # of all cores
    caches: tuple[str, ...] = ()  # level, type and size of those of the first core
    flags: tuple[str, ...] = ()
    """Instruction sets for vectors and matrices; `hypervisor`: a virtual machine."""
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
    """A GPU, by the numbers of its driver; power and clock need the package pynvml."""

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
    mhz: float | None = None  # of the fastest core, at the time of reading
    gpu: Gpu | None = None  # None: it decodes on the CPU

    @property
    def identity(self) -> str:
        """Eight hex digits over the facts that speed depends on, as far as they are constant."""
        limits = (self.limits.threads, self.limits.cpus)
        gpu = self.gpu and asdict(self.gpu)
        return content_hash([asdict(self.processor), limits, gpu])[:8]

    @property
    def name(self) -> str:
        """The name that a reader recognizes, and the identity."""
        if self.gpu:
            parts = [self.gpu.name, _gibibytes(self.gpu.memory)]
            if self.gpu.power_watts:
                parts.append(f"{self.gpu.power_watts:.0f} W")
            parts.append(f"#{self.identity}")
            return ", ".join(parts)
        cpu = self.processor
        numbers = "/".join(filter(None, (cpu.family, cpu.model, cpu.stepping)))
        model = f"{cpu.name} ({numbers})" if numbers else cpu.name
        usable = min(self.limits.threads, self.limits.cpus or self.limits.threads)
        total = f" of {cpu.threads}" if usable < cpu.threads else ""
        parts = [f"CPU {model}", f"{usable:g}{total} CPUs"]
        parts += [flag for flag in WIDEST if flag in cpu.flags][:1]
        return ", ".join([*parts, f"#{self.identity}"])

    @property
    def details(self) -> str:
        """Everything else that is known, in a line."""
        cpu = self.processor
        parts = []
        if self.gpu:
            parts.append(f"CPU {cpu.name}")
            if self.gpu.driver:
                parts.append(f"driver {self.gpu.driver}")
        parts.append(f"{cpu.cores} cores, {cpu.threads} threads")
        parts += cpu.caches
        if cpu.max_mhz:
            parts.append(f"{cpu.max_mhz:.0f} MHz at most")
        if self.mhz:
            parts.append(f"{self.mhz:.0f} MHz")
        if cpu.governor:
            parts.append(f"governor {cpu.governor}")
        if self.memory:
            parts.append(_gibibytes(self.memory))
        if self.limits.memory:
            limit = _gibibytes(self.limits.memory, digits=1)
            parts.append(f"limited to {limit}")
        parts.append(" ".join(cpu.flags))
        return ", ".join(filter(None, parts))


def _gibibytes(size: int, digits: int = 0) -> str:
    return f"{size / 2**30:.{digits}f} GiB"


def of(device: "torch.device") -> Hardware:
    """The hardware that computes for this device."""
    gpu = _gpu(device) if device.type == "cuda" else None
    if platform.system() == "Darwin":
        return mac(_sysctl(), gpu)
    return linux(gpu=gpu)


def linux(root: Path = Path("/"), gpu: Gpu | None = None) -> Hardware:
    """From the files below `root` that the kernel of Linux offers.

    On another system none of them exists, and most facts stay empty.
    """
    cpuinfo = _columns(_text(root / "proc/cpuinfo"))
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    clocks = [float(mhz) for mhz in cpuinfo.get("cpu MHz", ())]
    khz = _number(frequency / "scaling_cur_freq")
    if khz is not None:
        clocks.append(khz / 1e3)
    kibibytes = re.search(r"MemTotal:\s*(\d+)", _text(root / "proc/meminfo"))
    memory = int(kibibytes[1]) << 10 if kibibytes else None
    return Hardware(
        processor=_linux_processor(root, cpuinfo),
        limits=_limits(root, _affinity()),
        memory=memory,
        mhz=max(clocks, default=None),
        gpu=gpu,
    )


def _linux_processor(root: Path, cpuinfo: Mapping[str, list[str]]) -> Processor:
    """The processor of `/proc/cpuinfo`; Arm has other names of facts than x86."""
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    implementer = _joined(cpuinfo, "CPU implementer")
    arm_name = " ".join(filter(None, (ARM.get(implementer), platform.machine())))
    core_ids = cpuinfo.get("core id", ())
    cores = set(zip(cpuinfo.get("physical id", ()), core_ids, strict=False))
    threads = len(cpuinfo.get("processor", ())) or os.cpu_count() or 1
    flags = cpuinfo.get("flags") or cpuinfo.get("Features") or [""]
    caches = tuple(_caches(cpu0 / "cache"))
    max_khz = _number(cpu0 / "cpufreq/cpuinfo_max_freq")
    max_mhz = None if max_khz is None else max_khz / 1e3
    governor = _text(cpu0 / "cpufreq/scaling_governor")
    return Processor(
        name=_joined(cpuinfo, "model name") or arm_name,
        vendor=_joined(cpuinfo, "vendor_id") or implementer,
        family=_joined(cpuinfo, "cpu family", "CPU architecture"),
        model=_joined(cpuinfo, "model", "CPU part"),
        stepping=_joined(cpuinfo, "stepping", "CPU revision"),
        cores=len(cores) or threads,
        threads=threads,
        caches=caches,
        flags=_flags(flags[0].split()),
        max_mhz=max_mhz,
        governor=governor or None,
    )


def _affinity() -> int:
    """The threads that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mac(sysctl: Mapping[str, str], gpu: Gpu | None = None) -> Hardware:
    """From the settings that `sysctl` prints on macOS, by name."""
    threads = int(sysctl.get("hw.logicalcpu", 0)) or os.cpu_count() or 1
    cpu = "machdep.cpu"
    processor = Processor(
        name=sysctl.get(f"{cpu}.brand_string") or platform.machine(),
        vendor=sysctl.get(f"{cpu}.vendor", ""),
        family=sysctl.get(f"{cpu}.family") or sysctl.get("hw.cpufamily", ""),
        model=sysctl.get(f"{cpu}.model", ""),
        stepping=sysctl.get(f"{cpu}.stepping", ""),
        cores=int(sysctl.get("hw.physicalcpu", 0)) or threads,
        threads=threads,
        caches=tuple(_mac_caches(sysctl)),
        flags=_flags(_mac_features(sysctl)),
    )
    memory = int(sysctl["hw.memsize"]) if "hw.memsize" in sysctl else None
    return Hardware(
        processor=processor, limits=Limits(threads=threads), memory=memory, gpu=gpu
    )


def _mac_caches(sysctl: Mapping[str, str]) -> Iterator[str]:
    """The caches of the fastest cores: `L2 4096K`."""
    for cache_name, key in MAC_CACHES.items():
        size = sysctl.get(f"hw.perflevel0.{key}") or sysctl.get(f"hw.{key}")
        if size:
            yield f"{cache_name} {int(size) >> 10}K"


def _mac_features(sysctl: Mapping[str, str]) -> set[str]:
    """Instruction sets: switches of Arm that are 1, lists of x86."""
    features = set()
    for name, value in sysctl.items():
        if value == "1":
            feature = name.rpartition(".")[2].lower()
            features.add(feature.removeprefix("feat_"))
    for listed in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
        features.update(sysctl.get(listed, "").lower().split())
    return features


def _sysctl() -> dict[str, str]:
    """What `sysctl` prints, by name; empty if it does not run."""
    command = ["sysctl", *SYSCTL]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    settings = {}
    for line in process.stdout.splitlines():
        name, _, value = line.partition(":")
        settings[name.strip()] = value.strip()
    return settings


@cache
def _gpu(device: "torch.device") -> Gpu:
    """From torch, the file of the driver, and pynvml if it is installed."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    driver = re.search(r"\d+\.\d+[.\d]*", _text(Path("/proc/driver/nvidia/version")))
    power = clock = None
    # A driver raises many kinds of errors; the other facts are known without it.
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
        power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
        clock = float(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    return Gpu(
        name=properties.name,
        memory=properties.total_memory,
        processors=properties.multi_processor_count,
        capability=f"{properties.major}.{properties.minor}",
        driver=driver[0] if driver else "",
        power_watts=power,
        max_mhz=clock,
    )


def _columns(cpuinfo: str) -> dict[str, list[str]]:
    """The values of each fact, of one logical processor after another."""
    columns: dict[str, list[str]] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            columns.setdefault(name.strip(), []).append(value.strip())
    return columns


def _joined(cpuinfo: Mapping[str, list[str]], *names: str) -> str:
    """The different values of the first of these facts that is not empty, joined by +."""
    for name in names:
        values = set(cpuinfo.get(name, ()))
        if joined := "+".join(sorted(values)):
            return joined
    return ""


def _flags(features: Iterable[str]) -> tuple[str, ...]:
    """The features that speed depends on."""
    relevant = {feature for feature in features if FLAGS.fullmatch(feature)}
    return tuple(sorted(relevant))


def _caches(folder: Path) -> Iterator[str]:
    """The caches of a core: `L1d 32K`, `L2 1024K`."""
    for cache_folder in sorted(folder.glob("index*")):
        level = _text(cache_folder / "level")
        kind = _text(cache_folder / "type")
        size = _text(cache_folder / "size")
        letter = kind[:1].lower() if kind != "Unified" else ""
        yield f"L{level}{letter} {size}"


def _limits(root: Path, affinity: int) -> Limits:
    """The tightest limits of the control group and those above it, of version 2 or 1."""
    folders = _group_folders(root)
    cpus = []
    for folder in folders:
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit():
            cpus.append(int(quota) / int(period))
        quota_us = _number(folder / "cpu.cfs_quota_us")  # of version 1
        period_us = _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us:
            cpus.append(quota_us / period_us)
    sizes = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            size = _number(folder / name)
            if size is not None and size < UNLIMITED:
                sizes.append(size)
    return Limits(
        threads=affinity,
        cpus=min(cpus, default=None),
        memory=min(sizes, default=None),
    )


def _group_folders(root: Path) -> list[Path]:
    """The folders of this process's control groups and of the groups above them."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        group = Path(path.strip("/"))
        hierarchy = root / "sys/fs/cgroup" / controllers
        folders += [hierarchy / part for part in (group, *group.parents)]
    return folders


def _number(file: Path) -> int | None:
    """The number in a file; None without a file or a number."""
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
