"""Drafters in the format of speculators: read back bit by bit, or refused where it would change them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters import synthetic
from tests.drafters.checkpoints.test_export import saved
from tests.drafters.checkpoints.test_export_blocks import SPARK, WHOLE
from tests.drafters.synthetic import INFO
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints import checkpoint, published
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.stores.errors import TrainingError

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", {}),
    "EAGLE-3 with few tokens": ("eagle3", {"draft_vocab": 5}),
    "DFlash": ("dflash", {**WHOLE, "mask": 5}),
    "DSpark": ("dflash", {**WHOLE, **SPARK, "mask": 5}),
    "DSpark from the mask": ("dflash", {**WHOLE, "markov": 3, "mask": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_folder_is_read_back_as_the_same_drafter(case: str, tmp_path: Path) -> None:
    """The import reads what speculators saves, and was compared with it."""
    name, settings = CASES[case]
    folder, drafter = saved(tmp_path / name, name, **settings)
    written = export(folder, tmp_path / "out", "float32", "speculators")
    published.load(
        tmp_path / "out",
        name,
        synthetic.head(),
        INFO,
        tmp_path / "back",
        synthetic.provenance(),
    )
    back = checkpoint.load(tmp_path / "back", synthetic.head(), INFO)
    assert isinstance(back, Drafter)
    mine, theirs = drafter.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    config = json.loads((tmp_path / "out/config.json").read_text())
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == written.draft_tokens
    assert config["speculators_config"]["verifier"]["name_or_path"] == written.target
    taps = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    (layers,) = [config[key] for key in taps if key in config]
    assert layers == [*written.layers]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("sparrow", {}, "sparrow has no counterpart in speculators"),
        ("dflash", {"mask": 5}, "reads text alone, which speculators cannot say"),
        ("dflash", WHOLE, "a learned mask, for which speculators has no place"),
        ("dflash", {**WHOLE, **SPARK}, "a learned mask"),
    ],
)
def test_a_drafter_that_would_become_another_one_is_refused(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path / name, name, **settings)
    with pytest.raises(TrainingError, match=words):
        export(folder, tmp_path / "out", "float32", "speculators")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    saved(tmp_path / "runs/demo/drafters/eagle3", "eagle3")
    command = ["export", "eagle3", "--model", "demo", "--out", "out"]
    assert main([*command, "--format", "speculators"]) == 0
    shown = capsys.readouterr()
    assert "vLLM:" in shown.out + shown.err
    assert "SGLang:" not in shown.out + shown.err
    config = json.loads(Path("out/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
