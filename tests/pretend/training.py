"""Training steps on the pretend GPU; `test_pretend.py` runs it in a process of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.drafters import synthetic
from tests.pretend.device import GPU, waits
from tests.thorough import THOROUGH
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core import losses
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.drafters.eaglevlm import EagleVLM
from vlmdistill.drafters.training.unroll import unroll

LAYOUTS = [
    synthetic.LAYOUTS[name] for name in ("no image", "one image", "several images")
]


def begun(name: str, settings: dict[str, Any]) -> tuple[Drafter, Batch]:
    """A drafter on the GPU and a batch, from the CPU, as training has them."""
    with _disable_current_modes():
        drafter = synthetic.build(name, **settings)
        if columns_of(drafter) is not None:
            drafter.choose_vocabulary(torch.arange(drafter.info.vocab_size).double())  # type: ignore[operator]
        batch = synthetic.batch(LAYOUTS, drafter.config.needs(drafter.info))
    return drafter.to(GPU).train(), batch


SOME = synthetic.CASES if THOROUGH else synthetic.CASES[::5]
ROWS = 8
"""Rows of a chunk of the losses: several chunks for each batch."""


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of logits is small, in place of the one that a GPU has room for."""
    monkeypatch.setattr(
        losses, "chunk_bytes", lambda device: 4 * synthetic.INFO.vocab_size * ROWS
    )


@pytest.mark.parametrize(("name", "settings"), synthetic.CASES, ids=str)
def test_a_step_waits_for_no_more_than_its_method_chooses(
    name: str, settings: dict[str, Any]
) -> None:
    """A gate chooses how many entries there are; a filter which rows count at the next hop, in each chunk."""
    drafter, batch = begun(name, settings)
    gate = settings.get("compressor", "select") == "select" and isinstance(
        drafter, EagleVLM
    )
    stages = replace(catalogue.config(name), model=drafter.config).schedule
    unroll(
        drafter, batch.to(GPU), stages[0]
    )  # the first one also moves tables that stay
    for stage in stages:
        generator = torch.Generator(GPU).manual_seed(0)
        with waits() as waited:
            moved = batch.to(GPU, torch.float32)
            step = unroll(drafter, moved, stage, generator, noise=0.2)
            torch.autograd.backward(step.total)
        chunks = -(-len(step.segment_R) // ROWS)
        assert chunks > 2
        filtered = chunks * (stage.hops - 1) if stage.keep_top else 0
        assert len(waited) == gate + filtered, str(waited)
    assert any(weight.grad is not None for weight in drafter.parameters())


@pytest.mark.parametrize(("name", "settings"), SOME, ids=str)
def test_what_the_cpu_works_out_is_what_the_gpu_would(
    name: str, settings: dict[str, Any]
) -> None:
    """A batch that was made on the GPU, and one that has come from the CPU, give the same step."""
    drafter, batch = begun(name, settings)
    stage = replace(catalogue.config(name), model=drafter.config).schedule[-1]
    come = batch.to(GPU)
    made = replace(come, host=None)
    assert come.readable.ids_T.is_cpu
    assert made.readable is made
    steps = [unroll(drafter, one, stage) for one in (come, made)]
    for score, other in zip(*(step.scores for step in steps), strict=True):
        assert torch.equal(score.loss_R, other.loss_R)
        assert torch.equal(score.count_R, other.count_R)
    assert torch.equal(steps[0].segment_R, steps[1].segment_R)


def test_a_batch_that_has_come_to_the_gpu_stays_readable() -> None:
    _, batch = begun("eagle2", {})
    place = int(batch.visual_tokens.position_N[3])
    with waits() as waited:
        come = batch.to(GPU, torch.bfloat16)
        other = come.to(GPU, torch.float32).only(["hidden.text"])
        tokens = other.visual_tokens.only(torch.tensor([1, 3])).with_rows(
            torch.tensor([1])
        )
        assert other.readable.ids_T.tolist() == batch.ids_T.tolist()
        assert tokens.readable.at_rows().position_N.tolist() == [place]
    assert not len(waited), str(waited)
    back = come.to("cpu")
    assert back.readable is back
    places_2 = batch.visual_tokens.position_N[[1, 3]]
    for ours, theirs in ((come.ids_T, batch.ids_T), (tokens.position_N, places_2)):
        assert ours.device == GPU
        assert torch.equal(ours.cpu(), theirs)
    for feature, state_ND in batch.features.items():
        assert torch.equal(back.features[feature], state_ND.bfloat16())


def test_a_block_of_logits_is_larger_where_a_gpu_has_room() -> None:
    sizes = [losses.chunk_of(free << 30) for free in (0, 4, 8, 16, 80)]
    assert sizes == [2**28, 2**28, 2**29, 2**30, 2**30]
