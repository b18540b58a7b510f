"""What products of few rows cost on a CPU, with plain and with packed weights.

    python -m benchmarks.rows [--layers 30] [--width 576] [--inner 1536] [--vocabulary 49153]

A pass of plain decoding multiplies each matrix of the target by one row, and a pass that verifies drafts by a
row for each of its tokens. Both read the same weights. The default shapes are those of the target `smollm2`,
with fused projections (`pipelines/targets/fused_layers.py`). Each figure is the least of `--repeats`, in CPU
milliseconds of one thread. Packed are weights in oneDNN's blocked layout, made once for four rows.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.decoding import hardware
from vlmdistill.pipelines.targets.packed_weights import PackedWeight

ROWS = (1, 2, 4, 5, 8, 16, 32)
Product = Callable[[Tensor], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each dtype, kind of weights and number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=49153)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{hardware.of(torch.device('cpu')).name}, torch {torch.__version__}")
    print("dtype     weights  rows   layers     head   (CPU ms)")
    width, inner = options.width, options.inner
    shapes = [(5 * width // 3, width), (width, width), (2 * inner, width)]
    shapes.append((width, inner))
    for dtype in (torch.float32, torch.bfloat16):
        layers = [
            [torch.randn(*shape, dtype=dtype) for shape in shapes]
            for _ in range(options.layers)
        ]
        head = [torch.randn(options.vocabulary, width, dtype=dtype)]
        for kind, product in (("plain", _plain), ("packed", _packed)):
            layer_products = [product(weight) for layer in layers for weight in layer]
            head_products = [product(weight) for weight in head]
            inputs = [weight.shape[1] for layer in layers for weight in layer]
            for rows in ROWS:
                given = {
                    size: torch.randn(rows, size, dtype=dtype)
                    for size in (width, inner)
                }
                layer_ms = _least(
                    options.repeats, layer_products, [given[size] for size in inputs]
                )
                head_ms = _least(options.repeats, head_products, [given[width]])
                name = str(dtype).removeprefix("torch.")
                print(f"{name:9} {kind:8} {rows:4} {layer_ms:8.1f} {head_ms:8.1f}")


def _plain(weight: Tensor) -> Product:
    return lambda given: F.linear(given, weight)


def _packed(weight: Tensor) -> Product:
    return PackedWeight(weight).times


@torch.inference_mode()
def _least(repeats: int, products: Sequence[Product], given: Sequence[Tensor]) -> float:
    """The least CPU milliseconds of all products in turn, after one round that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.process_time()
        for product, rows in zip(products, given, strict=True):
            product(rows)
        seconds.append(time.process_time() - began)
    return 1e3 * min(seconds[1:])


if __name__ == "__main__":
    main()
