"""What a large store costs, without its tensors: CPU seconds, memory and requests, by number of samples.

    python -m benchmarks.scale FOLDER [--samples 1000000] [--shards 10000] [--columns few|capture]
    python -m benchmarks.scale FOLDER --requests [--samples 4000] [--shards 200]
    python -m benchmarks.scale FOLDER --plan [--samples 1000000]
    python -m benchmarks.scale FOLDER --simulate 1000 [--samples 100000]

The first makes a store in FOLDER, unless it is there, whose samples have one token each and share their
tensors, and runs each command over it in a process of its own. The second counts the requests to an S3 server
of this machine. The third plans `responses` and `features` of synthetic prompts. The last captures them with
workers that have no model and machines that are lost; see `benchmarks.planning`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from vlmdistill.stores.commits import LEDGER
from vlmdistill.stores.index.arrow import read_arrow, to_arrow
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import (
    CACHE,
    INDEX,
    commit_name,
    digest,
    seal,
    shard_folder,
)
from vlmdistill.stores.schema import Sample, content_hash
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info

WIDTH = 8
FEW = {"words": 7, "code_ratio": 0.01}
CAPTURE = {  # what the capture of features keeps of a sample
    **FEW, "dataset": "llava", "split": "train", "augmentation": "none", "finish": "stop", "repetition": 0.0,
    "sketch": "0123456789abcdef" * 5, "images": 1, "videos": 0, "frames": 0,
    "media": '[{"image": "/data/coco/train2017/000000123456.jpg"}]',
}  # fmt: skip


def make(path: Path, samples: int, shards: int, meta: Mapping[str, Any]) -> None:
    """Write a store: one shard as a writer does, and the others as copies of it, with keys of their own."""
    from benchmarks.store import FEATURE, origin  # torch is not what is measured here

    provenance, about, head = origin(WIDTH)
    store = Store.create(path, provenance, about, head)
    each = samples // shards
    at, rows = np.arange(1, dtype=np.int32), np.zeros((1, WIDTH), np.uint16)
    with store.writer("template") as writer:
        for number in range(each):
            writer.add(
                Sample(f"{number:016x}", at, at == 0, at, at, (), {FEATURE: rows}, meta)
            )
    template = store.commit("template")
    table = read_arrow(store.backend, f"{template.path}/{INDEX}", template.files[INDEX])
    for number in range(shards):
        keys = pa.array([content_hash([number, one]) for one in range(each)])
        data, shard = to_arrow(table.set_column(0, "key", keys)), content_hash(number)
        files = {**template.files, INDEX: (len(data), digest(data))}
        record = replace(
            template, shard=shard, folder=shard_folder(shard, files), files=files
        )
        for file in template.files:
            (path / record.path / file).parent.mkdir(parents=True, exist_ok=True)
            if file != INDEX:
                os.link(path / template.path / file, path / record.path / file)
        (path / record.path / INDEX).write_bytes(data)
        for name in (commit_name(shard), f"{LEDGER}/{commit_name(shard)}"):
            (path / name).write_bytes(seal(record))
    for name in (
        commit_name("template"),
        f"{LEDGER}/{commit_name('template')}",
        template.path,
    ):
        store.backend.remove(name)
    shutil.rmtree(path / CACHE, ignore_errors=True)


WORK: Mapping[str, Callable[[str], object]] = {
    "nothing": lambda path: None,
    "open": lambda path: len(Store.open(path)),
    "keys": lambda path: len(Store.open(path).keys()),
    "info": lambda path: info(Store.open(path)),
    "verify": lambda path: verify(path),
}


def measured(work: str, path: str) -> dict[str, float]:
    """CPU seconds, seconds and peak memory of some work in a process of its own."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", path, "--work", work],
        check=True,
        stdout=sys.stderr,
    )
    with open(f"{path}.json") as file:
        return {**json.load(file), "seconds": time.perf_counter() - start}


def do(work: str, path: str) -> None:
    """The child of `measured`."""
    if work.startswith("plan"):
        from benchmarks import planning

        planning.WORK[work](path)
    else:
        WORK[work](path)
    status = Path(
        "/proc/self/status"
    ).read_text()  # `ru_maxrss` is that of the parent, where it is larger
    peak = int(status.partition("VmHWM:")[2].split()[0])
    facts = {"cpu_seconds": time.process_time(), "peak_mb": peak * 1024 / 1e6}
    Path(f"{path}.json").write_text(json.dumps(facts))


