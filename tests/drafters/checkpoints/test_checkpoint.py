"""Drafters that earlier versions wrote are read as they were."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.drafters import synthetic
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.settings import from_dict, override, to_dict, with_file
from vlmdistill.drafters.core import catalogue
from vlmdistill.drafters.sparrow import Sparrow

WRITTEN = """{
  "kv_heads": "target", "positions": "compact", "tree": "chain-4", "batch_tokens": 2048, "max_length": 4096,
  "steps": 240, "warmup": 0.05, "noise": 0.2, "clip": 1.0, "detach": false,
  "stages": [
    {"name": "text", "epochs": 1.0, "visual": [0, 0], "hops": 1, "hop_decay": 1.0, "learning_rate": 0.002,
     "keep_top": 0, "keep_failing": false, "view": "",
     "losses": {"regression": 1.0, "cross_entropy": 0.1, "list_mle": 0.01}},
    {"name": "multimodal", "epochs": 9.0, "visual": [1, 1], "hops": 3, "hop_decay": 1.0,
     "learning_rate": 0.002, "keep_top": 0, "keep_failing": false, "view": "",
     "losses": {"l1": 10.0, "list_mle": 0.1}}],
  "vata": true, "ivsb": false, "mtp": true
}"""
"""The settings in a `config.json` of format 2."""
LATER = {"validate_every": 0, "patience": 0}
"""Settings that came later, off."""

SETTINGS = (
    *("kv_heads=target", "positions=compact", "tree=chain-4", "batch_tokens=2048", "steps=240", "clip=1.0"),
    *("stages.text.epochs=1", "stages.multimodal.epochs=9", "stages.*.learning_rate=2e-3"),
    *("stages.multimodal.hops=3", "ivsb=false"),
)


def test_written_settings_are_read_and_written_back_alike() -> None:
    paper = catalogue.config("sparrow")
    config = from_dict(paper, json.loads(WRITTEN))
    assert config == override(paper, SETTINGS)
    assert config.model == Sparrow.Config(kv_heads="target", positions="compact", ivsb=False)
    assert (config.training.steps, config.training.clip, config.tree.total) == (240, 1.0, 5)
    assert json.loads(json.dumps(to_dict(config))) == {**json.loads(WRITTEN), **LATER}


def test_losses_of_a_recipe_file_replace_the_papers(tmp_path: Path) -> None:
    paper, file = catalogue.config("sparrow"), tmp_path / "mine.toml"
    replaced = override(paper, ['stages.text.losses={"l1": 2}'])
    assert {name for stage in replaced.training.stages for name in stage.losses} > {"l1"}
    file.write_text("[stages.text]\nlosses = { l1 = 2 }\n")
    assert with_file(paper, file, "sparrow", catalogue.NAMES) == replaced
    file.write_text("[sparrow.stages.text.losses]\nl1 = 2\n")
    assert with_file(paper, file, "sparrow", catalogue.NAMES) == replaced


def test_no_setting_has_two_meanings() -> None:
    for name in catalogue.NAMES:
        config = catalogue.config(name)
        parts = [vars(config.model), vars(config.training), {"tree": config.tree}]
        assert len(to_dict(config)) == sum(map(len, parts))


def test_folders_of_formats_1_and_2_are_read(tmp_path: Path) -> None:
    config = from_dict(catalogue.config("sparrow"), json.loads(WRITTEN))
    drafter = checkpoint.build("sparrow", config, synthetic.INFO, synthetic.head())
    origin = checkpoint.Origin(synthetic.provenance(), config.training, {"steps": 240})
    checkpoint.save(drafter, "sparrow", tmp_path / "now", origin)  # type: ignore[arg-type]
    now = json.loads((tmp_path / "now" / "config.json").read_text())
    weights = load_file(tmp_path / "now" / "model.safetensors")
    for version, prefix in ((1, ""), (2, "block.")):  # format 1 had no block
        folder = tmp_path / str(version)
        folder.mkdir()
        record = {**now, "format": version, "config": json.loads(WRITTEN)}
        (folder / "config.json").write_text(json.dumps(record))
        named = {key.replace("block.", prefix): value for key, value in weights.items()}
        save_file(named, folder / "model.safetensors")
        again = checkpoint.load(folder, synthetic.head(), synthetic.INFO)
        assert (again.config, again.tree) == (config.model, config.tree)
        assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items())
