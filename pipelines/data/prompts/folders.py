"""Folders of images and videos."""

import os
from collections.abc import Iterator
from pathlib import Path

from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.images import kind_of
from vlmdistill.pipelines.media.resolver import BadRowError


class UnreadFileError(BadRowError):
    """A file of a source that is not read: `detail` is its name."""


def walk(folder: Path) -> Iterator[tuple[Path, OSError | None]]:
    """The files below a folder by name, and the folders that cannot be read with the error.

    Links are followed, and each folder is read once. Hidden files are ignored.
    """
    return _walk(folder, set())


def _walk(
    folder: Path, seen: set[tuple[int, int]]
) -> Iterator[tuple[Path, OSError | None]]:
    """The same, where `seen` holds the device and the inode of each folder that was read."""
    try:
        stat = folder.stat()
        identity = (stat.st_dev, stat.st_ino)
        paths = [] if identity in seen else sorted(folder.iterdir())
    except OSError as error:
        yield folder, error
        return
    seen.add(identity)
    for path in paths:
        if path.name.startswith("."):
            continue
        if os.path.isdir(path):
            yield from _walk(path, seen)
        else:
            yield path, None


def media_rows(folder: Path) -> Iterator[Row]:
    """A row for each image and video below a folder; other files are rows with a problem."""
    source = str(folder.resolve())
    dataset = folder.resolve().name
    for number, (file, error) in enumerate(walk(folder), 1):
        name = str(file.relative_to(folder))
        kind = kind_of(file.name)
        problem: BadRowError | None = None
        if error:
            problem = unreadable(name, error)
        elif not kind:
            problem = UnreadFileError("neither image nor video", name)
        yield Row(source, dataset, number, {kind: name}, problem=problem)


def unreadable(name: str, error: OSError) -> BadRowError:
    """The problem of a folder that cannot be read."""
    return BadRowError("unreadable folder", f"{name}: {error.strerror}")
