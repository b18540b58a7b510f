"""MSD: what stands at visual positions, and how images come into training."""

import pytest
import torch
from torch import nn

from tests.drafters.synthetic import INFO, LAYOUTS, batch, built, written
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.msd import MSD
from vlmdistill.drafters.training.batches import DataSplit
from vlmdistill.stores.schema import Feature

TEXT, SPAN, VISUAL = (
    Feature("hidden", "text"),
    Feature("hidden", "span"),
    Feature("embed", "visual"),
)


def sample(*layouts: str) -> Batch:
    return batch(layouts, [TEXT, SPAN, VISUAL])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_visual_entry_is_the_raw_embedding_at_the_place_before_its_own(
    layout: str,
) -> None:
    one = sample(LAYOUTS[layout])
    ((x_UD, position_U, tokens),) = written(built(MSD), one)
    assert torch.equal(x_UD, one.features[VISUAL])
    expected = [place for place, kind in enumerate(LAYOUTS[layout]) if kind == "v"]
    assert tokens.position_N.tolist() == expected
    assert position_U.tolist() == [place - 1 for place in expected]


def test_vata_drops_visual_tokens_when_drafting_and_only_then() -> None:
    drafter, one = built(MSD, vata=True), sample("tvvvtrrr")
    assert written(drafter, one) == []
    assert len(written(drafter.train(), one)) == 1
    assert drafter.config.needs(INFO) == {TEXT, SPAN, VISUAL}
    assert drafter.config.needs(INFO, decoding=True) == {TEXT, SPAN}
    assert MSD.Config().needs(INFO, decoding=True) == {TEXT, SPAN, VISUAL}


def test_the_input_norm_is_an_option() -> None:
    assert built(MSD).block.layer.input_norm is None
    assert isinstance(built(MSD, input_norm=True).block.layer.input_norm, nn.RMSNorm)


def test_images_come_in_gradually_after_a_text_stage() -> None:
    config = MSD.Training()
    text, multimodal = config.schedule
    split = DataSplit(
        [f"v{i}" for i in range(4000)], [f"t{i}" for i in range(4000)], []
    )
    assert all(key.startswith("t") for key in split.draw(text, 0.5, seed=0))
    epochs = int(multimodal.epochs)
    for epoch in range(epochs):
        keys = split.draw(multimodal, epoch / (epochs - 1), seed=epoch)
        share = sum(key.startswith("v") for key in keys) / len(keys)
        assert len(keys) == 4000
        assert share == pytest.approx((epoch + 1) / epochs, abs=0.04)
