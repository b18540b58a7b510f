"""A store on an S3 server keeps the promises of one on a disk."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from tests.s3 import s3_server
from tests.stores.pushes import pushed_at_once
from tests.stores.samples import head, info, make, provenance, same, sample, write
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ACTOR = """
import sys
from tests.stores.samples import make, write
store = make(sys.argv[1])
for shard in sys.argv[2:]:
    at = int(shard)
    write(store, f"u{at}", range(at * 3, at * 3 + 3))
    print(shard, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(
    server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    values = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name))}"
    urllib.request.urlopen(
        urllib.request.Request(f"{server}/{name}", method="PUT")
    ).close()
    return f"s3://{name}"


def test_samples_views_and_statistics_live_in_a_bucket(bucket: str) -> None:
    store = make(
        f"{bucket}/store", [range(4), range(4, 8)], encoding={"embed.span": "int8"}
    )
    again = Store.open(f"{bucket}/store")
    assert all(
        same(again.read(f"k{number:04}"), store.read(f"k{number:04}"))
        for number in range(8)
    )
    filter_store(store, "late", expressions=["words > 5"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    assert again.view("late")["words"].to_list() == [6, 7]
    assert again.index["kept"].drop_nulls().to_list() == [0.5]
    keys = [key for samples in Epoch(again, token_budget=50) for key in samples.keys]
    assert sorted(keys) == again.index["key"].to_list()
    assert not verify(store.path).findings


def test_a_round_trip_over_s3_changes_no_bit(bucket: str, tmp_path: Path) -> None:
    store = make(tmp_path / "here", [range(4), range(4, 8)])
    assert send(store.path, f"{bucket}/a/b").copied == 8
    assert send(store.path, f"{bucket}/a/b").copied == 0
    assert send(f"{bucket}/a/b", tmp_path / "back").copied == 8
    back = Store.open(tmp_path / "back")
    assert back.index.equals(store.index)
    assert all(same(back.read(f"k{number:04}"), sample(number)) for number in range(8))


def test_a_prefix_that_an_object_stands_for_is_empty_and_one_with_other_objects_is_not(
    bucket: str,
) -> None:
    fs = S3FileSystem()
    fs.call_s3(
        "put_object", Bucket=bucket.removeprefix("s3://"), Key="new/store/", Body=b""
    )
    make(f"{bucket}/new/store", [range(3)])
    assert not verify(f"{bucket}/new/store").damage
    fs.pipe_file(f"{bucket}/full/cache/data.bin", b"mine")
    with pytest.raises(StoreError, match=r"full.*cache"):
        make(f"{bucket}/full")


def test_the_first_of_two_records_stands(bucket: str) -> None:
    backend = Remote(f"{bucket}/p")
    assert backend.create("commits/u.json", b"first")
    assert not backend.create("commits/u.json", b"second")
    assert backend.read("commits/u.json") == b"first"


def test_two_writers_one_killed_and_resumed_lose_and_double_nothing(
    bucket: str,
) -> None:
    url = f"{bucket}/store"
    make(url)
    command = [sys.executable, "-c", ACTOR, url]
    up, down = [str(at) for at in range(6)], [str(at) for at in reversed(range(6))]
    one = subprocess.Popen(
        [*command, *up], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    two = subprocess.Popen(
        [*command, *down], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert one.stdout is not None
    one.stdout.readline()  # it has committed a shard and is at work on the next
    time.sleep(0.02)
    one.kill()
    one.wait()
    one.stdout.close()
    two.communicate()
    assert two.returncode == 0
    subprocess.run(
        [*command, *up], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=os.environ
    )
    store = Store.open(url)
    assert all(
        same(store.read(f"k{number:04}"), sample(number)) for number in range(18)
    )
    assert len(store.index) == 18
    collect(store, grace=0)
    assert not verify(url).findings


def test_teams_that_push_to_one_prefix_at_the_same_time_are_told_what_is_there(
    bucket: str, tmp_path: Path
) -> None:
    features = ("hidden.text",)
    origin = provenance(features=features)
    Store.create(f"{bucket}/store", origin, info(), head())
    for team in range(3):
        with Store.create(tmp_path / str(team), origin, info(), head()).writer(
            "u"
        ) as writer:
            writer.add(sample(10 + team, features))
    facts = pushed_at_once(
        [tmp_path / str(team) for team in range(3)], f"{bucket}/store", tmp_path / "go"
    )
    assert facts == [[1, 0, []]] * 3
    assert Store.open(f"{bucket}/store").keys() == {"k0010", "k0011", "k0012"}
    assert not verify(f"{bucket}/store").damage


def test_gc_in_a_bucket_leaves_what_is_younger_than_its_grace(bucket: str) -> None:
    store = make(f"{bucket}/store", [range(3)])
    store.backend.create("shards/orphan-0123456789abcdef/index.arrow", b"left")
    assert collect(store) == []
    assert [item.name for item in collect(store, grace=0)] == [
        "shards/orphan-0123456789abcdef"
    ]
    assert collect(store, grace=0) == []
    assert not verify(store.path).findings


def test_damage_in_a_bucket_is_found(bucket: str) -> None:
    store = make(f"{bucket}/store", [range(3)])
    name = f"shards/{store.commit('u0').folder}/hidden.text/c/0/0"
    store.backend.replace(name, store.backend.read(name)[:-1] + b"x")
    assert [finding.name for finding in verify(store.path).damage] == [name]
    write(store, "u1", [7])
    store.backend.replace(name, b"short")
    with pytest.raises(StoreError, match=name):
        Store.open(store.path).read("k0002")
