"""The training step against the step of the official codes, and against the products that it cannot save.

    python -m benchmarks.train [--method hass] [--width 512] [--vocabulary 32000] [--out FILE]
    python -m benchmarks.train --profile [--method sparrow] ...

One packed batch, forward and backward, on one thread: 600 visual and 400 text tokens, 300 of them supervised.
The official step (`benchmarks/official_step.py`) has the same weights. It runs twice: with torch's default
products, and with those of our step, when the ratio is of the algorithm alone. The losses agree, but for
ViSpec's second pass, whose input differs (docs/papers.md). The floor is the products with the LM head alone:
drafter and gradient for each row and hop, target for each row. Rounds run all of them in turn; a figure is
the median of processor seconds, a ratio the median of the ratios within a round.

`--profile` shows where the time of a step goes, noise included, by kinds of operations; the same products of
matrices alone, as a floor. How often a GPU is waited for, `tests/pretend` counts.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, profiler
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.official_step import OfficialStep
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch, Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.training import cpu
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.schema import TargetInfo

METHODS = ("eagle2", "hass", "vispec")


@dataclass(frozen=True)
class Tokens:
    """The tokens of the one sample."""

    prompt: int = 100  # of text
    visual: int = 600
    supervised: int = 300  # of the response


@dataclass(frozen=True)
class Case:
    """One method at one size."""

    method: str
    width: int
    vocabulary: int
    heads: int = 0  # 0: of width 64
    tokens: Tokens = Tokens()
    device: str = "cpu"

    @property
    def name(self) -> str:
        """As a line of the table begins."""
        return f"{self.method}, width {self.width}, vocabulary {self.vocabulary}"

    @contextmanager
    def placed(self) -> Iterator[None]:
        """What is made within is on the device, on a GPU in bfloat16."""
        before = torch.get_default_dtype()
        if self.device == "cuda":
            torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)

    def clock(self) -> float:
        """Processor seconds; of a GPU, the seconds that passed until its work was done."""
        if self.device != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a step, of the official step and of the floor, and their ratios."""
    with case.placed():
        return _measure(case, rounds)


