"""Memory and time of the attention of training, against dense weights.

    python -m benchmarks.attention [--case NAME] [--hops N] [--heads N] [--only dense|ours] [--out FILE]

One layer, float32, on one thread: its queries, keys and values are random, so what is measured is attention
alone, forward and backward over all hops. The baseline is the attention that came before: samples padded to
the longest, and weights of all rows over all keys, kept for the backward pass. Each figure comes from a
process of its own: the growth of its resident memory from when the inputs exist to the peak, and the
processor seconds of the second of two passes.

Shapes: N entries, R rows whose output is wanted, S entries of the prefix, B samples, H heads (as many of
keys), d head width.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.kv_cache import KVCache, PackedKVCache

WIDTH = 128


@dataclass(frozen=True)
class Case:
    """Packed samples: the entries of each, and how many of the last are wanted."""

    lengths: tuple[int, ...]
    wanted: tuple[int, ...]
    heads: int
    dense: bool = True  # whether the baseline is run
    hops: tuple[int, ...] = (1, 3)
    window: int = 0  # positions that a row sees; 0: all before it


CASES = {
    "2,000 tokens, 40 samples": Case((50,) * 40, (30,) * 40, 4),
    "4,096 tokens, 4 samples": Case((1800, 1200, 700, 396), (1000, 800, 500, 300), 14),
    "26,000 tokens, 600 rows": Case((26_000,), (600,), 4),
    "26,000 tokens, all rows": Case((26_000,), (26_000,), 1, dense=False, hops=(1,)),
    "the same, a window of 1,024": Case(
        (26_000,), (26_000,), 1, dense=False, hops=(1,), window=1024
    ),
}


@dataclass(frozen=True)
class Figures:
    """Of one process."""

    peak_mb: float
    cpu_s: float


class DenseKVCache:
    """The attention of before, for as many key heads as query heads and one query a row."""

    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self.context: dict[str, Tensor] = {}
        self.prefix: tuple[Tensor, Tensor, TokenIndex]
        self.guesses: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_NHd: Tensor, value_NHd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """See `KVCache.update`."""
        if hop == 0:
            self.prefix = key_NHd, value_NHd, tokens
        else:
            self.guesses.append((key_NHd, value_NHd))

    def attend(self, query_RHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """See `KVCache.attend`."""
        key_SHd, value_SHd, entries = self.prefix
        rows = tokens.at_rows()
        keys, slots = _Slots(entries.segment_N), _Slots(rows.segment_N)
        query_RHd = query_RHd * query_RHd.shape[-1] ** -0.5
        score_BHRS = torch.einsum(
            "brhd,bshd->bhrs", slots.pad(query_RHd), keys.pad(key_SHd)
        )
        seen_BRS = (
            keys.pad(entries.position_N, -1)[:, None]
            <= slots.pad(rows.position_N, -1)[:, :, None]
        ) & keys.filled_BS[:, None]
        score_BHRS = score_BHRS.masked_fill(
            ~seen_BRS[:, None], torch.finfo(score_BHRS.dtype).min
        )
        own = [
            slots.pad((query_RHd * key_RHd).sum(-1)).transpose(1, 2)
            for key_RHd, _ in self.guesses
        ]
        score_BHRX = torch.cat(
            [score_BHRS, *(score[..., None] for score in own)], dim=-1
        )
        weight_BHRX = score_BHRX.softmax(-1)
        longest = keys.shape[1]
        mixed_RHd = slots.unpad(
            torch.einsum(
                "bhrs,bshd->brhd", weight_BHRX[..., :longest], keys.pad(value_SHd)
            )
        )
        for column, (_, value_RHd) in enumerate(self.guesses):
            weight_RH = slots.unpad(weight_BHRX[..., longest + column].transpose(1, 2))
            mixed_RHd = mixed_RHd + weight_RH[..., None] * value_RHd
        return mixed_RHd

    def attend_block(
        self, query_QHd: Tensor, key_QHd: Tensor, value_QHd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """There were no blocks."""
        raise NotImplementedError

    def temporary(self) -> AbstractContextManager[None]:
        """See `KVCache.temporary`; not used here."""
        return nullcontext()

    def layer(self, number: int) -> "DenseKVCache":
        """There was one layer."""
        return self


class _Slots:
    """Packed rows [N, ...], sample after sample, as a padded block [B, longest, ...] and back."""

    def __init__(self, segment_N: Tensor) -> None:
        count_B = torch.bincount(segment_N)
        self.shape = (len(count_B), int(count_B.max()))
        first_B = torch.cumsum(count_B, 0) - count_B
        self.flat_N = torch.arange(len(segment_N)) + (
            segment_N * self.shape[1] - first_B[segment_N]
        )
        self.filled_BS = torch.arange(self.shape[1]) < count_B[:, None]

    def pad(self, value_N: Tensor, fill: int = 0) -> Tensor:
        block = value_N.new_full(
            (self.shape[0] * self.shape[1], *value_N.shape[1:]), fill
        )
        return block.index_copy(0, self.flat_N, value_N).reshape(
            *self.shape, *value_N.shape[1:]
        )

    def unpad(self, block_BS: Tensor) -> Tensor:
        return block_BS.flatten(0, 1).index_select(0, self.flat_N)


def measure(case: Case, dense: bool, hops: int, device: str = "cpu") -> Figures:
    """Two passes in this process; on a GPU in bfloat16, by its memory and the seconds that passed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return _measure(case, dense, hops, on_gpu)


