"""Files at URLs, and their copies on this machine: `s3://bucket/a/1.png` is `<cache>/s3/bucket/a/1.png`.

So is `s3a://bucket/a/1.png`.

The cache is the folder in VLMDISTILL_CACHE, else `vlmdistill` in XDG_CACHE_HOME or ~/.cache.
"""

import contextlib
import os
from pathlib import Path

from vlmdistill.pipelines.media.images import MediaError, of_the_web
from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.backends.local import atomic_folder, atomic_write
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError, one_line

PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Of object stores, not of the web."""
NAMED_AS = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""The same object stores under one protocol each."""
VARIABLE = "VLMDISTILL_CACHE"


def cache() -> Path:
    """The folder of all copies."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(VARIABLE) or f"{home}/vlmdistill").expanduser().resolve()


def is_url(name: str | Path) -> bool:
    """Whether this names an object of an object store."""
    protocol, separator, _ = str(name).partition("://")
    return bool(separator) and protocol in PROTOCOLS


def copy_of(url: str) -> Path:
    """Where the copy of a URL is, or would be; DataError if the URL leads elsewhere."""
    protocol, _, rest = url.partition("://")
    names = rest.strip("/").split("/")
    if {"", ".", ".."} & {*names} or "\0" in rest:
        raise DataError(
            f"{url} names no object that can be copied: give a URL such as s3://bucket/name"
        )
    return cache().joinpath(NAMED_AS.get(protocol, protocol), *names)


def address(path: str | Path) -> str:
    """The URL of a copy; the absolute path of any other file, without symbolic links."""
    full = os.path.realpath(path)
    copies = f"{cache()}/"
    if not full.startswith(copies):
        return full
    protocol, _, rest = full.removeprefix(copies).partition("/")
    return f"{protocol}://{rest}" if protocol in PROTOCOLS else full


def shown(path: Path) -> str:
    """The URL of a copy; else the path as it is."""
    name = address(path)
    return name if is_url(name) else str(path)


def at_hand(name: str | Path, again: bool = False) -> Path:
    """The path of a file, or of a folder of images; of a URL that of its copy, which is fetched first.

    If there is a copy, it is fetched only if `again`. MediaError when the URL cannot be read.
    """
    if not is_url(name):
        if "://" in str(name):
            raise of_the_web(name)
        return Path(name)
    url = str(name)
    path = copy_of(url)
    if again or not path.exists():
        fetch(url, path)
    return path


def fetch(url: str, path: Path) -> None:
    """Copy a file, or a folder of images, from a URL to a path; MediaError if it cannot be read."""
    folder, _, leaf = url.rpartition("/")
    try:
        backend = open_backend(folder)
        size = backend.size(leaf)
        if size is not None:
            _fetch(backend, leaf, size, path)
            return
        frames = backend.list_files(leaf)
        if not frames:
            raise MediaError(f"{url} does not exist")
        _fetch_all(backend, url, frames, path)
    except (OSError, StoreError) as error:
        raise MediaError(f"{url} cannot be read: {one_line(error)}") from None


def _fetch_all(backend: Backend, url: str, sizes: dict[str, int], folder: Path) -> None:
    leaf = url.rpartition("/")[2]
    # If another process is faster, its folder stays.
    with contextlib.suppress(FileExistsError), atomic_folder(folder) as aside:
        for name, size in sizes.items():
            inside = copy_of(f"{url}/{name}").relative_to(copy_of(url))
            _fetch(backend, f"{leaf}/{name}", size, aside / inside)


def _fetch(backend: Backend, name: str, size: int, path: Path) -> None:
    with atomic_write(path) as new:
        backend.copy(name, size, new)
