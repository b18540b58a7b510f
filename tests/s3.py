"""An S3 server of this machine, for as long as tests need it."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from s3fs import S3FileSystem

SECONDS = 120.0  # its first answer takes long: it loads its services


@contextmanager
def s3_server() -> Iterator[str]:
    """The server's URL."""
    S3FileSystem.clear_instance_cache()  # fsspec keeps those that talk to a server before
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(url, timeout=30).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()
