"""Training on a GPU: the numbers of a CPU, no wait but one, and a loss that falls in bfloat16."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from tests.drafters import synthetic
from tests.gpu.waits import lines, of_project, waits
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.drafters.eaglevlm import EagleVLM
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import unroll

pytestmark = pytest.mark.gpu

LAYOUTS = [
    synthetic.LAYOUTS[name] for name in ("no image", "one image", "several images")
]
STEPS = 24


@pytest.mark.parametrize(("name", "settings"), synthetic.CASES, ids=str)
def test_a_step_is_that_of_a_cpu_and_waits_for_nothing(
    name: str, settings: dict[str, Any]
) -> None:
    """But for a gate, and a filter at each hop."""
    drafter = synthetic.build(name, **settings).train()
    if columns_of(drafter) is not None:
        drafter.choose_vocabulary(torch.arange(drafter.info.vocab_size).double())  # type: ignore[operator]
    batch = synthetic.batch(LAYOUTS, drafter.config.needs(drafter.info))
    stage = replace(catalogue.config(name), model=drafter.config).schedule[-1]
    there = unroll(drafter, batch, stage)
    drafter.to("cuda")
    unroll(
        drafter, batch.to("cuda"), stage
    )  # the first one also moves tables that stay
    with waits() as caught:
        here = unroll(drafter, batch.to("cuda"), stage)
        torch.autograd.backward(here.total)
    gate = settings.get("compressor", "select") == "select" and isinstance(
        drafter, EagleVLM
    )
    filters = (
        range(1, stage.hops) if stage.keep_top else [0]
    )  # fewer where no row is left to drop
    assert len(lines(caught)) - gate in filters, lines(caught)
    torch.testing.assert_close(here.total.cpu(), there.total, rtol=1e-4, atol=1e-4)
    for ours, other in zip(here.scores, there.scores, strict=True):
        assert torch.equal(ours.count_R.cpu(), other.count_R) or stage.keep_top
    assert all(
        weight.grad is None or weight.grad.isfinite().all()
        for weight in drafter.parameters()
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Samples of a target whose heads are wide enough for flash kernels."""
    wide = changed(synthetic.INFO, hidden_size=64, intermediate_size=96, head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "INFO", wide)
        yield Path(synthetic.store(tmp_path_factory.mktemp("gpu"), 24).path)


def test_a_method_learns_in_bfloat16_and_a_step_waits_once(
    store: Path, tmp_path: Path
) -> None:
    """DeepSpeed has waits of its own; in the last epoch the figures of each sample are one more."""
    settings = (
        f"steps={STEPS}",
        "noise=0",
        "stages.*.visual=[0.5,0.5]",
        "batch_tokens=200",
    )
    run = synthetic.plan(
        store, tmp_path / "out", drafter="wren", settings=settings, micro_tokens=200
    )
    assert run.precision == "bfloat16"
    steps: list[TrainingProgress] = []
    ends: list[int] = []

    def note(progress: TrainingProgress) -> None:
        steps.append(progress)
        ends.append(len(caught))

    with waits() as caught:
        train(run, note)
    assert len(steps) == STEPS
    first, last = steps[: STEPS // 4], steps[-STEPS // 4 :]
    of_stage = [step.loss for step in last if step.stage == last[-1].stage]
    begins = [step.loss for step in steps if step.stage == last[-1].stage][: len(first)]
    assert sum(of_stage) / len(of_stage) < 0.9 * sum(begins) / len(begins)
    for begin, end in pairwise(ends[2:]):
        waited = of_project(lines(caught[begin:end]))
        own = [
            line for line in waited if "deepspeed_engine" not in line
        ]  # a checkpoint is written
        assert 1 <= len(own) <= 2, own


def test_a_run_that_was_stopped_reads_on_where_it_was(
    store: Path, tmp_path: Path
) -> None:
    """Though the next batches were on their way to the GPU."""
    told: dict[str, list[tuple[int, int, float]]] = {"whole": [], "parts": []}

    def plan(name: str) -> Any:
        settings = ("steps=8", "batch_tokens=120")
        return synthetic.plan(store, tmp_path / name, settings=settings, save_every=2)

    def note(name: str) -> Any:
        return lambda one: told[name].append((one.step, one.tokens, one.loss))

    train(plan("whole"), note("whole"))
    synthetic.stopped(plan("parts"), 5, note("parts"))
    del told["parts"][4:]  # the run continues from the checkpoint of step 4
    train(plan("parts"), note("parts"))
    whole, parts = told["whole"], told["parts"]
    assert [one[:2] for one in parts] == [one[:2] for one in whole]
    assert [loss for *_, loss in parts] == pytest.approx(
        [loss for *_, loss in whole], rel=0.02
    )
