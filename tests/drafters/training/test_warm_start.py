"""A run that begins with another drafter's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters import synthetic
from tests.drafters.synthetic import plan, stopped
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe, trained_on
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.errors import TrainingError

pytestmark = pytest.mark.slow
STILL = ("stages.*.learning_rate=0", "steps=4")  # what is trained stays as it began


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("warm"), 24).path)


@pytest.fixture(scope="module")
def eagle(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        plan(store, tmp_path_factory.mktemp("eagle") / "eagle", drafter="eagle2")
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = describe(folder)["training"]["init"]
    return found


@pytest.mark.parametrize("drafter", ["eagle2", "hass", "vispec"])
def test_weights_that_fit_are_taken_and_the_record_says_which(
    drafter: str, store: Path, eagle: Path, tmp_path: Path
) -> None:
    out = train(
        plan(store, tmp_path / "warm", drafter=drafter, settings=STILL, init=eagle)
    )
    cold = train(plan(store, tmp_path / "cold", drafter=drafter, settings=STILL))
    before, record = weights(eagle), recorded(out)
    assert sorted(record["taken"]) == sorted(before)
    for name, value in weights(out).items():
        source = before if name in record["taken"] else weights(cold)
        torch.testing.assert_close(value, source[name], rtol=0, atol=0)
    assert sorted(record["fresh"]) == sorted({*weights(out)} - {*before})


def test_a_drafter_names_the_samples_of_those_before_it(
    store: Path, tmp_path: Path
) -> None:
    """The audit of what it has seen, and the next round of `adapt`, go by these."""
    other = Path(synthetic.store(tmp_path / "other", 30, first=24).path)
    first = train(plan(other, tmp_path / "first", drafter="eagle2", settings=STILL))
    later = train(
        plan(store, tmp_path / "later", drafter="eagle2", settings=STILL, init=first)
    )
    assert trained_on(first) == frozenset(f"sample{number}" for number in range(24, 30))
    assert trained_on(later) == frozenset(f"sample{number}" for number in range(30))
    (first / "samples.txt").unlink()
    unlisted = tmp_path / "unlisted"
    train(plan(other, unlisted, drafter="eagle2", settings=STILL, init=first))
    last = plan(
        store, tmp_path / "last", drafter="eagle2", settings=STILL, init=unlisted
    )
    for folder in (unlisted, train(last)):
        keys = trained_on(folder)
        assert keys is not None
        assert [key for key in keys if key.startswith("unknown:")]


def test_what_does_not_fit_is_named_and_if_nothing_fits_the_run_is_refused(
    store: Path, eagle: Path, tmp_path: Path
) -> None:
    settings = (*STILL, "kv_heads=target")
    record = recorded(
        train(
            plan(store, tmp_path / "few", drafter="msd", settings=settings, init=eagle)
        )
    )
    assert (
        record["fresh"]["block.layer.qkv_proj.weight"]
        == "[32, 16] here, [48, 16] there"
    )
    assert record["settings"]["kv_heads"] == "all"
    assert "block.fc.weight" in record["taken"]
    with pytest.raises(TrainingError, match=r"no weight of .* fits medusa"):
        train(plan(store, tmp_path / "none", drafter="medusa", init=eagle))
    with pytest.raises(TrainingError, match="no drafter in"):
        train(plan(store, tmp_path / "none", init=tmp_path / "nowhere"))


def test_a_draft_vocabulary_comes_with_its_head(store: Path, tmp_path: Path) -> None:
    small = ("draft_vocab=9",)
    first = train(
        plan(store, tmp_path / "first", drafter="eagle3", settings=(*STILL, *small))
    )
    drafter = weights(first)
    drafter["d2t"] = (
        torch.arange(9) + 2
    )  # another choice than the samples of the store would give
    checkpoint.put(first, describe(first), drafter)
    out = train(
        plan(
            store,
            tmp_path / "out",
            drafter="eagle3",
            settings=(*STILL, *small),
            init=first,
        )
    )
    assert torch.equal(weights(out)["d2t"], drafter["d2t"])
    drafter["d2t"] += 10**6
    checkpoint.put(first, describe(first), drafter)
    with pytest.raises(TrainingError, match="d2t"):
        train(
            plan(
                store,
                tmp_path / "other",
                drafter="eagle3",
                settings=(*STILL, *small),
                init=first,
            )
        )


def test_an_interrupted_run_goes_on_bit_for_bit_and_not_from_other_weights(
    store: Path, eagle: Path, tmp_path: Path
) -> None:
    whole = train(plan(store, tmp_path / "whole", drafter="msd", init=eagle))
    stopped(plan(store, tmp_path / "parts", drafter="msd", init=eagle), 5)
    with pytest.raises(TrainingError, match="init"):
        train(plan(store, tmp_path / "parts", drafter="msd", init=whole))
    with pytest.raises(TrainingError, match="init"):
        train(plan(store, tmp_path / "parts", drafter="msd"))
    seen: list[int] = []
    again = plan(store, tmp_path / "parts", drafter="msd", init=eagle)
    parts = train(again, lambda one: seen.append(one.step))
    assert seen[0] == 4
    files = [(run / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert files[0] == files[1]
    train(plan(store, tmp_path / "parts", drafter="msd", init=eagle))  # is done
    with pytest.raises(TrainingError, match="init"):
        train(plan(store, tmp_path / "parts", drafter="msd"))
