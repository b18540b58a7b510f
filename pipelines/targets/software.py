"""The software of this process, as evaluations record it: versions, git commit and command line."""

import contextlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

PACKAGES = ("vlmdistill", "torch", "transformers")
SOURCES = (
    "src",
    "cli",
    "drafters",
    "pipelines",
    "stores",
)  # of the package, in its repository
GIT_SECONDS = 30
SECRET = re.compile(
    r"(?:^|[-_.])(?:key|token|secret|password)$", re.IGNORECASE
)  # the name of an option
HIDDEN = "***"


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a process ran."""

    python: str
    vlmdistill: str
    torch: str
    transformers: str
    commit: str | None = (
        None  # of the package; None: it was installed without its repository
    )
    command: str = ""  # as it was typed, without secrets

    @property
    def installed(self) -> "Software":
        """The versions alone: another commit or command line makes no other numbers by itself."""
        return replace(self, commit=None, command="")

    @property
    def facts(self) -> dict[str, str]:
        """What a report says of it."""
        versions = [f"{name} {getattr(self, name)}" for name in (*PACKAGES, "python")]
        known = {
            "software": ", ".join(versions),
            "commit": self.commit or "",
            "command": self.command,
        }
        return {name: value for name, value in known.items() if value}


def of_this_process() -> Software:
    """The software that runs now."""
    return Software(**versions(PACKAGES), commit=commit(), command=command_line())


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of Python and of each package here; empty if it is not installed."""
    found = {"python": platform.python_version(), **dict.fromkeys(packages, "")}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str | None:
    """The commit of the package, with `-dirty` if its files differ from it; None without a repository."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # of another project, if it is in a folder above
        return None
    status = (
        "git",
        "--no-optional-locks",
        "status",
        "--porcelain=v2",
        "--branch",
        "--",
        *SOURCES,
    )
    try:
        done = subprocess.run(
            status,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    known = [
        line.split()[-1][:12] for line in lines if line.startswith("# branch.oid ")
    ]
    changed = any(not line.startswith("#") for line in lines)
    return f"{known[0]}-dirty" if changed and known else known[0] if known else None


def command_line() -> str:
    """The command of this process, without secrets."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = (
        ["python", "-m", spec.name.removesuffix(".__main__")]
        if spec
        else [Path(sys.argv[0]).name]
    )
    return without_secrets([*start, *sys.argv[1:]])


def without_secrets(arguments: Iterable[str]) -> str:
    """A command line without the passwords and queries of URLs, and values of options such as --api-key."""
    shown, secret = [], False
    for argument in arguments:
        name, is_set, _ = argument.partition("=")
        if secret:
            argument = HIDDEN
        elif is_set and SECRET.search(name):
            argument = f"{name}={HIDDEN}"
        elif "://" in argument:
            argument = re.sub(r"://[^/\s]*@", f"://{HIDDEN}@", argument)
            argument = re.sub(r"\?[^#\s]+", f"?{HIDDEN}", argument)
        secret = argument.startswith("-") and not is_set and bool(SECRET.search(name))
        shown.append(argument)
    return (
        shlex.join(shown).encode(errors="replace").decode()
    )  # a file's name may not be UTF-8