def local(folder: Path, samples: int, shards: int, columns: str) -> None:
    """Each command over a store on this disk."""
    path = folder / f"store-{samples}-{shards}-{columns}"
    if not path.exists():
        start = time.perf_counter()
        make(path, samples, shards, CAPTURE if columns == "capture" else FEW)
        print(f"made in {time.perf_counter() - start:.0f} s")
    shutil.rmtree(path / CACHE, ignore_errors=True)
    print(f"{samples} samples, {shards} shards, columns: {columns}")
    for name, work in (("nothing", "nothing"), ("first open", "open"), ("cached open", "open"),
                       ("info, cached", "info"), ("verify", "verify")):  # fmt: skip
        used = measured(work, str(path))
        print(
            f"{name:14} "
            + "  ".join(f"{what} {value:.2f}" for what, value in used.items()),
            flush=True,
        )


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The requests to S3, by operation, while it is open."""
    from aiobotocore.client import AioBaseClient  # type: ignore[import-untyped]

    counts, call = Counter[str](), AioBaseClient._make_api_call

    async def counting(client: Any, operation: str, given: Any) -> Any:
        counts[operation] += 1
        return await call(client, operation, given)

    with mock.patch.object(AioBaseClient, "_make_api_call", counting):
        yield counts


def requests(folder: Path, samples: int, shards: int) -> None:
    """The requests that each command makes of an S3 server of this machine."""
    from tests.s3 import s3_server  # slow to import, and not what is measured elsewhere

    path, back = folder / f"store-{samples}-{shards}-few", folder / "pulled"
    if not path.exists():
        make(path, samples, shards, FEW)
    shutil.rmtree(path / CACHE, ignore_errors=True)
    shutil.rmtree(back, ignore_errors=True)
    print(
        f"requests to S3, {shards} shards of {len(Store.open(path).layout.arrays)} arrays"
    )
    with s3_server() as server:
        key = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        os.environ |= {
            "AWS_ENDPOINT_URL": server,
            "AWS_DEFAULT_REGION": "us-east-1",
            **key,
        }
        urlopen(Request(f"{server}/bucket", method="PUT")).close()
        url = "s3://bucket/store"
        steps: Mapping[str, Callable[[], object]] = {
            "push": lambda: send(path, url),
            "first open": lambda: WORK["open"](url),
            "cached open": lambda: WORK["open"](url),
            "info, cached": lambda: WORK["info"](url),
            "verify": lambda: WORK["verify"](url),
            "pull": lambda: send(url, back),
        }
        for name, step in steps.items():
            if name == "first open":
                Store.open(url).backend.remove(CACHE)
            with counted() as counts:
                step()
            each = f"{counts.total() / shards:.1f} a shard"
            print(
                f"{name:14} {counts.total()} ({each}): {dict(counts.most_common())}",
                flush=True,
            )


def plans(folder: Path, count: int) -> None:
    """What the driver of `responses` and `features` needs up to its first task."""
    from benchmarks.planning import make_prompts

    path = folder / f"prompts-{count}"
    if not path.exists():
        make_prompts(path, count)
    for work in ("plan responses", "plan features"):
        used = measured(work, str(path / "prompts"))
        print(
            f"{work:14} "
            + "  ".join(f"{what} {value:.2f}" for what, value in used.items()),
            flush=True,
        )


TEXT, VISUAL, WIDE = 640, 360, 3584  # tokens of a sample, and the width of a 7B target
TEXT_FEATURES, VISUAL_FEATURES = 1, 2  # in bfloat16
GPU_SECONDS = (
    300 / 3000 + 1000 / 20_000
)  # 300 tokens generated and 1,000 captured, at these tokens/s
GPU_HOUR, GB_MONTH, PUTS, GETS = (
    2.5,
    0.023,
    5e-6,
    0.4e-6,
)  # dollars: a GPU, storage, a request of each kind
INDEX_BYTES, CACHE_NAME = (
    209,
    88,
)  # measured: of a sample in the cached index; of a shard in its record


def costs() -> None:
    """What samples cost, by the constants above."""
    sample = 2 * WIDE * (TEXT * TEXT_FEATURES + VISUAL * VISUAL_FEATURES) + 16 * TEXT
    arrays = 1 + TEXT_FEATURES + VISUAL_FEATURES
    for samples in (10**6, 10**8):
        shards = -(-samples // min(256, (512 << 20) // sample))
        files = 2 + 2 * arrays  # of a shard
        hours, stored = samples * GPU_SECONDS / 3600, samples * sample
        facts = {
            "TB": stored / 1e12,
            "shards": shards,
            "files": shards * (files + 2),
            "requests of a push": shards * (2 * files + 10),
            "requests of a first open": 2 * shards,
            "requests of a pull": shards * (files + 1),
            "GB of the index": samples * INDEX_BYTES / 1e9,
            "MB of its record": shards * CACHE_NAME / 1e6,
            "GPU hours": hours,
            "dollars for GPUs": hours * GPU_HOUR,
            "dollars a month for storage": stored / 1e9 * GB_MONTH,
            "dollars for the requests of a push": shards
            * ((files + 2) * PUTS + (files + 5) * GETS),
        }
        print(
            f"{samples} samples: "
            + ", ".join(f"{value:.6g} {what}" for what, value in facts.items())
        )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--samples", type=int, default=1_000_000, help="50000 are enough to simulate"
    )
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--columns", choices=("few", "capture"), default="few")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument(
        "--requests", action="store_true", help="count the requests to S3"
    )
    parser.add_argument(
        "--costs",
        action="store_true",
        help="what a million samples cost, and 100 million",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="plan responses and features, without a model",
    )
    parser.add_argument(
        "--simulate", type=int, metavar="WORKERS", help="capture without a model"
    )
    given = parser.parse_args()
    if given.work:
        do(given.work, str(given.folder))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.costs:
        costs()
    elif given.plan:
        plans(given.folder, given.samples)
    elif given.simulate:
        from benchmarks.planning import simulate

        simulate(given.folder, given.samples, given.simulate)
    elif given.requests:
        requests(given.folder, given.samples, given.shards)
    else:
        local(given.folder, given.samples, given.shards, given.columns)


if __name__ == "__main__":
    main()
