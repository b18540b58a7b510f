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
SOURCES = ("src", "cli", "drafters", "pipelines", "stores")  # of the package
GIT_SECONDS = 30
GIT_STATUS = (
    "git",
    "--no-optional-locks",
    "status",
    "--porcelain=v2",
    "--branch",
    "--",
)
# The name of an option with a secret value.
SECRET = re.compile(r"(?:^|[-_.])(?:key|token|secret|password)$", re.IGNORECASE)
HIDDEN = "***"


@dataclass(frozen=True, kw_only=True)
class Software:
    """The software of a process."""

    python: str
    vlmdistill: str
    torch: str
    transformers: str
    commit: str | None = None
    """Of the package; None if it was installed without its repository."""
    command: str = ""  # as it was typed, without secrets

    @property
    def installed(self) -> "Software":
        """The versions alone, without commit and command line, which decide no numbers."""
        return replace(self, commit=None, command="")

    @property
    def facts(self) -> dict[str, str]:
        """The lines of a report on the software."""
        versions = [f"{name} {getattr(self, name)}" for name in (*PACKAGES, "python")]
        facts = {"software": ", ".join(versions)}
        if self.commit:
            facts["commit"] = self.commit
        if self.command:
            facts["command"] = self.command
        return facts


def of_this_process() -> Software:
    """The software that runs now."""
    return Software(**versions(PACKAGES), commit=commit(), command=command_line())


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of Python and of each package; empty for one that is not installed."""
    installed = {"python": platform.python_version()}
    for name in packages:
        installed[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def commit() -> str | None:
    """The commit of the package, with `-dirty` if its files differ from it; None without a repository."""
    # In its repository, src/vlmdistill has links to the folders of its modules.
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # of another project, if it is in a folder above
        return None
    try:
        status = subprocess.run(
            (*GIT_STATUS, *SOURCES),
            cwd=root,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.stdout.splitlines()
    is_clean = all(line.startswith("#") for line in lines)
    for line in lines:
        if line.startswith("# branch.oid "):
            head = line.split()[-1][:12]
            return head if is_clean else f"{head}-dirty"
    return None


def command_line() -> str:
    """The command of this process, without secrets."""
    program = [Path(sys.argv[0]).name]
    if spec := getattr(sys.modules["__main__"], "__spec__", None):
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    return without_secrets([*program, *sys.argv[1:]])


def without_secrets(arguments: Iterable[str]) -> str:
    """A command line without secrets.

    Secrets are the passwords and queries of URLs, and the values of options such as
    --api-key.
    """
    shown: list[str] = []
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        names_secret = bool(SECRET.search(name))
        if is_secret:
            argument = HIDDEN
        elif equals and names_secret:
            argument = f"{name}={HIDDEN}"
        elif "://" in argument:
            argument = re.sub(r"://[^/\s]*@", f"://{HIDDEN}@", argument)
            argument = re.sub(r"\?[^#\s]+", f"?{HIDDEN}", argument)
        is_secret = argument.startswith("-") and not equals and names_secret
        shown.append(argument)
    # The name of a file may not be UTF-8.
    return shlex.join(shown).encode(errors="replace").decode()
