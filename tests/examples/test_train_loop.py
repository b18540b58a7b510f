"""The example of a training loop is what the command does."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from examples.train_loop import main, train_loop
from tests.drafters import synthetic
from vlmdistill.drafters.checkpoints.description import describe, trained_on
from vlmdistill.drafters.training.recipes import as_texts, resolve
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train

SETTINGS = {"steps": 9, "batch_tokens": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "wren": ("demo", {}),  # two stages of mixed data, hops
    "eagle3": (
        "demo-paper",
        {"draft_vocab": 9, "visual": "none"},
    ),  # a vocabulary that is chosen
    "msd": ("demo-paper", {"noise": 0.2}),  # a share of images that moves
    "dflash": ("demo", {"layers": 2, "stages.*.anchors": 3}),
}


@pytest.mark.parametrize("method", CASES)
def test_losses_and_weights_are_those_of_the_command(
    method: str, tmp_path: Path
) -> None:
    recipe, more = CASES[method]
    settings = {**SETTINGS, **more}
    synthetic.store(tmp_path / "store", 24)
    config = resolve(method, recipe, as_texts(settings))
    expected: list[float] = []
    run = Run(
        drafter=method,
        config=config,
        store=str(tmp_path / "store"),
        out=tmp_path / "theirs",
        seed=3,
    )
    train(run, lambda step: expected.append(step.loss))
    found: list[float] = []
    train_loop(
        method,
        str(tmp_path / "store"),
        str(tmp_path / "mine"),
        recipe,
        settings,
        3,
        lambda step, loss: found.append(loss),
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == SETTINGS["steps"]
    mine, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("mine", "theirs")
    )
    assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert trained_on(tmp_path / "mine") == trained_on(tmp_path / "theirs")
    assert (
        describe(tmp_path / "mine")["training"]["content"]
        == describe(tmp_path / "theirs")["training"]["content"]
    )


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    synthetic.store(tmp_path / "store", 3, ["hidden.text"])
    for words, message in {
        ("wren", str(tmp_path / "store")): "does not hold layer",
        ("wrem", str(tmp_path / "store")): "did you mean 'wren'",
        ("wren", str(tmp_path / "nowhere")): "there is no feature store",
    }.items():
        with pytest.raises(SystemExit, match=message):
            main([*words, str(tmp_path / "out")])
