"""A FIFO in place of a file: who opens it as a file waits for ever."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# It frees a reader in the end, also one that holds the interpreter's lock and hears no signal.
FREE = "import sys, time; time.sleep(100); open(sys.argv[1], 'w').close()"


@contextmanager
def fifo(path: Path) -> Iterator[Path]:
    """Put a FIFO in place of `path`; who waits for it in the block fails."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-S", "-c", FREE, str(path)]) as writer:
        try:
            yield path
            assert writer.poll() is None, f"{path.name} was opened as a file"
        finally:
            writer.kill()
