"""Remote stores: one line for a store that cannot be reached or written, and no files left behind."""

import errno
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.stores.samples import make, same, sample, write
from tests.stores.web import serving
from vlmdistill.stores.backends.backend import in_flight
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index import merged
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

ROOT = Path(__file__).parents[3]


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


def test_a_store_of_many_shards_behind_a_web_server_is_read_and_verified(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "web", [range(3), range(3, 6)])
    write(store, "a=b+c", [7])
    monkeypatch.setattr(
        merged, "WORTH", 2
    )  # so many that the index would be kept, were it not read-only
    there = Store.open(web)
    assert there.index.equals(store.index)
    assert all(
        same(there.read(f"k{number:04}"), sample(number)) for number in (0, 4, 7)
    )
    facts = verify(web)
    assert not facts.findings
    assert (facts.files, facts.bytes) == (
        verify(store.path).files,
        verify(store.path).bytes,
    )
    name = f"shards/{store.commit('u0').folder}/hidden.text/c/0/0"
    (tmp_path / "web" / name).write_bytes(
        b"\0" * (tmp_path / "web" / name).stat().st_size
    )
    assert [(finding.kind, finding.name) for finding in verify(web).findings] == [
        ("damaged", name)
    ]


@pytest.mark.parametrize("page", [None, b"<html>Welcome</html>"])
def test_a_server_that_lists_no_folders_is_no_empty_store(
    web: str, tmp_path: Path, page: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(self: Quiet, path: Any) -> Any:
        if page is None:
            self.send_error(404)
            return None
        self.send_response(200)
        self.end_headers()
        return io.BytesIO(page)

    make(tmp_path / "web", [range(3)])
    monkeypatch.setattr(Quiet, "list_directory", listed)
    for act in (
        lambda: len(Store.open(web)),
        lambda: verify(web),
        lambda: send(web, tmp_path / "mine"),
    ):
        with pytest.raises(StoreError, match="does not list folders"):
            act()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EIO])
def test_object_stores_may_refuse_a_conditional_put_by_other_errors(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(f"memory://odd-{number}", [range(3)])
    plain, times = MemoryFileSystem.pipe_file, [0]

    def put(
        fs: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any
    ) -> None:
        if mode == "create":
            times[0] += 1
            if (
                fs.exists(path)
                or number == errno.ENOSYS
                or (number == errno.EIO and times[0] == 1)
            ):
                raise OSError(number, "as this store says it")
        plain(fs, path, value, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", put)
    assert store.backend.create("commits/new.json", b"first")
    assert store.backend.create("commits/new.json", b"first") == (
        number != errno.ENOSYS
    )
    assert not store.backend.create("commits/new.json", b"second")
    assert store.backend.read("commits/new.json") == b"first"


def test_writing_to_a_web_server_is_refused_in_one_line(
    web: str, tmp_path: Path
) -> None:
    make(tmp_path / "web", [range(3)])
    with pytest.raises(StoreError, match=web):
        filter_store(Store.open(web), "v", expressions=["words > 1"])
    with pytest.raises(StoreError, match=web):
        write(Store.open(web), "u9", [9])


def test_a_dry_run_of_gc_looks_where_nothing_can_be_written(
    web: str, tmp_path: Path
) -> None:
    make(tmp_path / "web", [range(3)])
    orphan = tmp_path / "web" / "shards" / "dead-0123456789abcdef"
    orphan.mkdir()
    (orphan / "index.arrow").write_bytes(b"left")
    found = collect(Store.open(web), grace=0, dry_run=True)
    assert [(item.name, item.bytes) for item in found] == [(f"shards/{orphan.name}", 4)]


@pytest.mark.parametrize(
    "url", ["foo://x", "sftp://host/s", "zip://s::file:///a.zip", "dir::s3://b/s"]
)
def test_a_url_of_another_protocol_is_refused_with_those_that_are_supported(
    url: str,
) -> None:
    with pytest.raises(StoreError, match=r"s3://, gs://, az://, or http\(s\)://"):
        Store.open(url)


def test_a_url_whose_package_is_missing_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec.register_implementation(
        "az", "no_such_package.FS", clobber=True, errtxt="Please install it"
    )
    with pytest.raises(StoreError, match=r"^az://x\b"):
        Store.open("az://x")


def test_a_bucket_without_credentials_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    backend = Remote("s3://nobody/store")
    for ask in (backend.read, backend.size, backend.list_files, backend.list_names):
        with pytest.raises(
            ConnectionError, match=r"^s3://nobody/store/commits: NoCredentialsError: "
        ):
            ask("commits")
    with pytest.raises(
        ConnectionError, match=r"^s3://nobody/store/store\.json: NoCredentialsError: "
    ):
        Store.open(backend.url)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_does_not_answer_is_told_by_its_name() -> None:
    pytest.importorskip("aiohttp", reason="fsspec speaks http by way of aiohttp")
    with pytest.raises(OSError, match="Connect call failed") as caught:
        Store.open("http://127.0.0.1:1/store")
    assert caught.value.filename == "http://127.0.0.1:1/store/store.json"


def test_a_first_open_asks_twice_for_each_shard_and_the_next_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merged, "WORTH", 4)
    store, asked = (
        make("memory://counted", [range(at, at + 2) for at in range(0, 40, 2)]),
        list[str](),
    )
    get = Remote._get

    def counting(self: Remote, name: str, **bounds: int) -> bytes:
        asked.append(name)
        return get(self, name, **bounds)

    monkeypatch.setattr(Remote, "_get", counting)
    seen = list[tuple[int, int]]()
    assert (
        len(
            Store.open(
                store.path,
                report=lambda done, total, remark="": seen.append((done, total)),
            )
        )
        == 40
    )
    shards = [name for name in asked if name.startswith(("commits/", "shards/"))]
    assert len(shards) == len(set(shards)) == 40
    assert seen[-1] == (20, 20)
    asked.clear()
    assert len(Store.open(store.path)) == 40
    assert not [name for name in asked if name.startswith(("commits/", "shards/"))]


def test_calls_in_flight_end_early_when_interrupted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    backend, begun, reads = open_backend(tmp_path), threading.Event(), 200

    def read(number: int) -> int:
        done = 0
        while number and done < reads:
            list(backend.blocks("file", 0, 4))
            begun.set()
            time.sleep(0.01)
            done += 1
            ended[number] = done
        return number

    ended = dict[int, int]()
    results = in_flight(read, range(3), 1)
    assert next(results) == 0
    begun.wait(10)
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert ended.keys() == {1}
    assert ended[1] < reads


def test_calls_in_flight_are_bounded_and_none_begins_after_an_error() -> None:
    begun, running, lock = list[int](), [0, 0], threading.Lock()

    def call(number: int) -> int:
        with lock:
            begun.append(number)
            running[0] += 1
            running[1] = max(running)
        time.sleep(0.001)
        with lock:
            running[0] -= 1
        if number == 50:
            raise StoreError("broken")
        return number

    assert list(in_flight(call, range(40), 4)) == list(range(40))
    assert running[1] <= 4
    with pytest.raises(StoreError):
        list(in_flight(call, range(41, 1000), 4))
    assert max(begun) <= 50 + 3 * 4


def test_what_a_killed_process_has_built_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import sys, time\n"
        "from vlmdistill.stores.backends.remote import Remote\n"
        "print(Remote('memory://x').workspace(), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        mine = Remote("memory://x").workspace()
        assert theirs.exists()  # at work
        other.kill()
    third = Remote("memory://x").workspace()
    assert not theirs.exists()
    assert mine.exists()
    assert third.exists()
