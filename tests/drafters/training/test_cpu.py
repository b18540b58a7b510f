"""Training on a CPU multiplies float32 matrices as exactly as torch does by default."""

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