def _measure(case: Case, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    info, config = _info(case), catalogue.config(case.method)
    stage = config.training.schedule[-1]
    table_VD = torch.randn(case.vocabulary, case.width) * case.width**-0.5
    drafter = catalogue.trained(case.method)(
        config.model, info, Head(table_VD, table_VD)
    ).train()
    assert isinstance(drafter, EagleDrafter)
    batch = _batch(drafter, case.tokens)
    rows_RD = torch.randn(case.tokens.supervised, case.width)

    detach = config.training.detach
    official = OfficialStep(drafter, batch, stage, detach=detach)

    def step() -> float:
        with cpu.tuned():
            return _backward(unroll(drafter, batch, stage, detach=detach).total)

    def theirs() -> float:
        return _backward(official())

    def theirs_tuned() -> float:
        with cpu.tuned():
            return _backward(official())

    def floor() -> float:
        with cpu.tuned():
            for _ in range(stage.hops):
                torch.mm(torch.mm(rows_RD, table_VD.T), table_VD)
            torch.mm(rows_RD, table_VD.T)
        return 0.0

    same = "official, same products"
    pieces = {"step": step, "official": theirs, same: theirs_tuned, "floor": floor}
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(rounds + 1):
        for name, run in pieces.items():
            start = case.clock()
            losses[name] = run()
            if number:  # the first round pays for what is made once
                seconds[name].append(case.clock() - start)
    return {
        "hops": stage.hops,
        **{f"{name}, s": statistics.median(values) for name, values in seconds.items()},
        "official / step": _ratio(seconds["official"], seconds["step"]),
        f"{same} / step": _ratio(seconds[same], seconds["step"]),
        "floor / step": _ratio(seconds["floor"], seconds["step"]),
        "loss / official": losses["step"] / losses["official"],
    }


KINDS = {
    "products": "mm addmm bmm baddbmm",
    "attention": "_scaled_dot_product _flash _fused",
    "softmax, top-k": "_log_softmax _softmax topk argmax _logcumsumexp",
    "gathers, copies": "index _index gather scatter copy_ cat embedding fill_ zero_",
}
"""Kinds of operations by the beginnings of their names; all others count as `other`."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down products and sorts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[torch.Size, torch.Size]] = []
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.products.append((args[-2].shape, args[-1].shape))
        self.counts["sorts"] += name in ("sort", "argsort")
        return func(*args, **(kwargs or {}))


def shares(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a step by kind of operation, and of its products of matrices alone; sorts."""
    torch.manual_seed(0)
    stage = catalogue.config(case.method).training.schedule[-1]
    table_VD = torch.randn(case.vocabulary, case.width) * case.width**-0.5
    config = catalogue.config(case.method).model
    drafter = catalogue.trained(case.method)(
        config, _info(case), Head(table_VD, table_VD)
    ).train()
    made = _batch(drafter, case.tokens)

    def step() -> None:
        generator = torch.Generator().manual_seed(0)
        batch = made.having(made.features)  # nothing is known of it yet
        _backward(unroll(drafter, batch, stage, generator, noise=0.2).total)

    step()
    with _Watch() as watch:
        step()
    operands = [
        (torch.randn(*one), torch.randn(*other)) for one, other in watch.products
    ]
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        start = time.process_time()
        step()
        found.setdefault("step", []).append(time.process_time() - start)
        start = time.process_time()
        for one, other in operands:
            torch.mm(one, other)
        found.setdefault("floor", []).append(time.process_time() - start)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as trace:
        for _ in range(rounds):
            step()
    spent = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in trace.key_averages():
        begins = {
            kind: tuple(f"aten::{name}" for name in names.split())
            for kind, names in KINDS.items()
        }
        kind = next(
            (kind for kind, names in begins.items() if event.key.startswith(names)),
            "other",
        )
        spent[kind] += event.self_cpu_time_total / 1e6 / rounds
    return {
        "hops": stage.hops,
        **{
            f"{name}, CPU-s": statistics.median(values)
            for name, values in found.items()
        },
        **{kind: seconds / sum(spent.values()) for kind, seconds in spent.items()},
        "floor / step": _ratio(found["floor"], found["step"]),
        **watch.counts,
    }


def _backward(total: Tensor) -> float:
    total.backward()  # type: ignore[no-untyped-call]
    return total.item()


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(
        one / other for one, other in zip(above, below, strict=True)
    )


def _info(case: Case) -> TargetInfo:
    heads = case.heads or case.width // 64
    return TargetInfo(
        name="benchmark",
        family="qwen2_5_vl",
        hidden_size=case.width,
        intermediate_size=4 * case.width,
        num_layers=28,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=case.width // heads,
        vocab_size=case.vocabulary,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        hidden_act="silu",
        attention_bias=True,
        max_position=4096,
        eos_ids=(1,),
        visual_ids=(2,),
    )


def _batch(drafter: Drafter, tokens: Tokens) -> Batch:
    """One sample: a prompt with an image, then a response."""
    text, image = tokens.prompt + tokens.supervised, tokens.prompt // 2
    index_T = torch.arange(text)
    rows = {"text": text, "visual": tokens.visual, "span": 1}
    width = drafter.info.hidden_size
    position_T = index_T + tokens.visual * (index_T >= image)
    return Batch(
        ids_T=torch.randint(3, drafter.info.vocab_size, (text,)),
        response_T=index_T >= tokens.prompt,
        position_T=position_T,
        rope_T=position_T,
        segment_T=torch.zeros(text, dtype=torch.long),
        start_M=torch.tensor([image]),
        length_M=torch.tensor([tokens.visual]),
        segment_M=torch.tensor([0]),
        features={
            feature: torch.randn(rows[feature.where], width)
            for feature in sorted(
                drafter.config.needs(drafter.info), key=lambda one: one.name
            )
        },
    )


def main() -> None:
    """Print one line for each case; `--out` writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", action="append", choices=catalogue.NAMES)
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--vocabulary", action="append", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    how: tuple[Any, ...] = (measure, METHODS, (512, 1024), (32_000, 152_064))
    if options.profile:
        how = shares, ("eagle2", "sparrow"), (1024,), (32_000,)
    run, methods, widths, vocabularies = how
    for method in options.method or methods:
        for width in options.width or widths:
            for vocabulary in options.vocabulary or vocabularies:
                case = Case(method, width, vocabulary, device=options.device)
                found = figures[case.name] = run(case, options.rounds)
                line = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                print(f"{case.name}: {line}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
