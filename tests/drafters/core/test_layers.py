"""The parts of drafters: a norm that is the same with and without gradients."""

import pytest
import torch
import torch.nn.functional as F

from vlmdistill.drafters.core import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (3, 2, 8), (0, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_the_norm_of_decoding_is_that_of_training(
    dtype: torch.dtype, shape: tuple[int, ...], size: float
) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(8, 1e-6, dtype=dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = size * torch.randn(shape, dtype=dtype)
    trained, before = norm(x), x.clone()
    with torch.inference_mode():
        decoded = norm(x)
    torch.testing.assert_close(decoded, F.rms_norm(x, (8,), norm.weight, 1e-6))
    torch.testing.assert_close(decoded, trained)
    assert torch.equal(x, before)
    norm(x.requires_grad_()).sum().backward()
    assert norm.weight.grad is not None
