"""What a workspace at a URL holds, and how tests write into its copies."""

from collections.abc import Callable
from pathlib import Path

import fsspec

from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write

On = Callable[[str], Workspace]


def there(runs: str) -> dict[str, bytes]:
    """The files at the URL."""
    files = fsspec.filesystem("memory")
    base = runs.removeprefix("memory:/") + "/demo/"
    return {path.removeprefix(base): files.cat_file(path) for path in files.find(base)}


def write(path: Path, text: str) -> None:
    with atomic_write(path) as new:
        new.write_text(text)


def drafter(workspace: Workspace, name: str, text: str) -> None:
    folder = workspace.drafter(name)
    write(folder / "model.safetensors", f"weights {text}")
    write(folder / "config.json", f"config {text}")
