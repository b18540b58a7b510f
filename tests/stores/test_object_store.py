"""A store on an S3 server keeps the promises of one on a disk."""

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.stores.samples import make, same, sample, write
from vlmdistill.stores import multipart
from vlmdistill.stores.collect import collect
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.filters import filter_store
from vlmdistill.stores.reader import epoch
from vlmdistill.stores.remote import Remote
from vlmdistill.stores.share import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.verify import verify

ROOT = Path(__file__).parents[2]
ACTOR = """
import sys
from tests.stores.samples import make, write
store = make(sys.argv[1])
for unit in sys.argv[2:]:
    at = int(unit)
    write(store, f"u{at}", range(at * 3, at * 3 + 3))
    print(unit, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):  # its first answer takes long: it loads its services
            try:
                urllib.request.urlopen(url, timeout=30).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    values = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name))}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    return f"s3://{name}"


def test_samples_views_and_statistics_live_in_a_bucket(bucket: str) -> None:
    store = make(f"{bucket}/store", [range(4), range(4, 8)], encoding={"hidden.text": "zstd"})
    again = Store.open(f"{bucket}/store")
    assert all(same(again.read(f"k{number:04}"), sample(number)) for number in range(8))
    filter_store(store, "late", expressions=["words > 5"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    assert again.view("late")["words"].to_list() == [6, 7]
    assert again.index["kept"].drop_nulls().to_list() == [0.5]
    batches = list(epoch(again, token_budget=50))
    assert sorted(item.key for batch in batches for item in batch) == again.index["key"].to_list()
    assert not verify(store.path).findings


def test_a_round_trip_over_s3_changes_no_bit(bucket: str, tmp_path: Path) -> None:
    store = make(tmp_path / "here", [range(4), range(4, 8)])
    assert send(store.path, f"{bucket}/a/b").copied == 8
    assert send(store.path, f"{bucket}/a/b").copied == 0
    assert send(f"{bucket}/a/b", tmp_path / "back").copied == 8
    back = Store.open(tmp_path / "back")
    assert back.index.equals(store.index)
    assert all(same(back.read(f"k{number:04}"), sample(number)) for number in range(8))


def test_a_prefix_that_an_object_stands_for_is_empty_and_one_with_other_objects_is_not(bucket: str) -> None:
    fs = S3FileSystem()
    fs.call_s3("put_object", Bucket=bucket.removeprefix("s3://"), Key="new/store/", Body=b"")
    make(f"{bucket}/new/store", [range(3)])
    assert not verify(f"{bucket}/new/store").damage
    fs.pipe_file(f"{bucket}/full/cache/data.bin", b"mine")
    with pytest.raises(StoreError, match="full holds other things, such as cache"):
        make(f"{bucket}/full")


def test_the_first_of_two_records_stands(bucket: str) -> None:
    place = Remote(f"{bucket}/p")
    assert place.create("commits/u.json", b"first")
    assert not place.create("commits/u.json", b"second")
    assert place.read("commits/u.json") == b"first"


def test_two_writers_one_killed_and_resumed_lose_and_double_nothing(bucket: str) -> None:
    url = f"{bucket}/store"
    make(url)
    command = [sys.executable, "-c", ACTOR, url]
    up, down = [str(at) for at in range(6)], [str(at) for at in reversed(range(6))]
    one = subprocess.Popen([*command, *up], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ)
    two = subprocess.Popen([*command, *down], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ)
    assert one.stdout is not None
    one.stdout.readline()  # it has committed a unit and is at work on the next
    time.sleep(0.02)
    one.kill()
    one.wait()
    one.stdout.close()
    two.communicate()
    assert two.returncode == 0
    subprocess.run([*command, *up], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=os.environ)
    store = Store.open(url)
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(18))
    assert len(store.index) == 18
    collect(store, grace=0)
    assert not verify(url).findings


def interrupted(after: int) -> Callable[..., Any]:
    """The S3 client of a line that breaks after so many parts."""
    whole, sent = S3FileSystem.call_s3, itertools.count()

    def call(fs: S3FileSystem, method: str, **options: Any) -> Any:
        if method == "upload_part" and next(sent) >= after:
            raise ConnectionError("the line is dead")
        return whole(fs, method, **options)

    return call


def test_an_interrupted_upload_goes_on_after_the_parts_that_arrived(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    monkeypatch.setattr(multipart, "AT_ONCE", 1)
    store = make(tmp_path / "here")
    with store.writer("u") as writer:
        writer.add(sample(1, tokens=1_000_000))  # files of four parts
    url = f"{bucket}/large"
    with monkeypatch.context() as patch:
        patch.setattr(S3FileSystem, "call_s3", interrupted(after=2))
        with pytest.raises(StoreError, match="the line is dead"):
            send(store.path, url)
    assert Store.open(url).keys() == set()
    left = [item for item in collect(Store.open(url), grace=0, dry_run=True) if "upload" in item.name]
    assert [item.bytes for item in left] == [2 * multipart.PART]
    parts: list[int] = []
    with monkeypatch.context() as patch:
        whole = S3FileSystem.call_s3

        def counted(fs: S3FileSystem, method: str, **options: Any) -> Any:
            if method == "upload_part":
                parts.append(options["PartNumber"])
            return whole(fs, method, **options)

        patch.setattr(S3FileSystem, "call_s3", counted)
        assert send(store.path, url).copied == 1
    assert parts == [3, 4, 1, 2, 3, 4]  # the rest of one file, all of the other
    assert not verify(url).findings
    assert same(Store.open(url).read("k0001"), store.read("k0001"))


def test_gc_in_a_bucket_waits_for_its_grace_by_the_clock_of_the_server(bucket: str) -> None:
    store = make(f"{bucket}/store", [range(3)])
    store.place.create("shards/orphan-0123456789abcdef/index.arrow", b"left")
    where = {"Bucket": bucket.removeprefix("s3://"), "Key": "store/shards/left/c/0/0"}
    begun = S3FileSystem().call_s3("create_multipart_upload", **where)["UploadId"]
    S3FileSystem().call_s3("upload_part", **where, UploadId=begun, PartNumber=1, Body=b"left")
    assert collect(store, grace=3600) == []
    removed = collect(store, grace=0)
    assert [item.name for item in removed] == [
        "shards/orphan-0123456789abcdef",
        "upload of store/shards/left/c/0/0",
    ]
    assert collect(store, grace=0) == []
    assert not verify(store.path).findings


def test_damage_in_a_bucket_is_found(bucket: str) -> None:
    store = make(f"{bucket}/store", [range(3)])
    name = f"shards/{store.commit('u0')['shard']}/hidden.text/c/0/0"
    store.place.replace(name, store.place.read(name)[:-1] + b"x")
    assert [finding.name for finding in verify(store.path).damage] == [name]
    write(store, "u1", [7])
    store.place.replace(name, b"short")
    with pytest.raises(StoreError, match="shorter than its record says"):
        Store.open(store.path).read("k0002")
