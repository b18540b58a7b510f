"""The feature store against the disk's own speed and against one file per sample.

    python -m benchmarks.store [--samples 300] [--width 3584] [--folder DIR] [--out FILE]

Every number is a rate in GB/s. All take turns of a few samples each, so that whatever else the machine
does slows them alike; of cold reads a turn is a whole round, since the disk goes on with what a turn has
asked for when the next one begins. A ratio is taken turn by turn, over the same samples; what is printed
is the median of all and, in brackets, the quartiles. Caches are dropped with posix_fadvise before a cold
turn. The samples are synthetic: the lengths of long responses, the values of hidden states with a few
massive channels.
"""

import argparse
import gc
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import safetensors.torch
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset

from vlmdistill.stores.index.tables import write_table
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.manifest import CacheRecord
from vlmdistill.stores.schema import (
    SCHEMA_VERSION,
    Array,
    Feature,
    FrozenTables,
    Provenance,
    Sample,
    TargetInfo,
)
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

FEATURE = Feature.parse("hidden.text")
BUDGET = 8192  # tokens of a batch
SHARD_SAMPLES = (
    100  # samples that are written in a turn, and then forced to the disk: a shard
)
TURN = 25  # samples that a reader reads before the next has its turn: more than a processor's cache holds
PART = 1 << 18  # bytes that are checked while they are in the processor's cache
GOALS = {
    "read warm / memory map": 0.9,
    "read cold / memory map": 0.85,
    "batches / torch.save habit": 8.0,
    "write / raw write": 0.7,
}


def samples(count: int, width: int) -> Iterator[Sample]:
    """Samples of 100 to 2000 tokens, lognormal, made one at a time."""
    rng = np.random.default_rng(0)
    pool_ND = rng.standard_normal((4096, width)).astype(np.float32)
    pool_ND[:, :4] *= 300  # massive channels
    bits_ND = (pool_ND.view(np.uint32) >> 16).astype(np.uint16)
    for number in range(count):
        tokens = int(np.clip(rng.lognormal(6.3, 0.6), 100, 2000))
        rows = bits_ND[rng.integers(0, len(bits_ND), tokens)]
        at = np.arange(tokens, dtype=np.int32)
        yield Sample(
            f"s{number:06}",
            at % 8,
            at > tokens // 4,
            at,
            at,
            (),
            {FEATURE: rows},
            {"words": tokens},
        )


