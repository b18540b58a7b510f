"""The settings of a training: from a paper, then a recipe (by name or as a file), then `key=value`."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.settings import changed, override, to_dict
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.suggestions import did_you_mean


def resolve(drafter: str, recipe: str, settings: Sequence[str] = ()) -> DrafterConfig:
    """The configuration of a drafter: its defaults, then the recipe, then `key=value` settings.

    A recipe is a name, or a file whose name ends in `.toml`. DataError on an unknown drafter, recipe or key,
    or a value of the wrong type.
    """
    catalogue.trained(drafter)
    config = catalogue.config(drafter)
    if recipe.endswith(".toml"):
        config = _with_file(config, Path(recipe), drafter)
    else:
        config = _with_recipe(config, recipe)
    return override(config, settings)


def as_texts(settings: Mapping[str, Any]) -> list[str]:
    """Settings as `resolve` takes them; DataError if they are no mapping."""
    if not isinstance(settings, Mapping):
        raise DataError(
            f"settings={settings!r}: give a mapping, such as {{'steps': 100}}"
        )
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def as_file(drafter: str, config: DrafterConfig) -> str:
    """The configuration as a recipe file, which `resolve` reads back: a table of the drafter."""
    values = to_dict(config)
    lines = [f"[{drafter}]", *_lines(values, ("stages",))]
    for stage in values["stages"]:
        lines += ["", f"[{drafter}.stages.{stage['name']}]", *_lines(stage, ("name",))]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    return [
        f"{name} = {_toml(value)}"
        for name, value in values.items()
        if name not in without
    ]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items())
            + " }"
        )
    return json.dumps(value)


def _with_recipe(config: DrafterConfig, name: str) -> DrafterConfig:
    """Apply a recipe by its name; DataError on an unknown one."""
    catalogue.check_recipe(name)
    recipe = catalogue.RECIPES[name]
    names = {stage.name for stage in config.training.stages}
    epochs = [
        f"stages.{stage}.epochs={count}"
        for stage, count in recipe.epochs.items()
        if stage in names
    ]
    return override(config, [*recipe.settings.split(), *epochs])


def _with_file(config: DrafterConfig, file: Path, drafter: str) -> DrafterConfig:
    """Apply a recipe file: TOML with the keys of `override`, and a table for each drafter that has its own.

    It begins with the named recipe that its key `recipe` gives, `paper` by default. Of the tables of
    drafters, that of `drafter` counts. DataError names the file, and the key or value that does not fit.
    """
    drafters = catalogue.NAMES
    try:
        found = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise DataError(f"the recipe file {file} cannot be read: {reason}") from None
    for key, value in found.items():
        if key in drafters and not isinstance(value, dict):
            raise DataError(
                f"{file}: {key} is a drafter: write a table [{key}] with its settings"
            )
        if isinstance(value, dict) and key not in ("stages", *drafters):
            near = did_you_mean(key, ("stages", *drafters))
            raise DataError(
                f"{file}: the table [{key}] is neither [stages] nor a drafter's{near}"
            )
    shared = {
        key: value for key, value in found.items() if key not in (*drafters, "recipe")
    }
    try:
        config = _with_recipe(config, str(found.get("recipe", "paper")))
        return changed(config, [*_leaves(shared), *_leaves(found.get(drafter, {}))])
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table and of those in it, by their dotted keys; losses are one value."""
    for name, value in table.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and name != "losses":
            yield from _leaves(value, key)
        else:
            yield key, value
