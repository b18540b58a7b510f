"""What a notebook shows of the last line of a cell: small tables, in which all cells are text."""

from pathlib import Path

from tests.drafters import synthetic
from tests.pipelines.bench.conftest import Save, save, workspace
from tests.pipelines.bench.made_up import evaluation, measured
from tests.stores import samples
from vlmdistill.pipelines.planning.status import status
from vlmdistill.pipelines.report.results import Results, of_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.store import Store

__all__ = ["save", "workspace"]


def test_results_are_a_table_of_rates_and_doubts() -> None:
    sound = evaluation("<b>wren</b>", measured(noise=0.1))
    broken = evaluation("odd", measured(missed=1))
    html = Results(of_drafters([sound, broken]))._repr_html_()
    assert "<b>" not in html
    assert "<td>&lt;b&gt;wren&lt;/b&gt;</td><td>0</td><td>24</td><td>3.25</td>" in html
    assert "acceptance is broken" in html
    assert "<td></td>" in html  # no doubt of the first


def test_a_status_has_its_counts_drafters_and_next_command(
    workspace: Workspace, save: Save
) -> None:
    synthetic.save("sparrow", workspace.drafter("sparrow"), steps=30, samples=7)
    save("sparrow")
    html = status(workspace)._repr_html_()
    assert "<td>sparrow</td><td>trained</td><td>30</td><td>3.25</td>" in html
    assert "<td>next</td><td>vlmdistill prompts" in html


def test_a_store_has_its_samples_and_features(tmp_path: Path) -> None:
    store = samples.make(tmp_path / "store", [range(3)])
    html = store._repr_html_()
    assert "<td>samples</td><td>3</td>" in html
    assert "hidden.text" in html
    next((tmp_path / "store" / "commits").glob("*.json")).write_text("{")
    assert "<td>not readable</td>" in Store.open(store.path)._repr_html_()