def origin(width: int) -> tuple[Provenance, TargetInfo, FrozenTables]:
    """What a store wants to know, made up."""
    provenance = Provenance(
        target="made up", config_hash="0", weights_hash="0", processor_hash="0", template_hash="0",
        features=(FEATURE.name,), dtype="bfloat16",
        revision="", sampling="", code_version="", engine="transformers", thinking="",
    )  # fmt: skip
    info = TargetInfo(
        name="made up", family="none", hidden_size=width, intermediate_size=1, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=1, vocab_size=8, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu",
        attention_bias=False, max_position=4096, eos_ids=(1,), visual_ids=(2,),
    )  # fmt: skip
    table = np.zeros((8, width), np.uint16)
    return provenance, info, FrozenTables(table, table, "bfloat16")


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop(folder: Path) -> None:
    """Ask the system to forget the pages of all files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


Read = Callable[[Sequence[str]], None]


class Raw:
    """The floor: all samples in one flat file, written in sequence, read through one memory map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.extents: dict[str, tuple[int, int]] = {}

    def write(self, given: Sequence[Sample]) -> None:
        """Write these samples after those that are there, durably."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "all").open("ab", buffering=0) as file:
            at = file.tell()
            for sample in given:
                rows = sample.features[FEATURE]
                file.write(rows.data)
                self.extents[sample.key] = (at, rows.nbytes)
                at += rows.nbytes
            os.fsync(file.fileno())

    def reader(self) -> Read:
        """Every byte of each sample into memory that is used again: the least a reader can do."""
        buffer, mapped = self._open()

        def read(keys: Sequence[str]) -> None:
            for key in keys:
                at, size = self.extents[key]
                buffer[:size] = mapped[at : at + size]

        return read

    def _open(self) -> tuple[Array, Array]:
        with (self.folder / "all").open("rb") as file:
            mapped = np.frombuffer(
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8
            )
        return np.empty(
            max(size for _, size in self.extents.values()), np.uint8
        ), mapped


class Checked(Raw):
    """The floor of a reader that must know that every byte is right."""

    def __init__(self, raw: Raw) -> None:
        self.folder, self.extents = raw.folder, raw.extents

    def reader(self) -> Read:
        """Every byte of each sample through the checksum as well."""
        buffer, mapped = self._open()

        def read(keys: Sequence[str]) -> None:
            for key in keys:
                at, size = self.extents[key]
                state = xxhash.xxh3_64()
                for start in range(0, size, PART):
                    end = min(size, start + PART)
                    buffer[start:end] = mapped[at + start : at + end]
                    state.update(buffer[start:end].data)
                state.intdigest()

        return read


class Blocks(Raw):
    """The floor of whoever makes checked batches: two threads, no look-up, no samples, memory used again."""

    def __init__(self, raw: Raw, batch: int) -> None:
        self.folder, self.extents, self.batch = raw.folder, raw.extents, batch
        largest = batch * max(size for _, size in self.extents.values())
        self.blocks = [
            np.zeros(largest, np.uint8) for _ in range(4)
        ]  # two for a thread, as if one were in use

    def epoch(self, keys: Sequence[str]) -> None:
        """All samples into batches; each thread makes every second one."""
        batches = [
            keys[start : start + self.batch]
            for start in range(0, len(keys), self.batch)
        ]
        with (
            (self.folder / "all").open("rb", buffering=0) as file,
            ThreadPoolExecutor(2) as pool,
        ):
            list(pool.map(partial(self._fill, file.fileno(), batches), range(2)))

    def _fill(self, handle: int, batches: Sequence[Sequence[str]], thread: int) -> None:
        for number in range(thread, len(batches), 2):
            block, end = self.blocks[number % 4].data, 0
            for key in batches[number]:
                at, size = self.extents[key]
                state = xxhash.xxh3_64()
                for start in range(0, size, PART):
                    part = block[end + start : end + min(size, start + PART)]
                    os.preadv(handle, [part], at + start)
                    state.update(part)
                state.intdigest()
                end += size


class PerFile:
    """One file per sample, as torch.save or safetensors writes it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def write(self, given: Sequence[Sample]) -> None:
        """Write these samples as well, durably."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for sample in given:
            hidden = as_torch(sample.features[FEATURE], "bfloat16")
            record = {
                "input_ids": as_torch(sample.ids_T, "int64"),
                "hidden_state": hidden,
            }
            path = self._path(sample.key)
            if self.kind == "pt":
                torch.save(record, path)
            else:
                safetensors.torch.save_file(record, path)
        for sample in given:  # as durable as the others
            handle = os.open(self._path(sample.key), os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def load(self, key: str) -> dict[str, torch.Tensor]:
        """One sample."""
        path = self._path(key)
        if self.kind == "pt":
            record: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
            return record
        return safetensors.torch.load_file(path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.{self.kind}"

    def reader(self) -> Read:
        """Every byte of each sample into memory."""

        def read(keys: Sequence[str]) -> None:
            for key in keys:
                hidden = self.load(key)["hidden_state"]
                if self.kind == "safetensors":  # a lazy map so far
                    hidden.clone()

        return read


class Ours:
    """The store. Reading maps the samples and compares every byte with its checksum."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self.width = folder, width

    def write(self, given: Sequence[Sample]) -> None:
        """Write these samples as a shard, durably."""
        if not self.folder.exists():
            self._store = Store.create(self.folder, *origin(self.width))
        with self._store.writer(given[0].key) as writer:
            for sample in given:
                writer.add(sample)

    def reader(self) -> Read:
        """Every byte of each sample through its checksum, mapped, not copied."""
        store = Store.open(self.folder)

        def read(keys: Sequence[str]) -> None:
            for key in keys:
                store.read(key)

        return read


class Copied(Ours):
    """The same, into memory that is used again, as from the memory map."""

    def reader(self) -> Read:
        """Every byte of each sample through its checksum and into memory."""
        store = Store.open(self.folder)
        index = store.index
        at = {key: number for number, key in enumerate(index["key"])}

        def read(keys: Sequence[str]) -> None:
            for key in keys:
                store.read_batch([index.row(at[key], named=True)], [FEATURE])

        return read


