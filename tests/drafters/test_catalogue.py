"""What a user chooses a method by is true of the method, and the page says the same."""

import re
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.export import exportable
from vlmdistill.drafters.core.serving import Exportable
from vlmdistill.stores.errors import TrainingError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "methods.md"
MEGABYTE = 2 * 3584 / 1e6  # of a state of Qwen2.5-VL-7B
TEXT, VISUAL = 1000, 2500  # tokens of the sample on the page


@pytest.mark.parametrize("name", catalogue.NAMES)
def test_the_states_and_engines_of_a_choice_are_those_of_the_method(name: str) -> None:
    choice = catalogue.choice(name)
    needs = catalogue.config(name).model.needs(synthetic.INFO)
    positions = [feature.where for feature in needs]
    assert choice.states == (positions.count("text"), positions.count("visual"))
    assert choice.paper != "-"
    if choice.engines:
        assert name in exportable()
    elif name in exportable():
        drafter = synthetic.build(name)
        assert isinstance(drafter, Exportable)
        with pytest.raises(TrainingError):
            drafter.published()


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(page: Path) -> dict[str, list[str]]:
    """The rows of the table of measured methods of a page, by method."""
    _, _, text = page.read_text().partition("| method | tau on images |")
    table, _, _ = text.partition("\n\n")
    rows = {}
    for line in table.splitlines()[2:]:
        cells = cells_of(line)
        rows[cells[0].strip("`")] = cells
    return rows


@pytest.mark.parametrize("name", rows_of(PAGE))
def test_the_page_has_the_bytes_and_engines_of_the_list(name: str) -> None:
    *_, megabytes, _, engine = rows_of(PAGE)[name]
    choice = catalogue.choice(name)
    of_text, of_visual = choice.states
    size = MEGABYTE * (TEXT * of_text + VISUAL * of_visual)
    assert float(megabytes) == pytest.approx(size, abs=0.02)
    assert engine.startswith("no") != ("vLLM" in choice.engines)


@pytest.mark.parametrize("name", rows_of(PAGE))
def test_the_page_has_the_figures_of_the_page_of_results(name: str) -> None:
    """Tau on images, tau on text, speedup and CPU seconds: each the mean over seeds."""
    cells = rows_of(PAGE)[name]
    results = rows_of(DOCS / "measurements/results.md")[name]
    means = [cell.partition(" ")[0] for cell in results]
    assert cells[1:4] == means[1:4]
    assert cells[-2] == (means[-1] if catalogue.is_trained(name) else "0")


def test_the_page_has_the_speedups_of_the_demo_on_the_faster_cpu() -> None:
    text = (DOCS / "measurements/benchmarks.md").read_text()
    rows = re.findall(r"^\| `demo`, `(\w+)`, T=0 \|[^|]+\| (\S+) ", text, re.MULTILINE)
    shown = {name: cells[4] for name, cells in rows_of(PAGE).items()}
    assert {name: rate for name, rate in shown.items() if rate != "-"} == dict(rows)


def test_the_method_that_the_page_recommends_is_the_one_to_start_with() -> None:
    (recommended,) = re.findall(r"\*\*Start with `(\w+)`\*\*", PAGE.read_text())
    starts = [
        name
        for name, choice in catalogue.choices().items()
        if "start" in choice.good_for
    ]
    assert starts == [recommended]
