"""What vlmdistill needs on a GPU machine without a network, in some 40 MB.

    python -m benchmarks.gpu_kit build .kit          # here (`make gpu-kit`)
    python3 benchmarks/gpu_kit.py install .kit /tmp/site     # there

The machine has Python 3.12 on x86-64, torch and transformers with what they need,
pyarrow, pillow and pytest; it lacks zarr, polars, msgspec, blake3 and DeepSpeed. Ray is
not needed with `--workers 0`. Versions are those of constraints.txt. Two packages carry
symbols for debuggers, which `strip` removes: 63 MB of wheels become 35.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")
WHEELS = (
    "zarr",
    "google-crc32c",
    "donfig",
    "msgspec",
    "blake3",
    "polars",
    "hjson",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
)
STRIPPED = ("numcodecs", "polars-runtime-32")
BUILT = "deepspeed"  # a source package


def versions() -> dict[str, str]:
    """The pinned version of each package."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, equals, version = line.partition("==")
        if equals:
            pins[name.lower().replace("_", "-")] = version
    return pins


def pinned(name: str) -> str:
    """`name==version`."""
    return f"{name}=={versions()[name.lower().replace('_', '-')]}"


def pip(*arguments: str, **environment: str) -> None:
    """Run pip of this Python."""
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(command, check=True, env=os.environ | environment)


def download(folder: Path, names: tuple[str, ...]) -> None:
    """The wheels of packages for the machine."""
    platforms = [f"manylinux_{glibc}_x86_64" for glibc in PLATFORMS]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options = [f"--platform={platform}" for platform in platforms]
    pip(
        "download", "--no-deps", "--only-binary=:all:", "--implementation=cp",
        f"--python-version={PYTHON}", *options, f"--dest={folder}", *map(pinned, names),
    )  # fmt: skip


def strip(wheel: Path, archive: Path) -> None:
    """Unpack a wheel, strip its libraries, and pack all as a tar.xz."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        libraries = [str(library) for library in Path(folder).rglob("*.so")]
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
        with tarfile.open(archive, "w:xz") as packed_again:
            packed_again.add(folder, ".")


def build(kit: Path) -> None:
    """Make the kit; some minutes, for the most part of compressing."""
    kit.mkdir(parents=True, exist_ok=True)
    for file in kit.iterdir():
        file.unlink()
    download(kit, WHEELS)
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), STRIPPED)
        for wheel in Path(folder).glob("*.whl"):
            strip(wheel, kit / f"{wheel.name.partition('-')[0]}.tar.xz")
    # Without compiled operators, which the machine's own torch would have to build.
    options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={kit}", pinned(BUILT))
    pip("wheel", *options, DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    size = sum(file.stat().st_size for file in kit.iterdir())
    print(f"{kit}: {len([*kit.iterdir()])} files, {size / 1e6:.1f} MB")


def install(kit: Path, site: Path) -> None:
    """Unpack the kit into a folder for PYTHONPATH."""
    wheels = map(str, kit.glob("*.whl"))
    pip(
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",
        f"--target={site}",
        *wheels,
    )
    for archive in kit.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(site, filter="data")


def main() -> None:
    """Build or install."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build", help="download and pack, with a network")
    building.add_argument("kit", type=Path)
    installing = actions.add_parser("install", help="unpack, without one")
    installing.add_argument("kit", type=Path)
    installing.add_argument("site", type=Path)
    options = parser.parse_args()
    if options.action == "build":
        build(options.kit)
    else:
        install(options.kit, options.site)


if __name__ == "__main__":
    main()