def _measure(case: Case, dense: bool, hops: int, on_gpu: bool) -> Figures:
    lengths, wanted = torch.tensor(case.lengths), torch.tensor(case.wanted)
    segment_N = torch.arange(len(lengths)).repeat_interleave(lengths)
    position_N = torch.cat([torch.arange(length) for length in case.lengths])
    rows_R = (position_N >= (lengths - wanted)[segment_N]).nonzero()[:, 0]
    text = TokenIndex(segment_N, position_N, torch.full_like(segment_N, -1), rows_R)

    def states(count: int) -> Tensor:
        return torch.randn(count, case.heads, WIDTH, requires_grad=True)

    prefix = (states(len(segment_N)), states(len(segment_N)))
    queries = [states(len(rows_R)) for _ in range(hops)]
    guesses = [(states(len(rows_R)), states(len(rows_R))) for _ in range(hops - 1)]
    grads = [torch.randn_like(query_RHd) for query_RHd in queries]
    leaves = [*prefix, *queries, *(part for guess in guesses for part in guess)]
    before, seconds = _held(on_gpu), 0.0
    for _ in range(2):
        start = _clock(on_gpu)
        cache: KVCache = DenseKVCache() if dense else PackedKVCache(case.window)
        cache.update(*prefix, text, 0)
        mixed = [cache.attend(queries[0], text, 0)]
        for hop, guess in enumerate(guesses, start=1):
            cache.update(*guess, text.at_rows(), hop)
            mixed.append(cache.attend(queries[hop], text.at_rows(), hop))
        torch.autograd.grad(mixed, leaves, grads)
        del cache, mixed
        seconds = _clock(on_gpu) - start
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Figures((peak - before) / 1e6, seconds)


def _clock(on_gpu: bool) -> float:
    """Seconds of the processor, or those that passed until a GPU has done its work."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _held(on_gpu: bool) -> int:
    """Bytes of this process in memory, or of its tensors on a GPU."""
    if on_gpu:
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


def _apart(name: str, heads: int, dense: bool, hops: int, device: str) -> Figures:
    """`measure` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.attention",
        "--case",
        name,
        "--hops",
        str(hops),
    ]
    command += [
        "--heads",
        str(heads),
        "--only",
        "dense" if dense else "ours",
        "--device",
        device,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Figures(**json.loads(done.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each case and number of hops; `--out` writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--hops", action="append", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument(
        "--only", choices=("dense", "ours"), help="measure in this process, print JSON"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    found = {}
    for name in options.case or CASES:
        case = CASES[name]
        heads = options.heads or case.heads
        for hops in options.hops or case.hops:
            if options.only:
                case = replace(case, heads=heads)
                measured = measure(case, options.only == "dense", hops, options.device)
                print(json.dumps(asdict(measured)))
                continue
            ours = _apart(name, heads, False, hops, options.device)
            line = f"{name}, {heads} heads, {hops} hops: {ours.peak_mb:.0f} MB, {ours.cpu_s:.2f} CPU-s"
            figures = {"ours": asdict(ours)}
            if case.dense:
                dense = _apart(name, heads, True, hops, options.device)
                figures["dense"] = asdict(dense)
                line += f"; dense {dense.peak_mb:.0f} MB, {dense.cpu_s:.2f} CPU-s"
                line += f"; memory {ours.peak_mb / dense.peak_mb:.2f}, time {ours.cpu_s / dense.cpu_s:.2f}"
            found[f"{name}, {heads} heads, {hops} hops"] = figures
            print(line, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
