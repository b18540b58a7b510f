"""What is read of a machine, from planted files of the kernel and lines of `sysctl`."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.decoding.hardware import Gpu, Hardware

ZEN5 = """processor : {at}
vendor_id : AuthenticAMD
cpu family : 26
model : 2
model name : AMD EPYC
stepping : 1
cpu MHz : 259{at}.5
physical id : 0
core id : {core}
flags : fpu smep avx avx2 avx512f avx512_bf16 hypervisor
"""
GRAVITON = """processor : {at}
Features : fp asimd sve bf16 i8mm crc32
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x1
CPU part : {part}
CPU revision : 1
"""
MAC = {
    "machdep.cpu.brand_string": "Apple M2",
    "hw.physicalcpu": "8",
    "hw.logicalcpu": "8",
    "hw.memsize": "17179869184",
    "hw.cpufamily": "-634136515",
    "hw.perflevel0.l1dcachesize": "131072",
    "hw.l2cachesize": "4194304",
    "hw.optional.neon": "1",
    "hw.optional.arm.FEAT_BF16": "1",
    "hw.optional.arm.FEAT_SME": "0",
}
CGROUPS = {
    "version 2": {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "150000 100000",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/memory.max": "2097152",
    },
    "version 1": {
        "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/a\n0::/",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2097152",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    },
}


def machine(root: Path, files: dict[str, str]) -> Hardware:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return hardware.linux(root)


def zen5(root: Path, *lines: tuple[str, str], **files: str) -> Hardware:
    """A machine of two cores with two threads each; `lines` of its description are replaced."""
    text = "\n".join(ZEN5.format(at=at, core=at // 2) for at in range(4))
    for old, new in lines:
        assert old in text
        text = text.replace(old, new)
    return machine(root, {"proc/cpuinfo": text, **files})


def test_an_x86_processor_is_told_by_its_numbers(tmp_path: Path) -> None:
    cache = {"level": "1", "type": "Data", "size": "48K"}
    folder = "sys/devices/system/cpu/cpu0"
    files = {f"{folder}/cache/index0/{name}": text for name, text in cache.items()}
    files |= {f"{folder}/cpufreq/scaling_governor": "powersave"}
    files |= {
        f"{folder}/cpufreq/cpuinfo_max_freq": "4100000",
        "proc/meminfo": "MemTotal:  1024 kB",
    }
    seen = zen5(tmp_path, **files)
    cpu = seen.processor
    assert (cpu.vendor, cpu.family, cpu.model, cpu.stepping) == (
        "AuthenticAMD",
        "26",
        "2",
        "1",
    )
    assert (cpu.cores, cpu.threads, cpu.caches) == (2, 4, ("L1d 48K",))
    assert cpu.flags == ("avx", "avx2", "avx512_bf16", "avx512f", "hypervisor")
    assert (cpu.governor, cpu.max_mhz, seen.mhz, seen.memory) == (
        "powersave",
        4100,
        2593.5,
        1 << 20,
    )
    assert all(
        part in seen.name
        for part in ("AMD EPYC", "26/2/1", "avx512_bf16", seen.identity)
    )


def test_an_arm_processor_has_the_numbers_of_all_its_kinds_of_cores(
    tmp_path: Path,
) -> None:
    text = "\n".join(GRAVITON.format(at=at, part=f"0xd4{at % 2}") for at in range(4))
    cpu = machine(tmp_path, {"proc/cpuinfo": text}).processor
    assert (cpu.vendor, cpu.family, cpu.model, cpu.stepping) == (
        "0x41",
        "8",
        "0xd40+0xd41",
        "1",
    )
    assert cpu.name.startswith("Arm")
    assert (cpu.cores, cpu.threads) == (4, 4)
    assert cpu.flags == ("asimd", "bf16", "i8mm", "sve")


def test_a_mac_is_read_from_its_settings() -> None:
    seen = hardware.mac(MAC)
    cpu = seen.processor
    assert (cpu.name, cpu.family, cpu.cores, seen.memory) == (
        "Apple M2",
        "-634136515",
        8,
        16 << 30,
    )
    assert (cpu.caches, cpu.flags) == (("L1d 128K", "L2 4096K"), ("bf16", "neon"))


@pytest.mark.parametrize("version", CGROUPS)
def test_the_tightest_limit_of_a_control_group_and_those_above_counts(
    version: str, tmp_path: Path
) -> None:
    limits = zen5(tmp_path, **CGROUPS[version]).limits
    assert (limits.cpus, limits.memory) == (1.5, 2 << 20)


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    for seen in (hardware.linux(tmp_path), hardware.mac({})):
        assert seen.processor.name
        assert seen.processor.threads >= 1
        assert seen.identity in seen.name


@pytest.mark.parametrize(
    "lines",
    [
        ("cpu family : 26", "cpu family : 25"),
        ("model : 2", "model : 17"),
        ("avx512_bf16 ", ""),
    ],
    ids=["family", "model", "flags"],
)
def test_processors_of_one_name_are_told_apart(
    lines: tuple[str, str], tmp_path: Path
) -> None:
    one, other = zen5(tmp_path / "one"), zen5(tmp_path / "other", lines)
    assert one.processor.name == other.processor.name
    assert one.identity != other.identity
    assert one.name != other.name


def test_a_machine_is_the_same_whatever_its_clock_at_that_moment_and_its_free_memory(
    tmp_path: Path,
) -> None:
    one = zen5(tmp_path / "one")
    other = zen5(
        tmp_path / "other",
        ("MHz : 259", "MHz : 311"),
        **{"proc/meminfo": "MemTotal: 9 kB"},
    )
    assert one.mhz != other.mhz
    assert one.name == other.name


def test_limits_and_a_gpu_make_another_machine(tmp_path: Path) -> None:
    one = zen5(tmp_path / "one")
    small = zen5(tmp_path / "small", **CGROUPS["version 2"])
    gpu = Gpu(
        name="NVIDIA A100",
        memory=80 << 30,
        processors=108,
        capability="8.0",
        driver="550.54",
    )
    fast = dataclasses.replace(one, gpu=gpu)
    slow = dataclasses.replace(one, gpu=dataclasses.replace(gpu, power_watts=300.0))
    assert len({some.identity for some in (one, small, fast, slow)}) == 4
    assert slow.name.startswith("NVIDIA A100, 80 GiB, 300 W")


def test_this_machine_is_read_and_survives_its_record() -> None:
    seen = hardware.of(torch.device("cpu"))
    assert seen.name == hardware.of(torch.device("cpu")).name
    assert seen.gpu is None
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Hardware) == seen
