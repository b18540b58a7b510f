"""The settings of a training: from a paper, then a recipe (by name or as a file), then `key=value`."""

import json
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.documented import Setting, documented
from vlmdistill.drafters.core.settings import changed, override, to_dict
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.suggestions import did_you_mean

WIDTH = 84  # of the comments of a recipe file


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
    """The configuration as a recipe file, which `resolve` reads back: a table of the drafter.

    Comments say what each setting does, what it may be, and what it is by default.
    """
    values = to_dict(config)
    documentation = documented(catalogue.config(drafter))
    lines = [f"[{drafter}]"]
    for setting in documentation.settings:
        lines += _explained(setting, values[setting.name])
    # The settings of the first stage alone are explained: all stages have the same.
    write = _explained
    for stage, settings in zip(values["stages"], documentation.stages, strict=True):
        lines += ["", f"[{drafter}.stages.{stage['name']}]"]
        for setting in settings:
            if setting.name != "name":
                lines += write(setting, stage[setting.name])
        write = _with_default
    return "\n".join(lines) + "\n"


def _explained(setting: Setting, value: Any) -> list[str]:
    """The line of a setting, below a comment that explains it."""
    facts = [setting.values, f"default: {_toml(setting.default)}"]
    comment = textwrap.wrap(setting.text, WIDTH, break_on_hyphens=False)
    comment.append("; ".join(filter(None, facts)))
    lines = [f"# {line}" for line in comment]
    return ["", *lines, f"{setting.name} = {_toml(value)}"]


def _with_default(setting: Setting, value: Any) -> list[str]:
    """The line of a setting, with its default if it has another value."""
    line = f"{setting.name} = {_toml(value)}"
    if value != setting.default:
        line += f"  # default: {_toml(setting.default)}"
    return [line]


def _toml(value: Any) -> str:
    if not isinstance(value, Mapping):
        return json.dumps(value)
    items = [f"{name} = {_toml(item)}" for name, item in value.items()]
    return "{ " + ", ".join(items) + " }"


def _with_recipe(config: DrafterConfig, name: str) -> DrafterConfig:
    """Apply a recipe by its name; DataError on an unknown one."""
    catalogue.check_recipe(name)
    recipe = catalogue.RECIPES[name]
    stages = {stage.name for stage in config.training.stages}
    settings = recipe.settings.split()
    for stage, count in recipe.epochs.items():
        if stage in stages:
            settings.append(f"stages.{stage}.epochs={count}")
    return override(config, settings)


def _with_file(config: DrafterConfig, file: Path, drafter: str) -> DrafterConfig:
    """Apply a recipe file: TOML with the keys of `override`, and a table for each drafter that has its own.

    It begins with the named recipe that its key `recipe` gives, `paper` by default. Of the tables of
    drafters, that of `drafter` counts. DataError names the file, and the key or value that does not fit.
    """
    table = _read_toml(file)
    _check_tables(file, table)
    shared = _without(table, ("recipe", *catalogue.NAMES))
    try:
        config = _with_recipe(config, str(table.get("recipe", "paper")))
        settings = [*_leaves(shared), *_leaves(table.get(drafter, {}))]
        return changed(config, settings)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = isinstance(error, OSError) and error.strerror
        raise DataError(
            f"the recipe file {file} cannot be read: {reason or one_line(error)}"
        ) from None


def _check_tables(file: Path, table: Mapping[str, Any]) -> None:
    """DataError for a table that is neither of the stages nor of a drafter."""
    tables = ("stages", *catalogue.NAMES)
    for key, value in table.items():
        is_table = isinstance(value, dict)
        if key in catalogue.NAMES and not is_table:
            raise DataError(
                f"{file}: {key} is a drafter: write a table [{key}] with its settings"
            )
        if is_table and key not in tables:
            near = did_you_mean(key, tables)
            raise DataError(
                f"{file}: the table [{key}] is neither [stages] nor a drafter's{near}"
            )


def _without(table: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table and of the tables in it, by their dotted keys; losses are one value."""
    for name, value in table.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and name != "losses":
            yield from _leaves(value, key)
        else:
            yield key, value
