"""Places far away: what cannot be reached or written to is told in one line, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.stores.samples import make, same, sample, write
from tests.stores.web import serving
from vlmdistill.stores import indexing
from vlmdistill.stores.collect import collect
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.filters import filter_store
from vlmdistill.stores.remote import Remote
from vlmdistill.stores.share import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.verify import verify

ROOT = Path(__file__).parents[2]
DIES = """
import os, signal
from tests.stores.samples import make, sample
with make("memory://dies").writer("u") as writer:
    writer.add(sample(1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Quiet(SimpleHTTPRequestHandler):
    """The server of the standard library: it lists folders without sizes, and sends whole files only."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of the folder `web`."""
    pytest.importorskip("aiohttp", reason="fsspec speaks http by way of aiohttp")
    handler = partial(Quiet, directory=str(tmp_path / "web"))
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_store_of_many_units_behind_a_web_server_is_read_and_verified(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "web", [range(3), range(3, 6)])
    write(store, "a=b+c", [7])
    monkeypatch.setattr(indexing, "WORTH", 2)  # so many that the index would be kept, were it not read-only
    there = Store.open(web)
    assert there.index.equals(store.index)
    assert all(same(there.read(f"k{number:04}"), sample(number)) for number in (0, 4, 7))
    told = verify(web)
    assert not told.findings
    assert (told.files, told.bytes) == (verify(store.path).files, verify(store.path).bytes)
    name = f"shards/{store.commit('u0')['shard']}/hidden.text/c/0/0"
    (tmp_path / "web" / name).write_bytes(b"\0" * (tmp_path / "web" / name).stat().st_size)
    assert [(finding.kind, finding.name) for finding in verify(web).findings] == [("damaged", name)]


def test_writing_to_a_web_server_is_refused_in_one_line(web: str, tmp_path: Path) -> None:
    make(tmp_path / "web", [range(3)])
    with pytest.raises(StoreError, match=f"^cannot write to {web}: a web server can only be read"):
        filter_store(Store.open(web), "v", expressions=["words > 1"])
    with pytest.raises(StoreError, match=f"^cannot write to {web}: a web server can only be read"):
        write(Store.open(web), "u9", [9])


def test_a_dry_run_of_gc_looks_where_nothing_can_be_written(web: str, tmp_path: Path) -> None:
    make(tmp_path / "web", [range(3)])
    orphan = tmp_path / "web" / "shards" / "dead-0123456789abcdef"
    orphan.mkdir()
    (orphan / "index.arrow").write_bytes(b"left")
    found = collect(Store.open(web), grace=3600, dry_run=True)
    assert [(item.name, item.bytes) for item in found] == [(f"shards/{orphan.name}", 4)]


def test_a_url_of_no_known_protocol_or_one_whose_package_is_missing_is_refused_in_one_line() -> None:
    fsspec.register_implementation("lacking", "no_such_package.FS", clobber=True, errtxt="Please install it")
    for url, why in (("foo://x", "Protocol not known: foo"), ("lacking://x", "Please install it")):
        with pytest.raises(StoreError, match=f"^{url} cannot be opened: {why}"):
            Store.open(url)


def test_a_bucket_without_credentials_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    place = Remote("s3://nobody/store")
    for ask in (place.read, place.size, place.files, place.names):
        with pytest.raises(ConnectionError, match=r"^s3://nobody/store/commits: NoCredentialsError: "):
            ask("commits")
    with pytest.raises(ConnectionError, match=r"^s3://nobody/store/store\.json: NoCredentialsError: "):
        Store.open(place.url)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_does_not_answer_is_told_by_its_name() -> None:
    pytest.importorskip("aiohttp", reason="fsspec speaks http by way of aiohttp")
    with pytest.raises(OSError, match="Connect call failed") as caught:
        Store.open("http://127.0.0.1:1/store")
    assert caught.value.filename == "http://127.0.0.1:1/store/store.json"


def test_what_a_dead_writer_left_on_its_own_disk_goes_and_what_a_living_one_holds_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    died = subprocess.run([sys.executable, "-c", DIES], check=False, cwd=ROOT, env=os.environ)
    assert died.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    store = make("memory://lives")
    with store.writer("u1") as one:
        one.add(sample(1))
        (mine,) = os.listdir(tmp_path)
        assert mine != left
        with store.writer("u2") as two:
            two.add(sample(2))
            assert mine in os.listdir(tmp_path)
    assert os.listdir(tmp_path) == []
    assert store.keys() == {"k0001", "k0002"}


def zipped(store: Store, below: str = "") -> str:
    """The path of an archive that holds a store, at its root or in a folder."""
    archive = Path(f"{store.path}.zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(Path(store.path).rglob("*")):
            file.write(path, Path(below, path.relative_to(store.path)))
    return str(archive)


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_store_in_an_archive_is_read_verified_and_pulled(tmp_path: Path, below: str) -> None:
    store = make(tmp_path / "here", [range(3), range(3, 6)])
    url = f"zip://{below}::{zipped(store, below)}"
    there = Store.open(url)
    assert there.index.equals(store.index)
    assert same(there.read("k0004"), sample(4))
    told = verify(url)
    assert not told.findings
    assert (told.files, told.bytes) == (verify(store.path).files, verify(store.path).bytes)
    assert send(url, tmp_path / "back").copied == 6


def test_writing_to_an_archive_is_refused_in_one_line(tmp_path: Path) -> None:
    store = make(tmp_path / "here", [range(3)])
    url = f"zip://::{zipped(store)}"
    for act in (lambda: write(Store.open(url), "u9", [9]), lambda: make(f"zip://new::{store.path}.zip")):
        with pytest.raises(StoreError, match=r"^cannot write to zip://.*: an archive can only be read from"):
            act()


@pytest.mark.parametrize("url", ["dir://a", "zip://a.zip", "zip:///tmp/a.zip"])
def test_a_url_that_does_not_say_what_it_lies_in_is_told_how(url: str) -> None:
    with pytest.raises(StoreError, match=f"^{url} cannot be opened: say after '::' what it lies in, as in "):
        Store.open(url)
