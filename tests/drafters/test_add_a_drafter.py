"""The method on the page `docs/add-a-drafter.md` works with its one line in the catalogue."""

import re
from pathlib import Path

import pytest

from tests.drafters import synthetic
from tests.drafters.conformance import test_masks, test_needs, test_steps, test_training
from tests.pipelines.vllm import test_entry_map
from vlmdistill import drafters
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.trainer import train

PAGE = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"
SWITCHES = [{}, {"gate": False}]


@pytest.fixture(autouse=True)
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in a folder of drafters, and its line in the catalogue."""
    text = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ((name, kind),) = re.findall(r'`"(\w+)": "(\w+)"`', text)
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setitem(catalogue.DRAFTERS, name, kind)
    monkeypatch.setattr(catalogue, "NAMES", (*catalogue.NAMES, name))


@pytest.mark.parametrize("settings", SWITCHES)
def test_its_steps_masks_and_needs_conform(
    settings: dict[str, bool], tmp_path: Path
) -> None:
    for layout in synthetic.LAYOUTS:
        test_steps.test_the_train_step_is_the_decode_step_at_every_hop(
            "gated", settings, layout
        )
    test_steps.test_packing_samples_side_by_side_changes_nothing("gated", settings)
    test_masks.test_a_draft_sees_all_that_precedes_it_and_nothing_else(
        "gated", settings
    )
    for decoding in (False, True):
        test_needs.test_each_declared_feature_counts_and_no_other_does(
            "gated", settings, decoding
        )
    test_training.test_a_checkpoint_gives_back_the_drafter("gated", settings, tmp_path)


def test_it_is_trained_with_any_recipe_and_setting(tmp_path: Path) -> None:
    synthetic.store(tmp_path / "store", 8)
    assert resolve("gated", "demo", ["gate=false"]).training.steps == 600
    settings = ("steps=4", "gate=false", "stages.multimodal.hops=3", "tree=chain-5")
    out = train(
        synthetic.plan(
            tmp_path / "store", tmp_path / "out", drafter="gated", settings=settings
        )
    )
    again = checkpoint.load(out, synthetic.head(), synthetic.INFO)
    assert isinstance(again, Drafter)
    assert (again.config, str(again.tree)) == (
        catalogue.load("gated").Config(gate=False),  # type: ignore[call-arg]
        "chain-5",
    )
    assert export(out, tmp_path / "served").drops_visual


@pytest.mark.parametrize("settings", SWITCHES)
@pytest.mark.parametrize("layout", ["no image", "several images"])
def test_what_vllm_feeds_it_are_the_entries_of_our_decoder(
    settings: dict[str, object], layout: str, tmp_path: Path
) -> None:
    test_entry_map.test_an_exported_drafter_drafts_what_it_drafts_here(
        "gated", settings, layout, tmp_path
    )
