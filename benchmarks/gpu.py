"""The figures of a GPU: exactness first, then what decoding, capture and training cost there.

    python -m benchmarks.gpu [--shape qwen2.5-vl-7b] [--runs DIR] [--parts ...] [--out FILE]
    python -m benchmarks.gpu --shape tiny --device cpu      # a rehearsal, in two minutes

A figure is printed as soon as it is known, beside what an H100 is expected to give. All
parts take less than eight minutes on an H100; compiling is last. The target has random
weights of a published shape (benchmarks/random_target.py). `--runs` is a workspace of the
demo with drafters, for the parts `exactness` and `deepspeed`.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers

from benchmarks import decode, train
from benchmarks.random_target import TINY, question, random_target
from vlmdistill.drafters.decoding.clock import wait
from vlmdistill.pipelines.targets import fused_layers
from vlmdistill.pipelines.targets.capture import Leaving, Transcript
from vlmdistill.pipelines.targets.fused_decoder import Decoder
from vlmdistill.pipelines.targets.text_layers import LayerInputs
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.schema import as_features


@dataclass(frozen=True)
class Sizes:
    """How much a part does."""

    rounds: int
    picture: int  # the side of a captured picture, in pixels
    response: int  # tokens of a captured response
    trees: Sequence[str]
    batches: Sequence[int]  # responses that are generated at a time
    new_tokens: int
    methods: Sequence[str]
    tokens: train.Tokens
    long: int  # positions of a long prefix
    prompts: int  # of the workspace, that are decoded


FULL = Sizes(
    rounds=20,
    picture=1008,
    response=200,
    trees=("chain-5", "30-3-8"),
    batches=(32, 128, 512),
    new_tokens=128,
    methods=("eagle2", "hass"),
    tokens=train.Tokens(prompt=400, visual=2400, supervised=1200),
    long=25_000,
    prompts=10,
)
SMALL = Sizes(
    rounds=2,
    picture=112,
    response=20,
    trees=("chain-3",),
    batches=(2, 4),
    new_tokens=6,
    methods=("eagle2",),
    tokens=train.Tokens(prompt=20, visual=60, supervised=30),
    long=300,
    prompts=2,
)


@dataclass(frozen=True)
class Figure:
    """One number, and what it is expected to be on an H100."""

    name: str
    value: float | str
    expected: str = ""

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name}: {shown}" + (
            f" (expected {self.expected})" if self.expected else ""
        )


@dataclass(frozen=True)
class Bench:
    """What the parts share."""

    device: torch.device
    sizes: Sizes
    target: VisionLanguageTarget
    runs: Path | None

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device.type == "cuda"

    def milliseconds(
        self, run: Callable[[], object], rounds: int | None = None
    ) -> float:
        """The median of a call, with the device's queued work."""
        for _ in range(2):
            run()
        spent = []
        for _ in range(rounds or self.sizes.rounds):
            spent.append(self.seconds(run))
        return 1e3 * statistics.median(spent)

    def seconds(self, run: Callable[[], object]) -> float:
        """One call, with the device's queued work."""
        wait(self.device)
        start = time.perf_counter()
        run()
        wait(self.device)
        return time.perf_counter() - start

    def peak(self, name: str) -> Iterator[Figure]:
        """The most memory since the last call, on a GPU."""
        if self.on_gpu:
            yield Figure(
                f"{name}: peak GiB",
                torch.cuda.max_memory_allocated(self.device) / 2**30,
            )
            torch.cuda.reset_peak_memory_stats(self.device)

    def command(self, *words: str) -> str:
        """The output of a `vlmdistill` command."""
        ran = subprocess.run(
            [sys.executable, "-m", "vlmdistill", *words], capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError(
                f"vlmdistill {' '.join(words)}: {ran.stderr.strip()[-500:]}"
            )
        return ran.stdout


def exactness(bench: Bench) -> Iterator[Figure]:
    """Responses of trained drafters against the stock model's, in both dtypes."""
    if bench.runs is None:
        yield Figure("responses against the stock model's", "not run: give --runs")
        return
    expected = {
        "float32": "all identical",
        "bfloat16": "0 to 3 near ties, none different",
    }
    for dtype in expected:
        reports = bench.runs / "demo-small" / "reports"
        before = set(reports.glob("*.json"))
        bench.command(
            "eval", "sparrow", "wren", "--model", "demo-small", "--runs", str(bench.runs),
            "--limit", str(bench.sizes.prompts), "--max-new-tokens", "96",
            "--temperature", "0", "--target-dtype", dtype, "--anyway",
        )  # fmt: skip
        checks: Counter[str] = Counter()
        for report in set(reports.glob("*.json")) - before:
            for evaluated in json.loads(report.read_text())["temperatures"]:
                checks.update(
                    prompt["drafted"]["check"] for prompt in evaluated["prompts"]
                )
        counts = ", ".join(
            f"{count} {check}" for check, count in sorted(checks.items())
        )
        yield Figure(f"responses in {dtype}", counts, expected[dtype])


def deepspeed(bench: Bench) -> Iterator[Figure]:
    """A drafter trained for 30 steps by the command, from features that it captures first."""
    if bench.runs is None:
        yield Figure("training by the command", "not run: give --runs")
        return
    where = ("--model", "demo-small", "--runs", str(bench.runs))
    bench.command("features", *where, "--for", "wren", "--workers", "0")
    seconds = bench.seconds(
        lambda: bench.command(
            "train", "wren", *where, "--name", "gpu", "--set", "steps=30", "--anyway"
        )
    )
    yield Figure(
        "30 training steps by the command, s", seconds, "20 to 30, start included"
    )


def attention(bench: Bench) -> Iterator[Figure]:
    """Masked attention at lengths that were not seen before: what the plans of cuDNN cost."""
    if not bench.on_gpu:
        yield Figure("masked attention at a new length", "not run: it is about a GPU")
        return

    def spent(first_length: int) -> tuple[float, float]:
        firsts, repeats = [], []
        for length in range(first_length, first_length + 12):
            query = torch.randn(
                1, 4, 42, 128, device=bench.device, dtype=torch.bfloat16
            )
            keys = torch.randn(
                1, 4, length, 128, device=bench.device, dtype=torch.bfloat16
            )
            mask = torch.zeros(42, length, device=bench.device, dtype=torch.bfloat16)

            def run(query: Any = query, keys: Any = keys, mask: Any = mask) -> object:
                return F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)

            firsts.append(bench.seconds(run))
            repeats.append(bench.seconds(run))
        return 1e3 * statistics.median(firsts), 1e3 * statistics.median(repeats)

    for enabled, first_length, expected in (
        (True, 1000, "20 to 300"),
        (False, 1050, "0.1"),
    ):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        first, again = spent(first_length)
        state = "on" if enabled else "off"
        yield Figure(f"attention at a new length, cuDNN {state}, ms", first, expected)
        yield Figure(f"the same again, cuDNN {state}, ms", again, "0.1")


