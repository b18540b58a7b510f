"""Images and videos that prompts refer to: found, opened once, and named by their content."""

import base64
import binascii
import io
import mimetypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.importers import BadRowError, Media
from vlmdistill.pipelines.workspace import written_aside

THREADS = 8


class Shelf:
    """Finds media files, checks that they can be read, and keeps those that come as bytes.

    A path is looked for under `images` first, then beside the file that names it. Bytes (datasets,
    data URLs) are written into `keep` under the hash of their content.
    """

    def __init__(self, images: Path | None, keep: Path) -> None:
        self.images = images
        self.keep = keep
        self._checked: dict[Path, str | BadRowError] = {}

    def fetch(self, wanted: Iterable[tuple[Media, Path]]) -> None:
        """Check many files at once; `place` then finds them checked."""
        paths = {path for media, beside in wanted if isinstance(path := self._find(media, beside), Path)}
        fresh = sorted(paths - self._checked.keys())
        with ThreadPoolExecutor(THREADS) as pool:
            self._checked.update(zip(fresh, pool.map(_digest_file, fresh), strict=True))

    def place(self, part: dict[str, Any], beside: Path) -> str:
        """Give a part its `path` and `digest`; return the digest. BadRowError says why it has none."""
        found = self._find(part["media"], beside)
        if isinstance(found, BadRowError):
            raise found
        if isinstance(found, bytes):
            found = self._store(found)
        if found not in self._checked:
            self._checked[found] = _digest_file(found)
        digest = self._checked[found]
        if isinstance(digest, BadRowError):
            raise digest
        part["path"], part["digest"] = str(found), digest
        return digest

    def _find(self, media: Media, beside: Path) -> Path | bytes | BadRowError:
        """Where a media file is; its bytes when they came with the row; or what is wrong."""
        if isinstance(media, bytes):
            return media
        if media.startswith("data:"):
            try:
                return base64.b64decode(media.partition(",")[2], validate=True)
            except binascii.Error as error:
                return BadRowError("unreadable image", f"data URL: {error}")
        if "://" in media:
            return BadRowError("image is a URL", f"{media[:200]}: download it and give its path")
        places = [folder / media for folder in (self.images, beside) if folder]
        try:
            for place in places:
                if place.is_file():
                    return place.resolve()
        except OSError as error:  # a name too long to be one
            return BadRowError("missing image", f"{media[:80]}: {error.strerror}")
        return BadRowError("missing image", " and ".join(map(str, dict.fromkeys(places))))

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
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return (image.format or "").lower()
    except (UnidentifiedImageError, OSError):
        return None


def _digest_file(path: Path) -> str | BadRowError:
    """The hash of a file's bytes, if it is a video or an image that decodes to its end."""
    from blake3 import blake3
    from PIL import Image

    try:
        if path.stat().st_size == 0:
            return BadRowError("unreadable image", f"{path} is empty")
        if not (mimetypes.guess_type(path.name)[0] or "").startswith("video/"):
            with Image.open(path) as image:
                # JPEG is read to its end, but an eighth of each side is decoded.
                image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
                image.load()
        hasher = blake3()
        hasher.update_mmap(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return BadRowError("unreadable image", f"{path}: {error}")
    return str(hasher.hexdigest()[:32])
