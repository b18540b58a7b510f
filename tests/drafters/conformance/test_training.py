"""Training a drafter: it learns, it is what it was when it is loaded, and it may be stopped or shared out.

Shapes: T text tokens.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafters import synthetic
from tests.drafters.synthetic import (
    CASES,
    INFO,
    LAYOUTS,
    TRAINED,
    batch,
    begun,
    build,
    head,
    plan,
    save,
    stopped,
)
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.vocabulary import DraftVocabulary
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.errors import DataError, StoppedError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ROOM = {"medusa": 0.3}
"""Share learnt by heart where it is less: on random states, a head that only adds cannot reach more."""

SLOW = ("dflash", "medusa", "semiar", "specflash")
"""What takes more steps to learn a few samples by heart."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples without images and sixteen with: an epoch of either kind has several steps."""
    return Path(synthetic.store(tmp_path_factory.mktemp("training"), 21).path)


@pytest.mark.parametrize("name", TRAINED)
def test_it_learns_a_handful_of_samples_by_heart(name: str, tmp_path: Path) -> None:
    synthetic.store(tmp_path / "store", 5)
    seen: list[TrainingProgress] = []
    settings = (
        f"steps={80 if name in SLOW else 50}",
        "noise=0",
        "stages.*.visual=[1,1]",
        "stages.*.learning_rate=0.02",
        "batch_tokens=500",
    )
    run = plan(
        tmp_path / "store",
        tmp_path / "out",
        drafter=name,
        settings=settings,
        micro_tokens=500,
    )
    train(run, seen.append)
    assert seen[0].agreement[0] < 0.2
    hops = zip(seen[-1].agreement, seen[-1].sums_H3[:, 2], strict=True)
    assert min(share for share, rows in hops if rows) > ROOM.get(
        name, 0.8
    )  # at every hop of some response


@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_of_text_alone_is_trained_on(name: str) -> None:
    drafter = build(name)
    sample = batch(["ttrrrr", "tttrrrrr"], drafter.config.needs(INFO))
    stage = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})
    total = unroll(drafter, sample, stage).total
    gradients = torch.autograd.grad(
        total, list(drafter.parameters()), allow_unused=True
    )
    assert any(
        gradient is not None and gradient.abs().sum() > 0 for gradient in gradients
    )


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_batch_without_a_position_to_train_has_no_loss(
    name: str, settings: dict[str, Any]
) -> None:
    """As of samples whose responses have one token each."""
    drafter = build(name, **settings)
    sample = batch(["tvvttr", "tttrttr", "ttt"], drafter.config.needs(INFO))
    stage = Stage(
        name="test", hops=drafter.config.max_hops or 3, losses={"cross_entropy": 1.0}
    )
    out = unroll(drafter, sample, stage)
    out.total.backward()  # type: ignore[no-untyped-call]
    assert (float(out.total.detach()), len(out.segment_R)) == (0.0, 0)
    assert all(one.grad is None or not one.grad.any() for one in drafter.parameters())