def steps(bench: Bench) -> Iterator[Figure]:
    """Plain steps and cycles: see benchmarks/decode.py."""
    sizes = bench.sizes
    found = decode.measure(bench.target, "sparrow", sizes.trees, sizes.rounds)
    expected = {
        "plain step": "5.5 to 7",
        "stock step": "22 to 30",
        "plain step / weights read once": "1.2 to 1.4",
        "chain-5: verification / plain step": "1.05",
        "30-3-8: verification / plain step": "1.15",
        "chain-5: tokens per cycle to break even": "1.9",
        "30-3-8: tokens per cycle to break even": "2.2",
        "chain-5 draft": "4 to 5",
        "30-3-8 draft": "5 to 7",
    }
    for name, value in found.pop("milliseconds").items():
        yield Figure(f"{name}, ms", value, expected.get(name, ""))
    for name, value in found.items():
        if isinstance(value, float):
            yield Figure(name, value, expected.get(name, ""))


def long_context(bench: Bench) -> Iterator[Figure]:
    """Steps after a prefix as long as a video's; the floor reads weights, keys and values once."""
    target, positions = bench.target, bench.sizes.long
    weights = sum(
        weight.nbytes for weight in target.model.model.language_model.parameters()
    )
    prefix = positions * target._decoder.layers.shape.position_bytes(target.dtype)
    yield Figure(f"{positions} positions: keys and values / weights", prefix / weights)
    limits = {"": fused_layers.MANY_KEYS}
    if bench.on_gpu:
        limits[" by PyTorch's kernels"] = 1 << 60
    for name, limit in limits.items():
        with (
            mock.patch.object(fused_layers, "MANY_KEYS", limit),
            torch.inference_mode(),
        ):
            cache = target._decoder.start(positions + 64, positions)
            for block in cache._blocks:
                block.normal_()
            cache.length = positions
            for count in (1, 6, 30):
                ids_N = torch.ones(count, dtype=torch.long, device=bench.device)
                depth_N = torch.arange(1, count + 1, device=bench.device)

                def run(ids_N: Any = ids_N, depth_N: Any = depth_N) -> object:
                    states = target.extend(ids_N, depth_N, None, ("hidden",))
                    return target.logits(states["hidden"]).argmax(-1).tolist()

                spent = bench.milliseconds(run)
                expected = "8" if not name else ""
                yield Figure(
                    f"{positions} positions, pass of {count} tokens{name}, ms",
                    spent,
                    expected,
                )


