"""The whole path of a capturing worker against the bare forward pass of its target on the same batches.

    python -m benchmarks.capture [--model demo-small] [--samples 512] [--rounds 5] [--batch-tokens 8192]
    python -m benchmarks.capture --width 1024 [--samples 64]
    python -m benchmarks.capture --encode 2

One worker, in one process, without Ray. Each round runs every shard three times: bare (prompts are encoded
already, the states of all captured layers are taken, nothing is kept), serial (the whole path, one stage
after the other: media are read and encoded, forward pass, transfer, cut, write, commit) and overlapped, as a
worker does it. A ratio is the time of the first by that of another: medians and quartiles over shards and
rounds. A table has the time of each stage of the serial path. The floor is the ratio if all were hidden but
what no batch runs beside: the first encoding and the last commit of each shard. With --width, the target is
the demo's with another width and random weights: its operations take as long as those of a target of use.
With --encode N, only the encoding of pictures of a megapixel is timed, with one thread and with N.
"""

import argparse
import functools
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image

from vlmdistill.drafters.decoding.clock import wait
from vlmdistill.pipelines.data.features import capturer
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import (
    Capturer,
    CaptureSettings,
    stored_head,
)
from vlmdistill.pipelines.data.features.shard_plan import CaptureItem, CaptureTask
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.pipelines.demo.prompts import DemoSize, import_demo
from vlmdistill.pipelines.media.images import large_images
from vlmdistill.pipelines.targets import batching
from vlmdistill.pipelines.targets import encode as target_encode
from vlmdistill.pipelines.targets.batching import packed
from vlmdistill.pipelines.targets.capture import Leaving, Transcript
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load_for_capture
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.stores.store import Store
from vlmdistill.stores.writer import Writer

RELEASED = {
    "shortest_edge": 56 * 56,
    "longest_edge": 28 * 28 * 16384,
}  # of the released Qwen2.5-VL
STAGES: dict[str, tuple[Any, str]] = {
    "read and encode media": (TargetModel, "encode"),
    "forward pass": (TargetModel, "_states"),
    "transfer and cut": (Leaving, "samples"),
    "write": (Writer, "add"),
    "commit": (Writer, "_commit"),
}


