"""Planning and commits of capture at scale, without a model: a part of `benchmarks.scale`."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.store import FEATURE, origin
from vlmdistill.pipelines.cluster.queue import Member, Queue, Step
from vlmdistill.pipelines.cluster.session import Machine
from vlmdistill.pipelines.cluster.shared import some_media
from vlmdistill.pipelines.data.features import capturer, shard_plan
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import committed_shards
from vlmdistill.stores.schema import Sample, content_hash
from vlmdistill.stores.store import Store

WIDTH = 8
TOKENS_PER_SECOND = 20_000  # of a simulated worker
LOSSES = 0.01  # chance that a machine is lost as one of its tasks ends
PER_SHARD = 25  # samples
EACH = 16384  # rows of a pack of responses


def make_prompts(folder: Path, count: int) -> None:
    """A prompts file and responses of realistic length, in packs as `responses` leaves them.

    The keys differ, and texts repeat.
    """
    rng, words = (
        np.random.default_rng(0),
        ["the", "picture", "describe", "shows", "a", "of", "in", "what"],
    )
    text = " ".join(rng.choice(words, 1 << 16))
    rows, kept = [], []
    for number in range(EACH):
        start = int(rng.integers(1 << 15))
        image = {"type": "image", "path": f"/data/coco/train2017/{number:012}.jpg"}
        asked = {"type": "text", "text": text[start : start + 40 + start % 200]}
        rows.append(
            {"dataset": "llava", "split": "train", "augmentation": "long", "augmentation_text": text[:80],
             "messages": [{"role": "user", "content": [image, asked]}],
             "reference": text[start : start + 400],
             "source": "/data/llava_instruct_150k.json", "row": number, "turn": 1}
        )  # fmt: skip
        kept.append(
            {"ids": rng.integers(0, 150_000, 300), "text": text[start : start + 1300], "finish": "stop",
             "prompt_tokens": 400 + start % 300, "visual_tokens": 360, "words": 220, "repetition": 0.0,
             "keep": True, "reason": "", "detail": "", "temperature": 1.0, "top_p": 1.0,
             "max_new_tokens": 1024, "seed": 0, "target": "made up"}
        )  # fmt: skip
    asked, answers = (
        pa.Table.from_pylist(some, schema)
        for some, schema in ((rows, prompt_table.schema()), (kept, dataset.schema()))
    )
    (folder / "responses").mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(
        folder / "prompts.parquet", asked.schema, compression="zstd"
    ) as file:
        for first in range(0, count, EACH):
            keys = pa.array(
                [
                    content_hash(number)
                    for number in range(first, min(first + EACH, count))
                ]
            )
            file.write_table(
                asked.slice(0, len(keys)).set_column(0, asked.schema.field(0), keys)
            )
            pack = folder / "responses" / dataset.PACK.format(content_hash(first))
            some = answers.slice(0, len(keys)).set_column(
                0, answers.schema.field(0), keys
            )
            pq.write_table(some, pack, compression="zstd")


def plan_responses(path: str) -> None:
    """All of `responses` up to its first task."""
    folder = Path(path).parent
    prompts = prompt_table.load(folder / "prompts.parquet")
    missing = dataset.without_response(prompts, folder / "none")
    some_media(missing)
    next(responder.plan(missing, 64, 0))


def plan_features(path: str) -> None:
    """All of `features` up to its first shard, where all responses are there."""
    folder = Path(path).parent
    prompts = prompt_table.load(folder / "prompts.parquet")
    dataset.without_response(prompts, folder / "responses")
    generated = dataset.Responses(folder / "responses")
    items = shard_plan.missing_of(prompts, generated, set())
    facts = shard_plan.CaptureFacts("", (), 28672, 14336)
    next(
        shard_plan.tasks(
            prompts, generated, items, facts, capturer.CaptureSettings().shard_bytes
        )
    )


WORK: Mapping[str, Callable[[str], None]] = {
    "plan responses": plan_responses,
    "plan features": plan_features,
}


@dataclass(eq=False)
class Slot:
    """A simulated worker: what its machine was given to do, and when that ends on the simulated clock."""

    now: Callable[[], float]
    ends: float = 0.0

    @property
    def work(self) -> "Slot":
        """As an actor's method."""
        return self

    def remote(self, task: shard_plan.CaptureTask) -> bool:
        """Begin a task; its tokens take time."""
        self.ends = (
            self.now() + sum(item.tokens for item in task.items) / TOKENS_PER_SECOND
        )
        return True


