"""Every setting is explained where it is defined, and the explanation is what a user gets."""

import tomllib
from dataclasses import replace

import pytest

from docs import settings as page
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.documented import documented
from vlmdistill.drafters.core.settings import to_dict
from vlmdistill.drafters.training.recipes import as_file, resolve
from vlmdistill.stores.errors import DataError

TRAINED = [name for name in catalogue.NAMES if catalogue.is_trained(name)]


@pytest.mark.parametrize("name", catalogue.NAMES)
def test_every_setting_has_a_docstring_and_every_number_a_range(name: str) -> None:
    documentation = documented(catalogue.config(name))
    settings = [*documentation.settings, *sum(documentation.stages, ())]
    for setting in settings:
        assert setting.text.endswith("."), setting.name
        is_number = type(setting.default) in (int, float)
        assert bool(setting.values) or not is_number, setting.name


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_file_explains_each_setting_once_and_shows_its_default(
    name: str,
) -> None:
    paper = catalogue.config(name)
    fair = resolve(name, "fair")
    text = as_file(name, fair)
    assert tomllib.loads(text)[name]["steps"] == fair.training.steps
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines())
    documentation = documented(paper)
    for setting in (*documentation.settings, *documentation.stages[0][1:]):
        assert comments.count(setting.text) == 1, setting.name
    assert f"default: {paper.training.batch_tokens}" in text
    for stage in paper.training.stages[1:]:
        assert f"learning_rate = 0.0001  # default: {stage.learning_rate}" in text


def test_a_number_out_of_its_range_is_refused_by_its_name() -> None:
    config = catalogue.config("dream").model
    with pytest.raises(DataError, match=r"middle=1.5: .*at least 0, at most 1"):
        replace(config, middle=1.5)  # type: ignore[call-arg]


def test_the_page_has_every_setting_of_every_drafter() -> None:
    text = page.page()
    for name in catalogue.NAMES:
        _, _, section = text.partition(f"## {name}\n")
        section, _, _ = section.partition("\n## ")
        for key, default in to_dict(catalogue.config(name)).items():
            assert f"| `{key}` |" in text or key == "stages"
            if key in ("tree", "batch_tokens") and default not in ("60-5-10", 16384):
                assert str(default) in section
