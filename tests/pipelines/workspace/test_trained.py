"""A drafter of a workspace, opened by name."""

import hashlib
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.drafters.checkpoints.description import SAMPLES, WEIGHTS
from vlmdistill.pipelines.workspace.trained import Trained, open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError


def test_a_trained_drafter_stays_as_it_was_opened(tmp_path: Path) -> None:
    workspace = Workspace.of("demo-small", tmp_path / "runs")
    synthetic.save("eagle3", workspace.drafter("mine"))
    (workspace.drafter("mine") / SAMPLES).write_text("k1\nk2\n")
    drafter = Trained.open(workspace, "mine")
    weights = (workspace.drafter("mine") / WEIGHTS).read_bytes()
    assert (drafter.method, drafter.shaped) == ("eagle3", True)
    assert drafter.weights == hashlib.sha256(weights).hexdigest()
    assert set(drafter.samples or ()) == {"k1", "k2"}
    (workspace.drafter("mine") / WEIGHTS).write_bytes(b"others")
    assert drafter.weights == hashlib.sha256(weights).hexdigest()


def test_a_method_without_training_needs_no_folder(tmp_path: Path) -> None:
    workspace = Workspace.of("demo-small", tmp_path / "runs")
    (drafter,) = open_drafters(workspace, ["lookahead", "lookahead"])
    assert (drafter.method, drafter.shaped) == ("lookahead", False)
    assert (drafter.weights, drafter.samples) == (None, None)


def test_what_is_no_drafter_is_refused_by_name(tmp_path: Path) -> None:
    workspace = Workspace.of("demo-small", tmp_path / "runs")
    with pytest.raises(TrainingError, match="sparrow"):
        Trained.open(workspace, "sparrow")
    with pytest.raises(DataError, match=r"\.\./x"):
        Trained.open(workspace, "../x")