def widened(folder: Path, width: int) -> str:
    """A checkpoint of the demo's architecture, heads and processor, of another width, with random weights."""
    model = EMBEDDED["demo-small"]
    config = transformers.AutoConfig.from_pretrained(model)
    text, heads = config.text_config, config.text_config.num_attention_heads * width
    text.num_attention_heads = heads // text.hidden_size
    text.num_key_value_heads = text.num_attention_heads // 2
    text.intermediate_size = 2 * width
    text.hidden_size = config.vision_config.out_hidden_size = width
    shutil.copytree(
        model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return str(folder)


def items_of(folder: Path, target: TargetModel, count: int) -> list[CaptureItem]:
    """Prompts with one picture each, and the reference texts of the demo as responses."""
    import_demo(
        folder, folder / "prompts.parquet", DemoSize(count, 1, held_out=(1, 1, 0))
    )
    items = []
    pictured = [
        prompt
        for prompt in prompt_table.read(folder / "prompts.parquet")
        if prompt.files
    ]
    for prompt in pictured[:count]:
        ids = target.tokenizer(prompt.reference).input_ids
        length, text = target.encode(prompt.messages).length, prompt.reference or ""
        row = ResponseRow(
            key=prompt.key, ids=ids, text=text, keep=True, temperature=1, top_p=1, max_new_tokens=1,
            target="", prompt_tokens=length,
        )  # fmt: skip
        items.append(CaptureItem(prompt, row))
    return sorted(items, key=lambda item: item.tokens, reverse=True)


def bare(
    worker: Capturer, tasks: Sequence[CaptureTask]
) -> Callable[[CaptureTask], None]:
    """The forward pass alone over the batches of a task."""
    target, sources = worker.target, {feature.source for feature in worker.features}
    encoded = {
        item.prompt.key: target.encode(item.prompt.messages)
        for task in tasks
        for item in task.items
    }

    @torch.inference_mode()
    def run(task: CaptureTask) -> None:
        for batch in packed(
            task.items, lambda item: item.tokens, worker.settings.batch_tokens
        ):
            prompts = [encoded[item.prompt.key] for item in batch]
            pairs = zip(prompts, batch, strict=True)
            target._states(
                prompts,
                [Transcript.of(one, item.response.ids) for one, item in pairs],
                sources,
            )
        wait(target.device)

    return run


@contextmanager
def watched(spent: dict[tuple[str, str], float]) -> Iterator[None]:
    """Adds up the seconds of each stage, by the clock and on the processor, while it is open."""
    lock = threading.Lock()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            start, busy = time.perf_counter(), time.thread_time()
            try:
                return call(*given, **named)
            finally:
                with lock:
                    spent[name, "clock"] += time.perf_counter() - start
                    spent[name, "processor"] += time.thread_time() - busy

        return run

    with ExitStack() as stack:
        for name, (owner, method) in STAGES.items():
            stack.enter_context(
                mock.patch.object(owner, method, timed(name, getattr(owner, method)))
            )
        yield


def measure(
    model: str,
    samples: int,
    rounds: int,
    batch_tokens: int,
    shard_samples: int,
    width: int | None,
) -> None:
    """Print the ratio and where the time goes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = widened(folder / "wide", width) if width else model
        worker = Capturer(
            model,
            CaptureStore(folder / "store-0"),
            "",
            CaptureSettings(batch_tokens=batch_tokens),
        )
        items = items_of(folder / "data", worker.target, samples)
        tasks = [
            CaptureTask.of(items[at : at + shard_samples])
            for at in range(0, len(items), shard_samples)
        ]
        run = bare(worker, tasks)
        for task in tasks:  # warm-up: caches of media, kernels
            run(task)
            worker.work(task)
        spent, turns = (
            defaultdict[tuple[str, str], float](float),
            list[tuple[float, float, float]](),
        )
        for number in range(rounds):
            empty = (
                worker.store.provenance,
                worker.target.info,
                stored_head(worker.target),
            )
            stores = [
                Store.create(folder / f"{number}-{way}", *empty)
                for way in ("serial", "overlapped")
            ]
            for task in tasks:
                clock = [time.perf_counter()]
                run(task)
                clock.append(time.perf_counter())
                worker.store = stores[0]
                with watched(spent), serial():
                    worker.work(task)
                clock.append(time.perf_counter())
                worker.store = stores[1]
                worker.work(task)
                clock.append(time.perf_counter())
                turns.append(
                    (clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2])
                )
        tokens = sum(item.tokens for item in items)
        print(
            f"{samples} samples, {tokens} tokens, {len(tasks)} shards, {rounds} rounds, {model}"
        )
        for at, way in enumerate(("bare", "serial", "overlapped")):
            ratios = [turn[0] / turn[at] for turn in turns]
            low, median, high = statistics.quantiles(ratios, n=4)
            rate = tokens * rounds / sum(turn[at] for turn in turns)
            print(
                f"{way:12} {rate:6.0f} tokens/s, ratio {median:.3f} ({low:.3f} to {high:.3f})"
            )
        whole = {
            kind: sum(spent[name, kind] for name in STAGES)
            for kind in ("clock", "processor")
        }
        for name in STAGES:
            print(
                f"{name:24}"
                + "".join(
                    f" {spent[name, kind] / whole[kind]:6.1%} {kind}" for kind in whole
                )
            )
        batches = sum(
            len([*packed(task.items, lambda item: item.tokens, batch_tokens)])
            for task in tasks
        )
        encode, forward, commit = (
            spent[name, "processor"]
            for name in ("read and encode media", "forward pass", "commit")
        )
        print(
            f"floor {forward / (forward + encode * len(tasks) / batches + commit):.3f}, by processor time"
        )


def encoding(model: str, images: int, threads: int) -> None:
    """Print how many pictures of a megapixel one thread and `threads` read and encode in a second."""
    target, noise = load_for_capture(model), np.random.default_rng(0)
    target.processor.image_processor.size = RELEASED
    with tempfile.TemporaryDirectory() as folder, large_images():
        paths = [f"{folder}/{number}.jpg" for number in range(8)]
        for path in paths:
            small = Image.fromarray(noise.integers(0, 256, (64, 64, 3), np.uint8))
            small.resize((1024, 1024)).save(path)

        def encode(number: int) -> int:
            image = {"type": "image", "path": paths[number % len(paths)]}
            prompt = target_encode.encode(
                [{"role": "user", "content": [image]}],
                family=target.family,
                model=target.model,
                processor=target.processor,
                max_length=2**20,
                max_characters=2**20,
            )
            return sum(span.length for span in prompt.spans)

        tokens, rates = encode(0), dict[int, list[float]]()
        for _ in range(5):
            for number in (1, threads):
                start = time.perf_counter()
                with closing(
                    batching.one_ahead([range(images)], encode, number)
                ) as ahead:
                    next(ahead)
                rates.setdefault(number, []).append(
                    images / (time.perf_counter() - start)
                )
    print(f"an image of 1 MP has {tokens} visual tokens")
    for number, rate in rates.items():
        low, median, high = statistics.quantiles(rate, n=4)
        print(f"{number} threads: {median:.1f} images/s ({low:.1f} to {high:.1f})")
    ratios = [many / one for one, many in zip(rates[1], rates[threads], strict=True)]
    print(
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def in_turn(batches: Any, make: Any, threads: int) -> Iterator[Any]:
    """Each batch with what is made of it, nothing ahead."""
    del threads
    return ((batch, [make(item) for item in batch]) for batch in batches)


@contextmanager
def serial() -> Iterator[None]:
    """One stage after the other, while it is open."""

    class Inline(Executor):
        def submit(self, call: Any, /, *given: Any, **named: Any) -> Any:
            done = Future[Any]()
            done.set_result(call(*given, **named))
            return done

    with (
        mock.patch.object(batching, "one_ahead", in_turn),
        mock.patch.object(capturer, "ThreadPoolExecutor", return_value=Inline()),
    ):
        yield


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture", description=__doc__
    )
    parser.add_argument("--model", default="demo-small")
    parser.add_argument(
        "--width", type=int, help="of random weights, instead of the model"
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--shard-samples", type=int, default=128)
    parser.add_argument(
        "--encode",
        type=int,
        default=0,
        metavar="N",
        help="encode alone, with 1 and N threads",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.encode:
        encoding(given.model, 16, given.encode)
        return
    measure(
        given.model,
        given.samples,
        given.rounds,
        given.batch_tokens,
        given.shard_samples,
        given.width,
    )


if __name__ == "__main__":
    main()
