"""Images and videos that prompts refer to: found, opened once, and named by their content."""

import base64
import binascii
import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlmdistill.pipelines import frames
from vlmdistill.pipelines.importers import BadRowError, Media, half_character
from vlmdistill.pipelines.pictures import BROKEN, upright
from vlmdistill.pipelines.workspace import written_aside
from vlmdistill.stores.errors import DataError

THREADS = 8


class Shelf:
    """Finds media files, checks that they can be read, and keeps those that come as bytes.

    A path is looked for under `images` first, then beside the file that names it. Bytes (datasets,
    data URLs) are written into `keep` under the hash of their content. A video is a file or a folder of
    images.
    """

    def __init__(self, images: Path | None, keep: Path) -> None:
        self.images = images
        self.keep = keep
        self._checked: dict[tuple[str, Path], str | BadRowError] = {}

    def fetch(self, wanted: Iterable[tuple[dict[str, Any], Path]]) -> None:
        """Check the files of many parts at once; `place` then finds them checked."""
        found = [(part["type"], self._find(part["type"], part["media"], beside)) for part, beside in wanted]
        paths = {(kind, path) for kind, path in found if isinstance(path, Path)}
        fresh = sorted(paths - self._checked.keys())
        with ThreadPoolExecutor(THREADS) as pool:
            self._checked.update(zip(fresh, pool.map(lambda one: _digest(*one), fresh), strict=True))

    def place(self, part: dict[str, Any], beside: Path) -> str:
        """Give a part its `path` and `digest`; return the digest. BadRowError says why it has none."""
        kind, found = part["type"], self._find(part["type"], part["media"], beside)
        if isinstance(found, BadRowError):
            raise found
        if isinstance(found, bytes):
            found = self._store(found)
        if (kind, found) not in self._checked:
            self._checked[kind, found] = _digest(kind, found)
        digest = self._checked[kind, found]
        if isinstance(digest, BadRowError):
            raise digest
        part["path"], part["digest"] = str(found), digest
        return digest

    def _find(self, kind: str, media: Media, beside: Path) -> Path | bytes | BadRowError:
        """Where a media file is; its bytes when they came with the row; or what is wrong."""
        if isinstance(media, bytes):
            return media
        if media.startswith("data:"):
            try:
                return base64.b64decode(media.partition(",")[2], validate=True)
            except binascii.Error as error:
                return BadRowError(f"unreadable {kind}", f"data URL: {error}")
        if "://" in media:
            return BadRowError(f"{kind} is a URL", f"{media[:200]}: download it and give its path")
        places = [folder / media for folder in (self.images, beside) if folder]
        try:
            for place in places:
                if half_character(str(place)):
                    return BadRowError("name not UTF-8", f"{kind} {place}")
                if place.is_file() or (kind == "video" and place.is_dir()):
                    return place.resolve()
        except OSError as error:  # a name too long to be one
            return BadRowError(f"missing {kind}", f"{media[:80]}: {error.strerror}")
        return BadRowError(f"missing {kind}", " and ".join(map(str, dict.fromkeys(places))))

    def _store(self, data: bytes) -> Path:
        """Write bytes under the name of their content, once."""
        from blake3 import blake3

        suffix = "." + (_image_format(data) or "bin")
        path = self.keep.resolve() / (blake3(data).hexdigest()[:32] + suffix)
        if not path.exists():
            with written_aside(path) as aside:
                aside.write_bytes(data)
        return path


def _image_format(data: bytes) -> str | None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return (image.format or "").lower()
    except BROKEN:
        return None


def _digest(kind: str, path: Path) -> str | BadRowError:
    """The hash of the bytes of an image that decodes to its end, or of a video that begins to decode."""
    from blake3 import blake3

    hasher = blake3()
    try:
        if kind == "video":
            frames.probe(path)
        else:
            _decode(path)
        for file in frames.files(path):
            hasher.update_mmap(file)
    except frames.NoDecoderError:  # no matter of one row
        raise
    except (DataError, *BROKEN) as error:
        where = "" if isinstance(error, DataError) else f"{path}: "
        return BadRowError(f"unreadable {kind}", f"{where}{error}")
    return str(hasher.hexdigest()[:32])


def _decode(path: Path) -> None:
    """Read an image to its end, as it will be shown; one of BROKEN where that fails."""
    from PIL import Image

    if path.stat().st_size == 0:
        raise OSError("the file is empty")
    with Image.open(path) as image:
        # JPEG is read to its end, but an eighth of each side is decoded.
        image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
        upright(image)