class Simulation:
    """Machines of eight workers that come and go; tasks, queue and commits are the real ones."""

    def __init__(self, store: Store, workers: int, seed: int) -> None:
        self.store, self.rng = store, np.random.default_rng(seed)
        self.members: list[Member] = []
        self.clock, self.started, self.lost, self.repeated = 0.0, 0, 0, 0
        for _ in range(-(-workers // 8)):
            self.join()

    def join(self) -> None:
        """A machine comes."""
        self.started += 1
        machine = Machine(str(self.started), f"m{self.started}", "", 8, 0, 8)
        for slot in range(8):
            names = (f"worker {slot} on {machine.name}", machine.name)
            self.members.append(
                Member(Slot(lambda: self.clock), None, Step.idle, machine, names)
            )

    def run(self, tasks: Iterator[shard_plan.CaptureTask], until: float) -> int:
        """Work until all tasks, or so many samples, are done; the samples of these tasks."""
        queue = Queue[shard_plan.CaptureTask, capturer.CaptureResult](
            self.members, tasks
        )
        done = 0
        while queue and done < until:
            queue.assign()
            busy = [member for member in self.members if member.running]
            first = min(busy, key=lambda member: member.actor.ends)
            self.clock = first.actor.ends
            if self.rng.random() < LOSSES:
                self.lose(queue, first)
            else:
                task = first.running.task if first.running else None
                assert task
                self.capture(task)
                queue.did(first, capturer.CaptureResult(len(task.items)))
            done += sum(len(ended.task.items) for ended in queue.ended())
        return done

    def lose(self, queue: Any, first: Member) -> None:
        """The machine of a worker is lost, at times between a commit and the reply; another comes."""
        self.lost += 1
        gone = [member for member in self.members if member.machine is first.machine]
        for member in gone:
            self.members.remove(member)
            if member.running and self.rng.random() < 0.5:
                self.capture(member.running.task)
                self.repeated += 1
            queue.lost(member)
        self.join()

    def capture(self, task: shard_plan.CaptureTask) -> None:
        """The shard of a task, with a token for each sample."""
        at, rows = np.arange(1, dtype=np.int32), np.zeros((1, WIDTH), np.uint16)
        with self.store.writer(task.name) as writer:
            for key in task.keys:
                writer.add(
                    Sample(
                        key,
                        at,
                        at == 0,
                        at,
                        at,
                        (),
                        {FEATURE: rows},
                        {"dataset": "llava"},
                    )
                )


def simulate(folder: Path, samples: int, workers: int) -> None:
    """Capture with many workers; the driver is stopped in the middle, and started again."""
    path = folder / f"prompts-{samples}"
    if not path.exists():
        make_prompts(path, samples)
    shutil.rmtree(path / "store", ignore_errors=True)
    store = Store.create(path / "store", *origin(WIDTH))
    facts = shard_plan.CaptureFacts("", (), 1, 1)
    start = time.perf_counter()
    for run, until in enumerate((samples / 2, float("inf"))):
        prompts = prompt_table.load(path / "prompts.parquet")
        generated = dataset.Responses(path / "responses")
        items = shard_plan.missing_of(prompts, generated, store.keys())
        began, simulation = time.process_time(), Simulation(store, workers, run)
        tasks = shard_plan.tasks(prompts, generated, items, facts, PER_SHARD * 600)
        done = simulation.run(tasks, until)
        print(
            f"run {run + 1} of {workers} workers: {len(items)} samples were missing, {done} are done; "
            f"{simulation.lost} machines lost, with {simulation.repeated} shards that were committed; "
            f"{simulation.clock:.0f} simulated s, {time.process_time() - began:.1f} CPU-s",
            flush=True,
        )
    there = Store.open(path / "store")
    rows = sum(
        there.commit(shard).rows["sample"] for shard in committed_shards(there.backend)
    )
    print(
        f"{rows} samples in {len(committed_shards(there.backend))} shards, {len(there)} of {samples} keys, "
        f"{len(verify(path / 'store').findings)} findings, {time.perf_counter() - start:.0f} s"
    )
    if not rows == len(there) == samples:
        raise SystemExit("a sample is missing, or is there twice")
