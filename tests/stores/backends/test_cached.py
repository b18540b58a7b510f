"""The cache of a remote store never grows beyond its size, and what it returns is what the store holds."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drafters import synthetic
from tests.s3 import s3_server
from tests.stores.samples import make, same, sample
from vlmdistill.pipelines.train import launch
from vlmdistill.stores.backends.cached import Cache, Cached
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store

ROOT = Path(__file__).parents[3]
KB = 1000
WRITER = """
import sys
from pathlib import Path
from vlmdistill.stores.backends.cached import Cache
cache = Cache(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(10**9):
    name = f"{hash((sys.argv[3], number)) % 2**128:032x}"
    cache.put(name, bytes([number % 256]) * (number * 997 % 30_000))
    if number == 50:
        print("at work", flush=True)
"""


def on_disk(folder: Path) -> int:
    """The bytes that the files of a folder take, also if they were written in full."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += max(
                -(-entry.stat().st_size // 4096) * 4096, entry.stat().st_blocks * 512
            )
        except FileNotFoundError:
            continue
    return total


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """What a folder took, looked at all the time."""
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(on_disk(folder))

    folder.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def cached(tmp_path: Path, size: int, samples: int = 8) -> Store:
    url = f"memory://{tmp_path.name}/store"
    make(url, [range(samples)])
    return Store.open(url, f"{tmp_path / 'cache'}:{size / KB}kB")


def test_a_damaged_or_shortened_file_of_the_cache_is_read_again(tmp_path: Path) -> None:
    store = cached(tmp_path, 4000 * KB)
    assert isinstance(store.backend, Cached)
    for change in (
        lambda data: bytes(len(data)),
        lambda data: data[:-1],
        lambda data: data,
    ):
        assert all(
            same(store.read(f"k{number:04}"), sample(number)) for number in range(8)
        )
        for file in (tmp_path / "cache").glob("?" * 32):
            file.write_bytes(change(file.read_bytes()))
    fetched = store.backend.cache.misses
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(8))
    assert store.backend.cache.misses == fetched


def test_files_that_cannot_be_removed_count(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 8 * 4096)
    for number in range(5):
        (tmp_path / f"{number:032x}").mkdir()  # not even root can unlink these
    (tmp_path / "used").write_text("0")
    for number in range(5, 20):
        cache.put(f"{number:032x}", bytes(4096))
    assert on_disk(tmp_path) <= 8 * 4096
    Cache(tmp_path, 4 * 4096).put("f" * 32, bytes(4096))
    assert not (tmp_path / ("f" * 32)).exists()


def test_what_is_damaged_in_the_store_is_an_error_until_it_is_mended(
    tmp_path: Path,
) -> None:
    store = cached(tmp_path, 4000 * KB)
    name = f"shards/{store.commit('u0').folder}/hidden.text/c/0/0"
    good = store.backend.read(name)
    store.backend.replace(name, bytes(len(good)))
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"hidden\.text of sample k0001 is damaged"
        ):
            store.read("k0001")
    store.backend.replace(name, good)
    assert same(store.read("k0001"), sample(1))


def test_a_cache_of_half_a_store_saves_about_half_of_what_each_later_epoch_reads(
    tmp_path: Path,
) -> None:
    whole = cached(tmp_path / "whole", 10**9, 60)
    list(Epoch(whole, token_budget=100))
    size = on_disk(tmp_path / "whole" / "cache")
    store = Store.open(whole.path, f"{tmp_path / 'half'}:{size // 2 // KB}kB")
    assert isinstance(store.backend, Cached)
    list(Epoch(store, token_budget=100))
    everything, store.backend.cache.hits = store.backend.cache.misses, 0
    for epoch in (1, 2, 3):
        list(Epoch(store, token_budget=100, epoch=epoch))
    assert 0.3 < store.backend.cache.hits / (3 * everything) < 0.7
    assert on_disk(tmp_path / "half") <= size // 2


def test_writers_that_are_killed_at_any_moment_leave_a_cache_within_its_size(
    tmp_path: Path,
) -> None:
    folder, size = tmp_path / "cache", 600 * KB
    command = [sys.executable, "-c", WRITER, str(folder), str(size)]
    with watched(folder) as seen:
        for turn in range(4):
            writers = [
                subprocess.Popen(
                    [*command, f"{turn} {one}"], stdout=subprocess.PIPE, cwd=ROOT
                )
                for one in range(2)
            ]
            for writer in writers:
                assert writer.stdout is not None
                writer.stdout.readline()
            time.sleep(0.05 * turn)
            for writer in writers:
                writer.kill()
                writer.communicate()
        (folder / "used").write_bytes(b"")  # as after a power failure
        store = cached(tmp_path, size)
        assert all(
            same(store.read(f"k{number:04}"), sample(number)) for number in range(8)
        )
    assert len(seen) > 50
    assert size / 2 < max(seen) <= size


@pytest.mark.parametrize("text", ["", "here", "here:", "here:lots", ":5GB", "here:5"])
def test_a_cache_without_folder_or_size_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="/scratch/cache:500GB"):
        Store.open("memory://none", text or ":")


def test_a_cache_of_a_local_store_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "store", [range(2)])
    with pytest.raises(StoreError, match="--cache"):
        Store.open(tmp_path / "store", f"{tmp_path / 'cache'}:5MB")


@pytest.mark.slow
def test_ranks_that_read_s3_through_a_tenth_of_the_store_train_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = synthetic.store(tmp_path / "store", 60)
    size = sum(store.backend.list_files("").values()) // 10
    how = {"settings": ("steps=24", "batch_tokens=120"), "save_every": 10}
    launch(synthetic.plan(store.path, tmp_path / "local", **how), 2)  # type: ignore[arg-type]
    with s3_server() as server:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        urllib.request.urlopen(
            urllib.request.Request(f"{server}/bucket", method="PUT")
        ).close()
        send(store.path, "s3://bucket/store")
        there = replace(
            synthetic.plan(store.path, tmp_path / "there", **how),  # type: ignore[arg-type]
            store="s3://bucket/store",
            cache=f"{tmp_path / 'cache'}:{size / KB}kB",
            checkpoints="s3://bucket/runs/there",
        )
        with watched(tmp_path / "cache") as seen:
            launch(there, 2)
        launch(
            replace(there, out=tmp_path / "elsewhere"), 2
        )  # on a machine that has nothing of it
    assert 0.5 * size < max(seen) <= size
    runs = ("local", "there", "elsewhere")
    files = [(tmp_path / run / "model.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1] == files[2]
    logs = [
        (tmp_path / f"{run}.training" / "metrics.jsonl").read_text().splitlines()
        for run in runs[1:]
    ]
    shared = [
        line for line in logs[1] if line in logs[0]
    ]  # seconds included: these steps were not repeated
    assert max(json.loads(line)["step"] for line in shared) >= 20


def test_a_full_cache_writes_nothing_that_it_would_remove_next(tmp_path: Path) -> None:
    cache, names = (
        Cache(tmp_path / "cache", 11 * 4096),
        [f"{number:032x}" for number in range(0, 4000, 100)],
    )

    def epoch(seed: int) -> set[int]:
        for name in random.Random(seed).sample(names, len(names)):
            if cache.get(name, 9) is None:
                cache.put(name, b"nine byte")
        return {file.stat().st_ino for file in cache.folder.iterdir()}

    first = [epoch(seed) for seed in range(4)][-1]
    assert len(first) > 8
    assert epoch(5) == first
