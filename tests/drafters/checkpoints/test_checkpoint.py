"""A drafter is read as it was written, or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters import synthetic
from tests.drafters.synthetic import TRAINED
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.core.settings import from_dict, override, to_dict
from vlmdistill.drafters.sparrow import Sparrow
from vlmdistill.drafters.training.recipes import as_file, resolve
from vlmdistill.stores.errors import TrainingError

WRITTEN = """{
  "kv_heads": "target", "positions": "compact", "attention_window": 0, "draft_vocab": 0,
  "tree": "chain-4", "batch_tokens": 2048, "max_length": 4096,
  "steps": 240, "warmup": 0.05, "noise": 0.2, "clip": 1.0, "detach": false,
  "validate_every": 0, "patience": 0,
  "stages": [
    {"name": "text", "epochs": 1.0, "visual": [0, 0], "hops": 1, "hop_decay": 1.0, "learning_rate": 0.002,
      "pace": 0.0, "anchors": 0, "keep_top": 0, "view": "",
     "losses": {"regression": 1.0, "cross_entropy": 0.1, "list_mle": 0.01}},
     {"name": "multimodal", "epochs": 9.0, "visual": [1, 1], "hops": 3, "hop_decay": 1.0,
      "learning_rate": 0.002, "pace": 0.0, "anchors": 0, "keep_top": 0, "view": "",
     "losses": {"l1": 10.0, "list_mle": 0.1}}],
  "vata": true, "ivsb": false, "mtp": true, "middle_norm": true
}"""
"""The settings in a `config.json`."""

SETTINGS = (
    *(
        "kv_heads=target",
        "positions=compact",
        "tree=chain-4",
        "batch_tokens=2048",
        "max_length=4096",
    ),
    *("steps=240", "clip=1.0"),
    *(
        "stages.text.epochs=1",
        "stages.multimodal.epochs=9",
        "stages.*.learning_rate=2e-3",
    ),
    *("stages.multimodal.hops=3", "ivsb=false"),
)


def test_written_settings_are_read_and_written_back_alike() -> None:
    paper = catalogue.config("sparrow")
    config = from_dict(paper, json.loads(WRITTEN))
    assert config == override(paper, SETTINGS)
    assert config.model == Sparrow.Config(
        kv_heads="target", positions="compact", ivsb=False
    )
    assert (config.training.steps, config.training.clip, config.tree.total) == (
        240,
        1.0,
        5,
    )
    assert json.loads(json.dumps(to_dict(config))) == json.loads(WRITTEN)


def test_losses_of_a_recipe_file_replace_the_papers(tmp_path: Path) -> None:
    paper, file = catalogue.config("sparrow"), tmp_path / "mine.toml"
    replaced = override(paper, ['stages.text.losses={"l1": 2}'])
    assert {name for stage in replaced.training.stages for name in stage.losses} > {
        "l1"
    }
    file.write_text("[stages.text]\nlosses = { l1 = 2 }\n")
    assert resolve("sparrow", str(file)) == replaced
    file.write_text("[sparrow.stages.text.losses]\nl1 = 2\n")
    assert resolve("sparrow", str(file)) == replaced


@pytest.mark.parametrize("name", TRAINED)
def test_settings_written_as_a_recipe_file_are_read_back_alike(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    for recipe in catalogue.RECIPES:
        config = resolve(name, recipe, ["warmup=0.125"])
        file.write_text(as_file(name, config))
        assert resolve(name, str(file)) == config


def test_no_setting_has_two_meanings() -> None:
    for name in catalogue.NAMES:
        config = catalogue.config(name)
        parts = [vars(config.model), vars(config.training), {"tree": config.tree}]
        assert len(to_dict(config)) == sum(map(len, parts))


@pytest.mark.parametrize(
    ("version", "advice"), [(2, "train .* again"), (99, "update vlmdistill")]
)
def test_a_folder_of_another_format_is_refused_with_what_to_do(
    version: int, advice: str, tmp_path: Path
) -> None:
    description = written(tmp_path / "old", "medusa")
    file = tmp_path / "old" / "config.json"
    file.write_text(json.dumps({**description, "format": version, "training": None}))
    with pytest.raises(TrainingError, match=f"format {version}.*{advice}"):
        describe(tmp_path / "old")


def written(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Write a fresh drafter; returns its `config.json`."""
    config = override(
        catalogue.config(name), [f"{key}={value}" for key, value in settings.items()]
    )
    drafter = checkpoint.build(name, config, synthetic.INFO, synthetic.head())
    checkpoint.save(
        drafter,  # type: ignore[arg-type]
        name,
        folder,
        checkpoint.Origin(synthetic.provenance(), config.training, {}),
    )
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda one: one.pop("format"),
    "object": lambda one: one.update(config=None),
    "str": lambda one: one.update(drafter=5),
    "num_heads": lambda one: one["target"].update(num_heads=0),
    "head_dim": lambda one: one["target"].update(head_dim=0),
    "rms_norm_eps": lambda one: one["target"].update(rms_norm_eps=float("nan")),
    "heads": lambda one: one["config"].update(heads=10**9),
    "heads.5.weight is missing": lambda one: one["config"].update(heads=6),
    "there is none": lambda one: one["config"].update(heads=4),
    "vocab_size": lambda one: one["target"].update(vocab_size=2**30),
    "is not a tree": lambda one: one["config"].update(tree="9999999999-1-1"),
}