# Checkpoints


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_checkpoint_gives_back_the_drafter(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    drafter = build(name, **settings).eval()
    if isinstance(drafter, DraftVocabulary):
        drafter.choose_vocabulary(torch.arange(INFO.vocab_size) % 5)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    again = checkpoint.load(save(name, tmp_path / "out", drafter), head(), INFO)
    assert type(again) is type(drafter)
    assert again.config == drafter.config
    before, after = drafter.state_dict(), again.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert isinstance(again, Drafter)
    for one, other in zip(outputs(drafter), outputs(again), strict=True):
        assert torch.equal(one, other)


def outputs(drafter: Drafter) -> list[Tensor]:
    """Losses of four hops, and a tree."""
    sample = batch([LAYOUTS["two turns"]], drafter.config.needs(INFO))
    stage = Stage(name="test", hops=4, losses={"regression": 1.0, "cross_entropy": 1.0})
    losses = [one.loss_R for one in unroll(drafter, sample, stage).scores]
    nodes = begun(drafter, sample, 6).grow(Tree.parse("8-2-2"))
    return [*losses, nodes.ids_N, nodes.parent_N]


@pytest.mark.parametrize("name", sorted({*catalogue.NAMES} - {*TRAINED}))
def test_what_needs_no_training_needs_no_folder(name: str, tmp_path: Path) -> None:
    made: Proposer = checkpoint.load(tmp_path / name, head(), INFO)
    assert type(made) is catalogue.load(name)
    paper = catalogue.config(name)
    assert (made.config, made.tree) == (paper.model, paper.tree)
    with pytest.raises(DataError, match=f"{name} needs no training"):
        catalogue.trained(name)


# Runs that count steps, that are stopped, and that have several ranks

STEPS = 11
COUNTED = (f"steps={STEPS}", "batch_tokens=30")
"""Two samples a step, each a micro-batch: an epoch of text has three steps, one of images has eight."""


def losses(run: Any, stop: int = 0) -> dict[int, tuple[str, str]]:
    """Stage and loss of every step, bit for bit; ends after step `stop` by an error."""
    seen = {}

    def tell(progress: TrainingProgress) -> None:
        seen[progress.step] = progress.stage, progress.loss.hex()

    if stop:
        stopped(run, stop, tell)
    else:
        train(run, tell)
    return seen


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_takes_its_steps_and_goes_on_bit_for_bit_wherever_it_stopped(
    name: str, store: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "drafter": name,
        "settings": COUNTED,
        "micro_tokens": 15,
        "save_every": 3,
    }
    run = plan(store, tmp_path / "whole", **settings)
    whole, stages = losses(run), run.config.schedule
    assert list(whole) == [*range(1, STEPS + 1)]
    taken = Counter(stage for stage, _ in whole.values())
    for stage in stages:
        assert (
            abs(
                taken[stage.name]
                - STEPS * stage.epochs / sum(one.epochs for one in stages)
            )
            < 1
        )

    # Just after a checkpoint; then two steps after another, in the midst of an epoch; then to the end.
    parts = [losses(plan(store, tmp_path / "parts", **settings), stop=4)]
    for stop in (STEPS, 0):
        parts.append(losses(plan(store, tmp_path / "parts", **settings), stop=stop))
    assert [min(part) for part in parts] == [1, 4, 10]
    assert all(whole[step] == facts for part in parts for step, facts in part.items())
    files = [
        (tmp_path / run / "model.safetensors").read_bytes()
        for run in ("whole", "parts")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_few_steps_are_shared_out_too(steps: int, store: Path, tmp_path: Path) -> None:
    seen = losses(
        plan(
            store,
            tmp_path / "out",
            drafter="eagle2",
            settings=(*COUNTED, f"steps={steps}"),
        )
    )
    assert len(seen) == steps


RANKED = [*((name, 0) for name in TRAINED), ("sparrow", 2)]
WORKER = """
import os
import sys
from pathlib import Path
from tests.drafters.conformance.test_training import work

work(Path(sys.argv[1]), Path(sys.argv[2]))
os._exit(0)  # gloo's threads may abort a process that ends the usual way; the work is done by then
"""


def work(store: Path, folder: Path) -> None:
    """One of two ranks: all drafters, then the last one again, which only rank 0 is told to stop."""
    for name, zero in RANKED:
        train(ranked(name, zero, store, folder))
    name, zero = RANKED[-1]
    parts = ranked(name, zero, store, folder / "parts")

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match=r"^4 of 6 .* all "):
        train(parts, stop)
    train(parts)


def ranked(name: str, zero: int, store: Path, folder: Path) -> Any:
    settings = ["steps=6", "batch_tokens=30", "noise=0", "clip=1000"]
    if name == "eaglevlm":
        settings.append(
            "compressor=weigh"
        )  # a gate that selects draws, and each rank draws for its own batch
    more = {"micro_tokens": 15, "save_every": 6, "zero": zero}
    return plan(
        store, folder / f"{name}-{zero}", drafter=name, settings=settings, **more
    )


def moments(folder: Path) -> list[Tensor]:
    """Adam's running means of the gradients, which, unlike its steps, have the gradients' scale."""
    (file,) = folder.glob("step*.safetensors")
    return [
        value
        for key, value in sorted(load_file(file).items())
        if key.startswith("exp_avg/")
    ]


@pytest.fixture(scope="module")
def two_ranks(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every drafter trained by the same two processes, the last of five samples by one of them alone."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/src",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {ranks.RENDEZVOUS: str(folder / "ranks"), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", WORKER, str(store), str(folder)]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env={**environment, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    try:
        assert [one.wait(timeout=500) for one in both] == [0, 0]
    finally:
        for one in both:
            one.kill()
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_have_the_gradients_of_one(
    name: str, store: Path, two_ranks: Path, tmp_path: Path
) -> None:
    train(ranked(name, 0, store, tmp_path))
    one, two = (
        moments(folder / f"{name}-0.training") for folder in (tmp_path, two_ranks)
    )
    assert any(mean.abs().max() > 1e-3 for mean in one)
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(
            theirs, mine, rtol=1e-3, atol=1e-5 + 1e-4 * float(mine.abs().max())
        )


def test_ranks_that_share_the_state_stop_together_and_go_on_bit_for_bit(
    two_ranks: Path,
) -> None:
    whole, parts = (
        two_ranks / part / "sparrow-2" / "model.safetensors" for part in ("", "parts")
    )
    assert parts.read_bytes() == whole.read_bytes()
    assert [file.name for file in (two_ranks / "parts").rglob("step*")] == [
        "step6.safetensors"
    ]


def test_ranks_that_share_the_optimizers_state_take_the_same_steps(
    store: Path, two_ranks: Path
) -> None:
    one, two = (
        load_file(two_ranks / f"sparrow-{zero}" / "model.safetensors")
        for zero in (0, 2)
    )
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=1e-5)
