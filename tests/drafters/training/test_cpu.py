"""Training on a CPU: products as exact as torch's own, and memory that does not grow."""

import os
import subprocess
import sys

import pytest
import torch

from vlmdistill.drafters.training import cpu


@pytest.mark.parametrize(
    "shape", [(300, 512, 4000), (1000, 128, 640), (5, 2048, 512), (1, 128, 640)]
)
def test_products_have_the_error_of_float32(shape: tuple[int, int, int]) -> None:
    rows, width, columns = shape
    torch.manual_seed(0)
    left, right = torch.randn(rows, width), torch.randn(columns, width)
    exact = left.double() @ right.double().T
    with cpu.tuned():
        error = ((left @ right.T).double() - exact).norm() / exact.norm()
    assert error < 1e-6


def test_the_setting_of_torch_returns_after_an_error() -> None:
    before = cpu.MATMUL.fp32_precision
    with pytest.raises(ZeroDivisionError), cpu.tuned():
        raise ZeroDivisionError
    assert cpu.MATMUL.fp32_precision == before


FREED = """
import re
from pathlib import Path
import torch
from vlmdistill.drafters.training import cpu

def resident():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) >> 10

with cpu.tuned():
    before = resident()
    block = torch.ones(64 << 18)
    del block
    kept = resident() - before
    cpu.trim()
    print(kept, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    script = subprocess.run(
        [sys.executable, "-c", FREED],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # where it changes nothing
        capture_output=True,
        text=True,
        check=True,
    )
    kept, trimmed = map(int, script.stdout.split())
    assert kept > 60  # MiB: the next block finds its pages
    assert trimmed < 4
