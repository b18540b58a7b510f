"""Which backend a path or URL leads to."""

import os
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.backends.cached import Cache, Cached
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError

PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "memory")


def open_backend(path: str | Path | Backend, cache: str | None = None) -> Backend:
    """The backend of a path or URL; StoreError when the URL is not supported. `file://` is local.

    `cache`, as `DIR:SIZE`, keeps arrays of a URL on a local disk. A backend that is open is returned.
    """
    if isinstance(path, Backend):
        return path
    text = os.path.expanduser(path)
    if not text:
        raise StoreError("the name of a store is empty: give a folder or a URL")
    protocol = text.partition("://")[0] if "://" in text else ""
    if "::" in protocol or (protocol and protocol not in (*PROTOCOLS, "file", "local")):
        raise StoreError(
            f"{text}: the protocol '{protocol}' is not supported: use a local folder, s3://, gs://, az://, "
            "or http(s):// to read"
        )
    if protocol in PROTOCOLS:
        return Cached(text, Cache.of(cache)) if cache else Remote(text)
    if cache:
        raise StoreError(
            f"{text} is local and needs no cache of {cache}: leave --cache out"
        )
    if protocol:
        url = urlsplit(text)
        if url.netloc not in ("", "localhost", "~"):
            raise StoreError(
                f"{text} names another machine, '{url.netloc}': write file:///absolute/path"
            )
        text = os.path.expanduser(
            url.netloc.removeprefix("localhost") + url2pathname(url.path)
        )
    return Local(Path(text))
