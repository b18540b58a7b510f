"""What a user chooses a method by is true of the method, and the page says the same."""

import re
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.export import exportable
from vlmdistill.drafters.core.serving import Exportable
from vlmdistill.stores.errors import TrainingError

PAGE = Path(__file__).parents[2] / "docs/methods.md"
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


def rows_of_the_page() -> dict[str, list[str]]:
    """The rows of the table of measured methods, by method."""
    _, _, text = PAGE.read_text().partition("| method | tau on images |")
    table, _, _ = text.partition("\n\n")
    rows = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]):
            rows[name] = cells
    return rows


@pytest.mark.parametrize("name", rows_of_the_page())
def test_the_page_has_the_bytes_and_engines_of_the_list(name: str) -> None:
    cells = rows_of_the_page()[name]
    choice = catalogue.choice(name)
    of_text, of_visual = choice.states
    size = MEGABYTE * (TEXT * of_text + VISUAL * of_visual)
    assert float(cells[4]) == pytest.approx(size, abs=0.02)
    assert cells[6].startswith("no") != ("vLLM" in choice.engines)


def test_the_method_that_the_page_recommends_is_the_one_to_start_with() -> None:
    (recommended,) = re.findall(r"\*\*Start with `(\w+)`\*\*", PAGE.read_text())
    starts = [
        name
        for name, choice in catalogue.choices().items()
        if "start" in choice.good_for
    ]
    assert starts == [recommended]