def capture(bench: Bench) -> Iterator[Figure]:
    """Tokens per second of a capturing worker, and of the parts of its pass."""
    target, sizes = bench.target, bench.sizes
    prompts = [question(target, sizes.picture, seed) for seed in range(5)]
    responses = [[5 + number % 600 for number in range(sizes.response)]] * len(prompts)
    last = target.info.num_layers
    names = ("hidden.text", "hidden.span", f"layer{last // 2}.visual")
    texts = ("layer2.text", f"layer{last // 2}.text", f"layer{last - 3}.text")
    features = as_features([*names, *texts])
    sources = {feature.source for feature in features}
    sequences = [
        Transcript.of(prompt, response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    tokens = sum(prompt.length + sizes.response for prompt in prompts)
    visual = target._on_device(
        target.family.collate([prompt.inputs for prompt in prompts]),
        target.family.host_inputs,
    )
    ids_1L = torch.randint(5, 600, (1, tokens), device=bench.device)
    rope_3L = torch.arange(tokens, device=bench.device).expand(3, 1, -1)
    text = LayerInputs(
        hidden_BLD=target._text.embed_tokens(ids_1L),
        rope_ABL=rope_3L,
        visual_U=ids_1L.new_empty(0),
    )
    writer = ThreadPoolExecutor(1)
    running: list[Future[object]] = []

    def cut(batches: list[Leaving]) -> object:
        return [batch.samples() for batch in batches]

    def whole() -> None:
        batches = target.begin_capture(prompts, responses, features)
        running.append(writer.submit(cut, batches))
        if len(running) > 1:
            running.pop(0).result()

    pieces: dict[str, tuple[Callable[[], object], str]] = {
        "text layers alone": (lambda: target._run(text, (), None), "35,000"),
        "vision tower alone": (
            lambda: target.family.encode_images(target.model, visual),
            "",
        ),
        "bare pass": (lambda: target._states(prompts, sequences, sources), "20,000"),
        "capture, one batch ahead": (whole, "20,000"),
    }
    rates = {}
    for name, (run, expected) in pieces.items():
        with torch.inference_mode():
            spent = bench.milliseconds(run, max(1, sizes.rounds // 2))
        rates[name] = tokens / spent * 1e3
        yield Figure(f"{name}, ms for {tokens} tokens", spent)
        yield Figure(f"{name}, tokens/s", rates[name], expected)
    writer.shutdown()
    whole_of_bare = rates["capture, one batch ahead"] / rates["bare pass"]
    yield Figure("capture / bare pass", whole_of_bare, "0.95 at least")
    yield from bench.peak("capture")


def generate(bench: Bench) -> Iterator[Figure]:
    """Tokens per second by the number of responses at a time, prefill included."""
    target, sizes = bench.target, bench.sizes
    expected = {32: "3,500", 128: "11,000", 512: "25,000"}
    for batch in sizes.batches:
        prompts = [
            question(target, sizes.picture // 4, seed % 4) for seed in range(batch)
        ]
        counted: list[int] = []

        def run(
            new_tokens: int,
            prompts: Any = prompts,
            batch: int = batch,
            counted: Any = counted,
        ) -> None:
            responses = target.generate(
                prompts, max_new_tokens=new_tokens, batch_size=batch
            )
            counted.append(sum(len(response.ids) for response in responses))

        first_tokens = bench.seconds(partial(run, 1))
        seconds = bench.seconds(partial(run, sizes.new_tokens))
        rate = counted[-1] / seconds
        yield Figure(f"{batch} responses: tokens/s", rate, expected.get(batch, ""))
        yield Figure(f"{batch} responses: s to the first tokens", first_tokens)
        step = 1e3 * (seconds - first_tokens) / (sizes.new_tokens - 1)
        yield Figure(f"{batch} responses: ms a step", step)
        yield from bench.peak(f"{batch} responses")


def training(bench: Bench) -> Iterator[Figure]:
    """A training step against the official codes' and the products with the LM head."""
    info = bench.target.info
    for method in bench.sizes.methods:
        case = train.Case(
            method,
            info.hidden_size,
            info.vocab_size,
            heads=info.num_heads,
            tokens=bench.sizes.tokens,
            device=bench.device.type,
        )
        for name, value in train.measure(case, max(1, bench.sizes.rounds // 5)).items():
            yield Figure(f"{method}: {name}", float(value))
        yield from bench.peak(f"{method}")
        gc.collect()


def compiled(bench: Bench) -> Iterator[Figure]:
    """Passes of 1 and 6 tokens as one program each; on a GPU a CUDA graph."""
    target = bench.target
    prompt = question(target, bench.sizes.picture // 4)
    eager = target._decoder
    decoders = {"eager": eager}
    if bench.on_gpu:
        decoders["compiled"] = Decoder(target._text, eager.layers, compiled=True)
    expected = {("compiled", 1): "5.0 to 5.3", ("compiled", 6): "5.0 to 5.3"}
    for name, decoder in decoders.items():
        target.__dict__["_decoder"] = decoder
        with torch.inference_mode():
            target.prefill(prompt)
            for count in (1, 6):
                ids_N = torch.ones(count, dtype=torch.long, device=bench.device)
                depth_N = torch.arange(1, count + 1, device=bench.device)

                def run(ids_N: Any = ids_N, depth_N: Any = depth_N) -> object:
                    states = target.extend(ids_N, depth_N, None, ("hidden",))
                    return target.logits(states["hidden"]).argmax(-1).tolist()

                first = bench.seconds(run)
                spent = bench.milliseconds(run)
                passes = f"{name} pass of {count} tokens"
                yield Figure(f"{passes}, ms", spent, expected.get((name, count), ""))
                yield Figure(f"{passes}, s at first", first)
    target.__dict__["_decoder"] = eager


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "exactness": exactness,
    "deepspeed": deepspeed,
    "attention": attention,
    "steps": steps,
    "long_context": long_context,
    "capture": capture,
    "generate": generate,
    "training": training,
    "compiled": compiled,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each figure at once; `--out` has all of them. Exits with 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-vl-7b")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    start = time.perf_counter()
    figures: list[Figure] = []

    def tell(figure: Figure) -> None:
        figures.append(figure)
        print(f"[{time.perf_counter() - start:4.0f} s] {figure}", flush=True)
        if options.out:
            options.out.write_text(
                json.dumps([asdict(one) for one in figures], indent=1)
            )

    if device.type == "cuda":
        tell(Figure("GPU", torch.cuda.get_device_name(device)))
    tell(
        Figure(
            "torch, transformers", f"{torch.__version__}, {transformers.__version__}"
        )
    )
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        target = random_target(options.shape, device, Path(folder) / "target")
        tell(Figure("target", repr(target)))
        sizes = SMALL if options.shape == TINY else FULL
        bench = Bench(device, sizes, target, options.runs)
        for name in options.parts.split(","):
            began = time.perf_counter()
            try:
                for figure in PARTS[name](bench):
                    tell(figure)
            except Exception as error:  # noqa: BLE001 (the next part may work)
                failures += 1
                traceback.print_exc()
                tell(Figure(f"{name} failed", f"{type(error).__name__}: {error}"[:300]))
                gc.collect()
                torch.cuda.empty_cache()
            tell(Figure(f"part {name}, s", time.perf_counter() - began))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
