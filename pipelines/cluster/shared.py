"""The check that every machine of a cluster sees the same model, media and store as this machine."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.media.urls import at_hand
from vlmdistill.pipelines.targets.checkpoints.fingerprint import Fingerprint, checkpoint
from vlmdistill.stores.backends.backend import STAGING, Backend
from vlmdistill.stores.errors import (
    FOR_USER,
    DataError,
    StoreError,
    TargetError,
    one_line,
)
from vlmdistill.stores.store import require_room

MEDIA = 64  # files that are checked on each machine
LOOKED_AT = 4096  # prompts
ADVICE = "put it on a folder that all machines share"


class HasFiles(Protocol):
    """A prompt, as far as its images and videos go."""

    @property
    def files(self) -> Sequence[str]:
        """Their paths or URLs."""


@dataclass(frozen=True)
class Shared:
    """The check; a worker calls it before it loads anything."""

    model: str  # a name or an absolute path
    checkpoint: Fingerprint | None  # None: any
    media: tuple[str, ...] = ()  # files that exist on this machine
    store: Backend | None = None  # None if workers do not write
    mark: str = ""  # a file that this run has written into the store

    def __call__(self) -> None:
        """TargetError, DataError or StoreError that names what this machine does not see, and what to do."""
        self.check_model()
        self.check_media()
        self.check_store()

    def check_model(self) -> None:
        """TargetError if the model is missing or another one."""
        try:
            hashes = vars(checkpoint(self.model))
        except TargetError as error:
            raise TargetError(
                f"cannot find the model {self.model}: {ADVICE} ({one_line(error)})"
            ) from None
        if self.checkpoint is None:
            return
        expected = vars(self.checkpoint)
        for name in ("config", "weights", "processor", "template"):
            if hashes[name] != expected[name]:
                raise TargetError(
                    f"the model {self.model} is a different one ({name}: {hashes[name]}, not "
                    f"{expected[name]}): {ADVICE}, or copy it to this machine again"
                )

    def check_media(self) -> None:
        """DataError if files are missing."""
        missing = [path for path in self.media if not os.access(_local(path), os.R_OK)]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(self.media)} checked images and videos cannot be read, such as "
                f"{missing[0]}: put them on a folder that all machines share, or under the same path on each "
                "machine"
            )

    def check_store(self) -> None:
        """StoreError if the store cannot be read or is another one."""
        if self.store is None:
            return
        try:
            visible = self.store.size(self.mark) is not None
        except (*FOR_USER, ImportError) as error:
            raise StoreError(
                f"cannot read the store {self.store.url} ({type(error).__name__}: {one_line(error)}). Set "
                "the credentials in the environment of `ray start` on this machine, or with `ray job submit "
                "--runtime-env-json`: workers do not get the environment of this command"
            ) from None
        if not visible:
            raise StoreError(
                f"the store {self.store.url} is a different folder: {ADVICE}, or give --store a URL such as "
                "s3://bucket/store"
            )


def _local(path: str) -> str:
    """The path, or the path of a copy of a URL; a path that does not exist if the URL cannot be read."""
    try:
        return str(at_hand(path))
    except MediaError:
        return path


def some_files(paths: Iterable[str]) -> tuple[str, ...]:
    """Up to `MEDIA` of the paths, evenly spread over all of them in order."""
    files = sorted(set(paths))
    step = -(-len(files) // MEDIA) or 1
    return tuple(files[::step])


def some_media(prompts: Sequence[HasFiles]) -> tuple[str, ...]:
    """Up to `MEDIA` files of the prompts that exist here; of many prompts, only some are examined."""
    step = len(prompts) // LOOKED_AT or 1
    files = list[str]()
    for number in range(0, len(prompts), step):
        files += prompts[number].files
    return tuple(path for path in some_files(files) if os.path.exists(_local(path)))


@contextmanager
def marked(store: Backend) -> Iterator[str]:
    """Create a file with a random name in the store: a machine that sees it sees the same store.

    StoreError that names the store if it cannot be written.
    """
    mark = f"{STAGING}/probe-{secrets.token_hex(8)}"
    require_room(store)
    try:
        try:
            store.create(mark, b"")
        except OSError as error:
            raise StoreError(
                f"cannot write to the store {store.url} ({error.strerror or error}): give this user, or the "
                "credentials in the environment of `ray start` on this machine, the right to write there"
            ) from error
        yield mark
    finally:  # also after a signal that came while the file was created
        with suppress(OSError):
            store.remove(mark)
