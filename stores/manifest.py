"""Records: small sealed JSON files that make other files count.

A shard, a view, a table of statistics, a frozen head: each is a set of files that is nothing
until a record names them with their sizes and blake3. A record seals itself: its bytes are the
canonical JSON of its content and of the hash of that content, so that any change shows.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import blake3

from vlmdistill.stores.errors import NewerError, StoreError
from vlmdistill.stores.place import Place
from vlmdistill.stores.schema import SCHEMA_VERSION

SEAL = "blake3"
STORE = "store.json"
COMMITS = "commits"
SHARDS = "shards"
HEADS = "heads"
VIEWS = "views"
CACHE = "cache"
STATS = "stats"
DEAD = "dead"  # marks of what is being removed: whoever commits it must see them
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")

Record = dict[str, Any]
Files = Mapping[str, tuple[int, str]]  # name -> (bytes, blake3)


def damaged(where: str, why: str = "its checksum does not match") -> StoreError:
    """The error of whoever finds damage."""
    return StoreError(f"{where} is damaged: {why}. `vlmdistill store verify` lists all damage")


def digest(data: bytes | memoryview) -> str:
    """The blake3 of some bytes, as 64 hex digits."""
    return blake3.blake3(data).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode()


def seal(content: Mapping[str, Any]) -> bytes:
    """The bytes of a record with this content."""
    return _canonical({**content, SEAL: digest(_canonical(content))})


def unseal(data: bytes, name: str) -> Record:
    """Read a record back; StoreError when a byte of it has changed."""
    try:
        content = json.loads(data)
        intact = isinstance(content, dict) and seal({k: v for k, v in content.items() if k != SEAL}) == data
    except ValueError:
        intact = False
    if not intact:
        raise damaged(name)
    del content[SEAL]
    return dict(content)


def read_record(place: Place, name: str) -> Record:
    """Read and check a record: StoreError if damaged, NewerError if too new, FileNotFoundError if missing."""
    content = unseal(place.read(name), f"{place.url}/{name}")
    if content.get("schema", 0) > SCHEMA_VERSION:
        raise NewerError(
            f"{place.url}/{name} has schema {content['schema']}, this vlmdistill reads up to "
            f"{SCHEMA_VERSION}: update vlmdistill"
        )
    return content


def find_record(place: Place, name: str) -> Record | None:
    """Read and check a record, None when there is none; StoreError when damaged or too new."""
    try:
        return read_record(place, name)
    except FileNotFoundError:
        return None


def check_name(name: str, what: str) -> str:
    """Refuse names that cannot be file names everywhere."""
    if not NAME.fullmatch(name):
        raise StoreError(
            f"'{name}' cannot name a {what}: use at most 200 letters, digits and . _ = + -, the first no sign"
        )
    return name


def shard_name(unit: str, files: Files) -> str:
    """The unit and a hash of the content: equal samples make equal names, whoever writes them."""
    return f"{unit}-{digest(_canonical(dict(files)))[:16]}"


def units(place: Place) -> list[str]:
    """The committed units, sorted."""
    return [name.removesuffix(".json") for name in place.names(COMMITS) if name.endswith(".json")]


def commit_name(unit: str) -> str:
    """Where the record of a unit lies."""
    return f"{COMMITS}/{unit}.json"
