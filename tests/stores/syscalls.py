"""A writer killed between any two system calls, run as a program of its own.

`python -m tests.stores.syscalls FOLDER [EVERY]` writes a store into FOLDER/1 and kills the writer just before
the first system call that changes a file, into FOLDER/2 before the second, and so on until a writer lives to
its end; EVERY leaves some out. Between two such calls the disk does not change, so these are all the deaths
there are. Each store is looked at as the dead left it, and written and collected again. Prints how many died.
"""

import ctypes
import itertools
import json
import os
import platform
import signal
import sys
import traceback
from pathlib import Path

from tests.stores.samples import add, make, write
from vlmdistill.stores import arrays
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import SHARDS
from vlmdistill.stores.store import Store

TRACEME, SYSCALL, SETOPTIONS, SYSCALL_INFO = 0, 24, 0x4200, 0x420E
OPTIONS = (
    1 | 8 | 0x100000
)  # tell system calls apart, follow threads, kill the child when we die
ENTRY, SYSCALL_STOP, ALL_THREADS = 1, signal.SIGTRAP | 0x80, 0x40000000
# write, pwrite64, ftruncate, rename*, mkdir*, rmdir, unlink*, link*, utimensat, fsync, fdatasync, flock
CHANGES = {
    "x86_64": {1, 18, 77, 82, 264, 316, 83, 258, 84, 87, 263, 86, 265, 280, 74, 75, 73},
    "aarch64": {64, 68, 46, 38, 276, 34, 35, 37, 88, 82, 83, 32},
}
OPENAT = {"x86_64": 257, "aarch64": 56}
NUMBERS = range(2)
REFUSED = 77  # our exit status where a process may not trace its child

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Call(ctypes.Structure):
    """What the kernel tells of a system call: struct ptrace_syscall_info."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 7),
        ("pointers", ctypes.c_uint64 * 2),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
        ("more", ctypes.c_uint64 * 4),
    )

    def changes(self) -> bool:
        """It is about to begin, and may change a file."""
        machine = platform.machine()
        made = self.number == OPENAT[machine] and self.arguments[2] & os.O_CREAT
        return self.op == ENTRY and bool(made or self.number in CHANGES[machine])


def ptrace(request: int, process: int, at: int = 0, data: object = None) -> None:
    if libc.ptrace(request, process, at, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def act(path: Path) -> None:
    """Write a store and an annex with one shard each, and collect what a dead writer left.

    Small samples count as large.
    """
    arrays.LARGE, arrays.SYNC_EVERY = 200, 600
    store = make(path)
    left = path / SHARDS / "left-0123456789abcdef"
    left.mkdir(parents=True, exist_ok=True)
    (left / "index.arrow").write_bytes(b"left")
    write(store, "u", NUMBERS)
    add(store, "a", NUMBERS[:1])
    collect(store, grace=0)


def struck(path: Path, at: int) -> bool:
    """Fork a writer and kill it before its call number `at`; false when it ended before."""
    child = os.fork()
    if not child:
        code = 1
        try:
            ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            act(path)
            code = 0
        except PermissionError:
            code = REFUSED
        finally:
            if code == 1:
                traceback.print_exc()
            os._exit(code)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        raise SystemExit(REFUSED)
    ptrace(SETOPTIONS, child, 0, OPTIONS)
    ptrace(SYSCALL, child)
    count, call = 0, Call()
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if not os.WIFSTOPPED(status):
            if thread != child:
                continue
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise RuntimeError("a writer failed without being killed")
            return os.WIFSIGNALED(status)
        passed = os.WSTOPSIG(status)
        if passed == SYSCALL_STOP:
            ptrace(SYSCALL_INFO, thread, ctypes.sizeof(call), ctypes.byref(call))
            count += call.changes()
            if count == at:
                os.kill(child, signal.SIGKILL)
                at = 0
                continue
        # Stops are of our own making, all other signals the child's.
        own = passed in (SYSCALL_STOP, signal.SIGSTOP, signal.SIGTRAP)
        ptrace(SYSCALL, thread, 0, 0 if own else passed)


def campaign(folder: Path, every: int) -> int:
    folder.mkdir()
    keys = {f"k{number:04}" for number in NUMBERS}
    for at in itertools.count(1, every):
        path = folder / str(at)
        if not struck(path, at):
            return (at - 1) // every
        if (path / "store.json").exists():
            assert not verify(path, threads=1).damage, at
            store = Store.open(path)
            assert store.keys() in (set(), keys), at
            assert all(
                annex.keys() in (set(), {min(keys)}) for annex in store.annexes
            ), at
        act(path)
    raise AssertionError


if __name__ == "__main__":
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    sys.stdout.write(json.dumps({"killed": campaign(Path(sys.argv[1]), every)}))