@pytest.mark.parametrize("words", ODD)
def test_a_description_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, words: str
) -> None:
    description = written(tmp_path / "odd", "medusa")
    ODD[words](description)
    (tmp_path / "odd" / "config.json").write_text(json.dumps(description))
    with pytest.raises(TrainingError, match=words):
        checkpoint.load(tmp_path / "odd", synthetic.head(), synthetic.INFO)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_another_type_are_refused_in_one_line(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    written(tmp_path / "odd", "medusa")
    file = tmp_path / "odd" / "model.safetensors"
    weights = load_file(file)
    save_file({key: value.to(dtype) for key, value in weights.items()}, file)
    with pytest.raises(TrainingError, match="is of type"):
        checkpoint.load(tmp_path / "odd", synthetic.head(), synthetic.INFO)


def test_sizes_are_compared_with_the_weights_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    description = written(tmp_path / "odd", "sparrow")
    description["target"]["intermediate_size"] = 2**31
    (tmp_path / "odd" / "config.json").write_text(json.dumps(description))
    with pytest.raises(TrainingError, match=r"up_proj.weight is \["):
        checkpoint.load(tmp_path / "odd", synthetic.head(), synthetic.INFO)
    (tmp_path / "odd" / "config.json").write_text("[" * 100_000)
    with pytest.raises(TrainingError, match="not readable JSON"):
        describe(tmp_path / "odd")


def test_a_draft_vocabulary_outside_the_targets_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "odd", "eagle3", draft_vocab=8)
    file = tmp_path / "odd" / "model.safetensors"
    save_file(
        {**load_file(file), "d2t": torch.full((8,), synthetic.INFO.vocab_size)}, file
    )
    with pytest.raises(TrainingError, match="d2t"):
        checkpoint.load(tmp_path / "odd", synthetic.head(), synthetic.INFO)


def test_a_drafter_survives_ctrl_c_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "mine", Path.rename
    before = written(folder, "medusa")

    def interrupted(path: Path, to: Path) -> Path:
        if to == folder and path.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(folder, "medusa", heads=3)
    assert json.loads((folder / "config.json").read_text()) == before
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_all_files_of_a_drafter_are_readable_by_those_whom_the_umask_lets(
    tmp_path: Path,
) -> None:
    origin = checkpoint.Origin(
        synthetic.provenance(), catalogue.config("eagle3").training, {}, ["a"]
    )
    checkpoint.save(synthetic.build("eagle3"), "eagle3", tmp_path / "out", origin)
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    assert {
        file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()
    } == dict.fromkeys(("config.json", "model.safetensors", "samples.txt"), usual)
