"""What a stranger names as a file is opened as a regular file: a FIFO freezes no reader of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drafters import synthetic
from tests.fifos import fifo
from tests.pipelines.traffic.conftest import asked, exchange, write
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import WEIGHTS, weights_hash
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.checkpoints.initial import Initial
from vlmdistill.drafters.decoding.tree_search import FILE, kept
from vlmdistill.pipelines.bench.unfinished import interim
from vlmdistill.pipelines.media import frames
from vlmdistill.pipelines.media.images import data_url, read_image
from vlmdistill.pipelines.request_log import POLICY, Recorder
from vlmdistill.pipelines.traffic.harvest import harvest
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import FOR_USER, DataError, TrainingError


def reads_weights(folder: Path) -> None:
    checkpoint.load(folder, synthetic.head(), synthetic.INFO)


def begins_with(folder: Path) -> None:
    Initial.read(folder, "sparrow")


@pytest.mark.parametrize("act", [reads_weights, begins_with])
def test_weights_that_are_a_fifo_are_refused(
    act: Callable[[Path], None], tmp_path: Path
) -> None:
    synthetic.save("sparrow", tmp_path / "sparrow")
    act(tmp_path / "sparrow")
    with (
        fifo(tmp_path / "sparrow/model.safetensors"),
        pytest.raises(TrainingError, match="no regular file"),
    ):
        act(tmp_path / "sparrow")


def test_weights_that_are_a_fifo_have_no_hash(tmp_path: Path) -> None:
    synthetic.save("sparrow", tmp_path / "sparrow")
    assert weights_hash(tmp_path / "sparrow")
    with fifo(tmp_path / "sparrow" / WEIGHTS):
        assert weights_hash(tmp_path / "sparrow") is None


def test_an_export_over_a_fifo_is_refused(tmp_path: Path) -> None:
    folder, out = synthetic.save("eagle3", tmp_path / "eagle3"), tmp_path / "out"
    export(folder, out)
    with fifo(out / "model.safetensors"), pytest.raises(TrainingError):
        export(folder, out)


@pytest.mark.parametrize("name", ["a.png", "a.mp4", "a.gif"])
@pytest.mark.parametrize(
    "act",
    [read_image, data_url, frames.probe, frames.digest],
    ids=lambda act: str(act.__name__),
)
def test_media_that_is_a_fifo_is_refused(
    act: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    with fifo(tmp_path / name) as pipe, pytest.raises(FOR_USER):
        act(pipe)


def test_an_image_of_a_log_that_is_a_fifo_drops_its_line_alone(tmp_path: Path) -> None:
    lines = [exchange(0, request=asked("Which?", "pipe.png")), exchange(1)]
    log = write(tmp_path / "log.jsonl", lines)
    with fifo(tmp_path / "pipe.png"):
        made = harvest(Workspace.of("demo-small", tmp_path / "runs"), [str(log)])
    assert (made.kept, made.dropped) == (1, {"missing media": 1})


def test_a_policy_beside_a_record_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    with fifo(tmp_path / POLICY), pytest.raises(DataError, match="no regular file"):
        Recorder(tmp_path)


def test_an_unfinished_evaluation_that_is_a_fifo_is_none(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    with fifo(tmp_path / "reports/.abc.0.unfinished"):
        assert interim(tmp_path / "reports") == []


def test_records_beside_a_drafter_that_are_fifos_are_refused(tmp_path: Path) -> None:
    workspace = Workspace.of("demo-small", tmp_path / "runs")
    folder = synthetic.save("sparrow", workspace.drafter("sparrow"))
    with fifo(folder / FILE), pytest.raises(OSError, match="no regular file"):
        kept(folder, "any")
    (rounds := workspace.rounds("sparrow")).mkdir(parents=True)
    with (
        fifo(rounds / f"{1:012}.json"),
        pytest.raises(DataError, match="no regular file"),
    ):
        versions.current(workspace, "sparrow")
