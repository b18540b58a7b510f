"""Find the images and videos of prompts, check that they decode, and hash their content."""

import contextlib
import errno
import io
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vlmdistill.pipelines.media import frames
from vlmdistill.pipelines.media.images import (
    decoding,
    kind_of,
    name_of,
    open_image,
    require_one_page,
    require_whole,
)
from vlmdistill.pipelines.media.urls import address, at_hand, copy_of, is_url
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, lone_surrogate

Media = str | bytes  # a path from the row, or the content of the file
THREADS = 8
LARGE = 2**24  # pixels of an image of which one is decoded at a time
LARGE_IMAGE = threading.Lock()


class BadRowError(Exception):
    """A row that cannot be used. Rows are counted by `reason`; `detail` names the value."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class MediaResolver:
    """Finds media files, checks that they can be read, and keeps those that come as bytes.

    A path is relative to `images`, else to the first of the row's folders that has it. Bytes (from datasets
    and data URLs) are written into `keep`, named by their hash. A video is a file or a folder of images. What
    is in an object store is named by its URL, and fetched.
    """

    def __init__(self, images: Path | None, keep: Path) -> None:
        self.images = images
        self.keep = keep
        self._checked: dict[tuple[str, Path], str | BadRowError] = {}
        self._named: set[Path] = set()
        """Copies of URLs that rows name, which are fetched anew."""

    def check_all(
        self, wanted: Iterable[tuple[dict[str, Any], Sequence[Path]]]
    ) -> None:
        """Check the files of many parts in parallel, ahead of `resolve`."""
        files = set()
        for part, folders in wanted:
            found = self._find(part["type"], part["media"], folders)
            if isinstance(found, Path):
                files.add((part["type"], found))
        fresh = sorted(files - self._checked.keys())
        with ThreadPoolExecutor(THREADS) as pool:
            digests = pool.map(lambda file: self._digest(*file), fresh)
            self._checked.update(zip(fresh, digests, strict=True))

    def resolve(self, part: dict[str, Any], *folders: Path) -> str:
        """Set the `path` and `digest` of a part and return the digest; BadRowError if it cannot be used."""
        kind = part["type"]
        path = self._find(kind, part["media"], folders)
        if isinstance(path, BadRowError):
            raise path
        if isinstance(path, bytes):
            path = self._store(path)
        if (kind, path) not in self._checked:
            self._checked[kind, path] = self._digest(kind, path)
        digest = self._checked[kind, path]
        if isinstance(digest, BadRowError):
            raise digest
        part["path"] = address(path)
        part["digest"] = digest
        return digest

    def _digest(self, kind: str, path: Path) -> str | BadRowError:
        """The hash of a file, after decoding an image fully or the first frame of a video; or the problem."""
        try:
            path = at_hand(address(path), again=path in self._named)
            if kind == "image":
                _decode(path)
            elif frames.probe(path).total < 2 and kind_of(path.name) == "image":
                return BadRowError(
                    "an image as a video",
                    f"{path} is a still picture: name it an image",
                )
            return frames.digest(path)
        except frames.NoDecoderError:  # not a problem of one row
            raise
        except DataError as error:
            return BadRowError(f"unreadable {kind}", str(error))
        except OSError as error:
            return BadRowError(f"unreadable {kind}", f"{path}: {error}")

    def _find(
        self, kind: str, media: Media, folders: Sequence[Path]
    ) -> Path | bytes | BadRowError:
        """The path of a media file, or its bytes if the row holds them, or the problem."""
        if isinstance(media, bytes):
            return media
        if is_url(media):
            return self._copy_of(kind, media)
        if "://" in media:
            return BadRowError(
                f"{kind} is a URL", f"{media[:200]}: download it and give its path"
            )
        searched = [self.images, *folders] if self.images else folders
        paths = [folder / media for folder in searched]
        try:
            for path in paths:
                found = _usable(kind, path)
                if found is not None:
                    return found
        except OSError as error:  # for example a name that is too long
            is_long = error.errno == errno.ENAMETOOLONG
            hint = "write base64 as a data URL" if is_long else "give a path"
            return BadRowError(
                f"missing {kind}", f"{media[:80]}: {error.strerror}: {hint}"
            )
        similar = next(filter(None, map(_other_spelling, paths)), None)
        if similar:
            return BadRowError(
                f"{kind} of another spelling", f"{media}: there is {similar}"
            )
        searched_paths = " and ".join(dict.fromkeys(map(_described, paths)))
        return BadRowError(f"missing {kind}", searched_paths)

    def _copy_of(self, kind: str, url: str) -> Path | BadRowError:
        """Where the copy of a URL is, or will be."""
        try:
            copy = copy_of(url)
        except DataError as error:
            return BadRowError(f"missing {kind}", str(error))
        self._named.add(copy)
        return copy

    def _store(self, data: bytes) -> Path:
        """Write bytes into a file named by their hash, unless it exists."""
        suffix = "." + (_image_format(data) or "bin")
        path = self.keep.resolve() / (name_of(data) + suffix)
        if not path.exists():
            with atomic_write(path) as file:
                file.write_bytes(data)
        return path


def _described(path: Path) -> str:
    """A path that leads to no file, with what it is a link to."""
    return f"{path} (a link to {path.readlink()})" if path.is_symlink() else str(path)


def _usable(kind: str, path: Path) -> Path | BadRowError | None:
    """The file, or the folder of frames, that a path leads to; None if there is none."""
    if lone_surrogate(str(path)):
        return BadRowError("name not UTF-8", f"{kind} {path}")
    if not path.is_file() and not (kind == "video" and path.is_dir()):
        return None
    resolved = path.resolve()
    if lone_surrogate(str(resolved)):
        return BadRowError("name not UTF-8", f"{kind} {path}: it leads to {resolved}")
    return resolved


def _other_spelling(path: Path) -> Path | None:
    """The file that a name means on another system or in a URL; None if there is none.

    It has backslashes, percent signs, other letters of a case, or another Unicode form of the same letters.
    """
    plain = unquote(str(path)).replace("\\", "/").replace("\0", "")
    root, *names = plain.split("/")
    similar = Path(root or "/")
    for name in names:
        if not (similar / name).exists():
            name = _names_in(similar).get(_folded(name), "")
        if not name:
            return None
        similar = similar / name
    return similar if similar.is_file() else None


@lru_cache(64)
def _names_in(folder: Path) -> dict[str, str]:
    """The names in a folder by what other systems take for the same."""
    try:
        return {_folded(path.name): path.name for path in folder.iterdir()}
    except OSError:
        return {}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _image_format(data: bytes) -> str | None:
    try:
        with open_image(io.BytesIO(data)) as image:
            return (image.format or "").lower()
    except OSError:
        return None


def _decode(path: Path) -> None:
    """Decode an image fully; OSError if it is damaged, or has several pages or frames."""
    if path.stat().st_size == 0:
        raise OSError("the file is empty")
    with open_image(path) as image:
        require_one_page(image)
        is_large = image.width * image.height > LARGE
    # It may take a thousand times its bytes.
    with LARGE_IMAGE if is_large else contextlib.nullcontext():
        _decode_pixels(path)


def _decode_pixels(path: Path) -> None:
    """The same of an image of one page. Its pixels are freed when this returns."""
    with open_image(path) as image:
        # A JPEG is read fully, but decoded at an eighth of its size.
        small = (max(1, image.width // 8), max(1, image.height // 8))
        with decoding():
            image.draft("RGB", small)
        require_whole(image)
