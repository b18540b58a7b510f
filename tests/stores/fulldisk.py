"""A disk that is full and stays full, run as a program of its own that may mount.

`unshare -Urm python -m tests.stores.fulldisk FOLDER` mounts ever larger file systems of a few pages or a few
inodes there, writes a store until nothing fits any more, looks at what is left, makes room and writes again.
Prints how often there was no room.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

from tests.stores.samples import make, same, sample, write
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.store import Store

REMOUNT = 32
PAGE = 4  # KiB
NUMBERS = range(3)

libc = ctypes.CDLL(None, use_errno=True)


def check(status: int) -> None:
    if status < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(folder: Path, flags: int, options: str) -> None:
    check(libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, options.encode()))


def filled(folder: Path, options: str) -> bool:
    """Whether a store did not fit; it is whole as far as it counts, and once there is room."""
    mount(folder, 0, options)
    path, full = folder / "store", False
    keys = {f"k{number:04}" for number in NUMBERS}
    try:
        write(make(path), "u", NUMBERS)
    except StoreError as error:
        if "No space left" not in str(error):
            raise
        full = True
    if (path / "store.json").exists():
        assert not verify(path, threads=1).damage, options
        assert Store.open(path).keys() in (set(), keys), options
    mount(folder, REMOUNT, "size=64m,nr_inodes=9999")
    store = make(path)
    write(store, "u", NUMBERS)
    assert all(
        same(store.read(f"k{number:04}"), sample(number)) for number in NUMBERS
    ), options
    del store  # its open files keep the disk busy
    check(libc.umount2(bytes(folder), 2))
    return full


def campaign(folder: Path) -> int:
    folder.mkdir()
    times = 0
    for limit in ("size={}k,nr_inodes=9999", "size=64m,nr_inodes={}"):
        step = PAGE if limit.startswith("size={}") else 1
        amount = 1
        while filled(folder, limit.format(amount * step)):
            times += 1
            amount += 1
    return times


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"full": campaign(Path(sys.argv[1]))}))
