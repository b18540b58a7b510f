"""A store that was pulled trains a drafter where the target never was."""

import shutil
from pathlib import Path

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.sharing.merge import send


def test_a_pulled_store_trains_a_drafter_on_a_machine_without_the_target(
    tmp_path: Path,
) -> None:
    synthetic.store(tmp_path / "team", 6)
    send(tmp_path / "team", f"memory://{tmp_path.name}")
    shutil.rmtree(tmp_path / "team")
    send(f"memory://{tmp_path.name}", tmp_path / "pulled")
    losses: list[float] = []

    def tell(progress: TrainingProgress) -> None:
        losses.append(progress.loss)

    train(plan(tmp_path / "pulled", tmp_path / "drafter"), tell)
    assert losses
    assert list((tmp_path / "drafter").rglob("*.safetensors"))
    assert not verify(tmp_path / "pulled").findings
