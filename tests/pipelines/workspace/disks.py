"""What a workspace at a URL holds, and how tests write into its copies."""

from collections.abc import Callable
from pathlib import Path

import fsspec

from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.sharing.mirror import VersionedFolder

On = Callable[[str], Workspace]


def published(runs: str, part: str) -> dict[str, str]:
    """The files of a part at the URL, which are all there and as their version says."""
    found = VersionedFolder(Remote(f"{runs}/demo-small/{part}"))
    latest = found.latest()
    texts = {}
    for name, stored in latest.files.items() if latest else ():
        data = found.backend.read(f"files/{stored.file}")
        assert len(data) == stored.size
        texts[name] = data.decode()
    return texts


def names_at(runs: str) -> list[str]:
    """Every object of the workspace at the URL."""
    base = runs.removeprefix("memory:/") + "/demo-small/"
    return [path.removeprefix(base) for path in fsspec.filesystem("memory").find(base)]


def write(path: Path, text: str) -> None:
    with atomic_write(path) as new:
        new.write_text(text)


def drafter(workspace: Workspace, name: str, text: str) -> None:
    folder = workspace.drafter(name)
    write(folder / "model.safetensors", f"weights {text}")
    write(folder / "config.json", f"config {text}")