class Habit(Dataset[dict[str, torch.Tensor]]):
    """The field's data set: an item is a torch.load."""

    def __init__(self, files: PerFile, keys: Sequence[str]) -> None:
        self.files, self.keys = files, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return self.files.load(self.keys[at])


def pad(items: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The field's collator: zeros up to the longest of the batch."""
    rows = [item["hidden_state"] for item in items]
    out = torch.zeros(
        len(rows), max(map(len, rows)), rows[0].shape[1], dtype=rows[0].dtype
    )
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out


def habit_batches(files: PerFile, keys: Sequence[str], batch: int) -> None:
    """An epoch of the field's habit: DataLoader with two worker processes, padded batches."""
    loader = DataLoader(
        Habit(files, keys), batch_size=batch, num_workers=2, collate_fn=pad
    )
    for _ in loader:
        pass


def our_batches(store: Store, number: int) -> None:
    """An epoch from the store to packed bfloat16 tensors."""
    for samples in Epoch(store, [FEATURE], token_budget=BUDGET, epoch=number):
        as_torch(samples.features[FEATURE], "bfloat16")


Work = Callable[[], object]


def in_turns(
    works: Mapping[str, Sequence[Work]], before: Work = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each piece of the works: a piece of each in turn, another one first every time."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for pieces in zip(*works.values(), strict=True):
        turn = dict(zip(works, pieces, strict=True))
        order.append(order.pop(0))
        for name in order:
            before()
            spent[name].append(timed(turn[name]))
    return spent


def reading(kind: Any, keys: Sequence[str]) -> list[Callable[[], object]]:
    """Reading these samples, a few at a time; opening is part of the first time."""
    reads: list[Read] = []

    def turn(part: Sequence[str]) -> None:
        if not reads:
            reads.append(kind.reader())
        reads[0](part)

    return [
        partial(turn, keys[start : start + TURN]) for start in range(0, len(keys), TURN)
    ]


def at_once(kind: Any, keys: Sequence[str]) -> None:
    """Reading these samples."""
    for turn in reading(kind, keys):
        turn()


def writing(kind: Any, given: Sequence[Sample]) -> list[Callable[[], object]]:
    """Writing these samples, many at a time."""
    return [
        partial(kind.write, given[start : start + SHARD_SAMPLES])
        for start in range(0, len(given), SHARD_SAMPLES)
    ]


def measure(count: int, width: int, rounds: int, folder: Path) -> dict[str, Any]:
    """All rates and ratios; the stores stay in `folder` until the caller removes them."""
    given = list(samples(count, width))
    size = sum(sample.features[FEATURE].nbytes for sample in given)
    keys = [given[at].key for at in np.random.default_rng(1).permutation(count)]
    raw, ours = Raw(folder / "raw"), Ours(folder / "store", width)
    kinds: dict[str, Any] = {
        "memory map": raw,
        "store": ours,
        "torch.save": PerFile(folder / "torch", "pt"),
        "safetensors": PerFile(folder / "safetensors", "safetensors"),
    }
    readers = {
        **kinds,
        "store, copied": Copied(ours.folder, width),
        "map, checked": Checked(raw),
    }
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in readers}
    turns: dict[str, dict[str, list[float]]] = {name: {} for name in readers}

    def note(what: str, spent: Mapping[str, Sequence[float]], passes: int = 1) -> None:
        for name, seconds in spent.items():
            rates[name].setdefault(what, []).append(passes * size / sum(seconds) / 1e9)
            turns[name].setdefault(what, []).extend(seconds)

    for _ in range(rounds):
        for kind in kinds.values():
            shutil.rmtree(kind.folder, ignore_errors=True)
        os.sync()
        note(
            "write",
            in_turns({name: writing(kind, given) for name, kind in kinds.items()}),
        )
    mean_tokens = sum(len(sample.ids_T) for sample in given) / count
    given.clear()
    in_turns(
        {name: reading(kind, keys) for name, kind in readers.items()}
    )  # warms the cache
    passes = 2 * rounds
    for _ in range(passes):
        note(
            "read warm",
            in_turns({name: reading(kind, keys) for name, kind in readers.items()}),
        )
    cold = {
        name: [partial(at_once, kind, keys)] * passes for name, kind in kinds.items()
    }
    note("read cold", in_turns(cold, partial(drop, folder)), passes)
    batch = max(1, int(BUDGET / mean_tokens))
    store = Store.open(ours.folder)
    batches = {
        "store": [partial(our_batches, store, number) for number in range(passes)],
        "torch.save": [partial(habit_batches, kinds["torch.save"], keys, batch)]
        * passes,
        "map, checked": [partial(Blocks(raw, batch).epoch, keys)] * passes,
    }
    for work in batches.values():
        work[0]()  # into the cache, and into memory that is used again
    note("batches", in_turns(batches), passes)

    def ratio(what: str, name: str, floor: str) -> list[float]:
        """The quartiles over all turns."""
        pairs = zip(turns[name][what], turns[floor][what], strict=True)
        return statistics.quantiles(
            (theirs / mine for mine, theirs in pairs), n=4, method="inclusive"
        )

    ratios = {
        "read warm / memory map": ratio("read warm", "store", "memory map"),
        "copied and checked warm / memory map": ratio(
            "read warm", "store, copied", "memory map"
        ),
        "  its floor: any checked copy / memory map": ratio(
            "read warm", "map, checked", "memory map"
        ),
        "read cold / memory map": ratio("read cold", "store", "memory map"),
        "batches / torch.save habit": ratio("batches", "store", "torch.save"),
        "  its floor: any checked batches / habit": ratio(
            "batches", "map, checked", "torch.save"
        ),
        "write / raw write": ratio("write", "store", "memory map"),
    }
    table = {
        name: {what: statistics.median(values) for what, values in kind.items()}
        | {"files": sum(path.is_file() for path in readers[name].folder.rglob("*"))}
        | {
            "bytes": sum(
                path.stat().st_size
                for path in readers[name].folder.rglob("*")
                if path.is_file()
            )
        }
        for name, kind in rates.items()
    }
    return {
        "samples": count,
        "bytes": size,
        "quartiles of ratios": ratios,
        "goals": GOALS,
        "rates": table,
    }


def view_of_a_million(folder: Path) -> float:
    """Seconds from opening a store of a million samples to a finished view; its index is a cached one."""
    count = 10**6
    store = Store.create(folder, *origin(8))
    with store.writer("one") as writer:
        writer.add(next(samples(1, 8)))
    line = store.index.with_columns(code_ratio=pl.lit(0.01))
    rows = line.select(
        pl.all().repeat_by(count).explode(keep_nulls=True, empty_as_null=True)
    )
    rows = rows.with_columns(
        key=pl.format("s{}", pl.int_range(count) + count),
        words=pl.int_range(count) % 500,
    )
    write_table(
        store.backend,
        CacheRecord(schema=SCHEMA_VERSION, shards={"one": store.commit("one").folder}),
        rows,
    )
    text = "words > 5 and code_ratio < 0.05"
    return timed(lambda: filter_store(Store.open(folder), "view", expressions=[text]))


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where to write; the disk of it is what is measured"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench-store.json"))
    given = parser.parse_args()
    if given.rounds < 2 or given.samples < 1:
        parser.error("quartiles need --rounds 2 or more, of --samples 1 or more")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=given.folder))
    try:
        gc.freeze()  # each turn searches for garbage, and modules are none
        result = measure(given.samples, given.width, given.rounds, folder)
        result["view of a million rows, seconds"] = view_of_a_million(
            folder / "million"
        )
    finally:
        shutil.rmtree(folder)
    print(f"{result['samples']} samples, {result['bytes'] / 1e9:.2f} GB; GB/s")
    print(
        f"{'':14} {'write':>7} {'warm':>7} {'cold':>7} {'batches':>8} {'files':>6} {'bytes':>14}"
    )
    for name, row in result["rates"].items():
        rates = [
            f"{row.get(what, 0):7.2f}"
            for what in ("write", "read warm", "read cold", "batches")
        ]
        print(f"{name:14} {' '.join(rates)}  {row['files']:6} {row['bytes']:14}")
    for name, (low, middle, high) in result["quartiles of ratios"].items():
        goal = f", goal {GOALS[name]}" if name in GOALS else ""
        print(f"{name:42} {middle:6.2f}  ({low:.2f} to {high:.2f}){goal}")
    print(
        f"{'view of a million rows':42} {result['view of a million rows, seconds']:6.2f} s"
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))
    print(f"saved {given.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
