"""Training steps on the pretend GPU; `test_pretend.py` runs it in a process of its own."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.drafters import synthetic
from tests.pretend.device import GPU
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.drafters.training.unroll import unroll

LAYOUTS = [synthetic.LAYOUTS[name] for name in ("no image", "one image", "several images")]


def begun(name: str, settings: dict[str, Any]) -> tuple[Drafter, Batch]:
    """A drafter on the GPU and a batch, from the CPU, as training has them."""
    with _disable_current_modes():
        drafter = synthetic.build(name, **settings)
        if columns_of(drafter) is not None:
            drafter.choose_vocabulary(torch.arange(drafter.info.vocab_size).double())  # type: ignore[operator]
        batch = synthetic.batch(LAYOUTS, drafter.config.needs(drafter.info))
    return drafter.to(GPU).train(), batch


@pytest.mark.parametrize(("name", "settings"), synthetic.CASES, ids=str)
def test_a_step_mixes_no_devices(name: str, settings: dict[str, Any]) -> None:
    drafter, batch = begun(name, settings)
    for stage in catalogue.config(name).training.schedule:
        moved = batch.to(GPU, torch.float32)
        generator = torch.Generator(GPU).manual_seed(0)
        losses = unroll(drafter, moved, stage, generator, noise=0.2)
        torch.autograd.backward(losses.total)
        assert all(score.count_R.device == GPU for score in losses.scores)
    assert any(weight.grad is not None for weight in drafter.parameters())
