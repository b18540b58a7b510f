"""Sparrow: what stands at visual positions in training."""

import torch

from tests.drafters.synthetic import INFO, batch, built, written
from vlmdistill.drafters.sparrow import Sparrow
from vlmdistill.stores.schema import Feature

SOURCE = f"layer{INFO.num_layers // 2}"
FEATURES = [
    Feature("hidden", "text"),
    Feature("hidden", "span"),
    Feature(SOURCE, "visual"),
]


def test_the_middle_state_enters_as_it_is_without_our_norm() -> None:
    """Equation 3 has no norm."""
    sample = batch(["tvvvtrrr"], FEATURES)
    middle_UD = sample.features[FEATURES[-1]]
    ((as_is_UD, _, _),) = written(built(Sparrow, middle_norm=False).train(), sample)
    assert torch.equal(as_is_UD, middle_UD)
    ((normed_UD, _, _),) = written(built(Sparrow).train(), sample)
    rms_U = normed_UD.square().mean(-1).sqrt()
    assert torch.allclose(rms_U, torch.ones_like(rms_U), atol=1e-3)
