"""Settings of drafters as text: JSON in a checkpoint, `--set key=value`, and named recipes."""

import dataclasses
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.suggestions import did_you_mean


@dataclass(frozen=True)
class Recipe:
    """Settings for every drafter, so that drafters compare."""

    settings: str = ""
    """As for `--set`, with spaces between."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """By the name of a stage; a stage of another name keeps its paper's epochs."""


_EQUAL = Recipe("steps=40000 stages.*.learning_rate=1e-4 batch_tokens=16384 tree=30-3-8 warmup=0.05")
_SMALL = Recipe(
    "steps=600 stages.*.learning_rate=2e-3 batch_tokens=2048 tree=chain-4 warmup=0.05 clip=1.0",
    epochs={"text": 1, "multimodal": 9},
)


def _mixed(recipe: Recipe) -> Recipe:
    return replace(recipe, settings=f"{recipe.settings} stages.*.visual=[0.5,0.5]")


RECIPES = {
    "paper": Recipe(),
    "fair": _mixed(_EQUAL),
    "fair-paper": _EQUAL,
    "demo": _mixed(_SMALL),
    "demo-paper": _SMALL,
}
"""Each paper's own settings; the same steps, tree and share of images for all; the same, but for each paper's
own schedule of images and text; and both for the embedded targets."""


def with_recipe(config: DrafterConfig, name: str) -> DrafterConfig:
    """Apply a recipe by its name; DataError on an unknown one."""
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        raise DataError(f"there is no recipe '{name}'{near}; choose from {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    names = {stage.name for stage in config.training.stages}
    epochs = [f"stages.{stage}.epochs={count}" for stage, count in recipe.epochs.items() if stage in names]
    return override(config, [*recipe.settings.split(), *epochs])


def with_file(config: DrafterConfig, file: Path, drafter: str, drafters: Collection[str]) -> DrafterConfig:
    """Apply a recipe file: TOML with the keys of `override`, and a table for each drafter that has its own.

    It begins with the named recipe that its key `recipe` gives, `paper` by default. Of the tables of all
    `drafters`, that of `drafter` counts. DataError names the file, and the key or value that does not fit.
    """
    try:
        found = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise DataError(f"the recipe file {file} cannot be read: {reason}") from None
    for key, value in found.items():
        if key in drafters and not isinstance(value, dict):
            raise DataError(f"{file}: {key} is a drafter: write a table [{key}] with its settings")
        if isinstance(value, dict) and key not in ("stages", *drafters):
            near = did_you_mean(key, ("stages", *drafters))
            raise DataError(f"{file}: the table [{key}] is neither [stages] nor that of a drafter{near}")
    shared = {key: value for key, value in found.items() if key not in (*drafters, "recipe")}
    try:
        config = with_recipe(config, str(found.get("recipe", "paper")))
        return _changed(config, [*_leaves(shared), *_leaves(found.get(drafter, {}))])
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


def to_dict(config: DrafterConfig) -> dict[str, Any]:
    """A JSON-able form, all settings on one level; `from_dict` reads it back. Trees are written as text."""
    model, training = (dataclasses.asdict(part) for part in (config.model, config.training))
    return {**model, "tree": str(config.tree), **training}


def flat(config: DrafterConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its key in `override`, such as `stages.text.hops`; to compare runs."""
    values = to_dict(config) if isinstance(config, DrafterConfig) else config
    found: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            value = {str(item.get("name", number)): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            found[key] = list(value) if isinstance(value, tuple) else value

    walk(values, "")
    return found


def from_dict(paper: DrafterConfig, values: Mapping[str, Any]) -> DrafterConfig:
    """Read `to_dict`'s form for the drafter whose paper's settings are given; they fill in what is missing.

    DataError names a setting that the drafter does not have, or a value that does not fit.
    """
    values = {**to_dict(paper), **values}
    try:
        model = msgspec.convert(values, type(paper.model))
        training = msgspec.convert(values, type(paper.training))
    except msgspec.ValidationError as error:
        reason, _, setting = str(error).partition(" - at `$.")
        setting = setting.removesuffix("`")
        raise DataError(f"the value does not fit the setting '{setting}': {reason}") from None
    config = DrafterConfig(model, training, Tree.parse(str(values["tree"])))
    known = flat(config)
    if unknown := sorted(set(flat(values)) - set(known)):
        near = did_you_mean(unknown[0], known)
        raise DataError(f"unknown setting {', '.join(unknown)}{near}; there are {', '.join(sorted(known))}")
    return config


def override(config: DrafterConfig, settings: Sequence[str]) -> DrafterConfig:
    """Apply `key=value` settings in order.

    A key is a setting, or a path into the stages by index, name or `*`: `stages.*.learning_rate=1e-4`,
    `stages.multimodal.hops=3`. Values are JSON or plain words. DataError on a key or value that does not fit.
    """
    parsed = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise DataError(f"'{setting}' is not a setting: write key=value, such as batch_tokens=8192")
        parsed.append((key, _parse(text)))
    return _changed(config, parsed)


def _changed(config: DrafterConfig, settings: Iterable[tuple[str, Any]]) -> DrafterConfig:
    """Assign values by key, in order."""
    values = to_dict(config)
    for key, value in settings:
        _assign(values, key.split("."), value, key)
    return from_dict(config, values)


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    name, rest = path[0], path[1:]
    open_ended = ".losses." in key and not rest  # a loss may be added, not only changed
    if isinstance(values, list | tuple):
        chosen = [item for i, item in enumerate(values) if name in ("*", str(i)) or item.get("name") == name]
        if not chosen or not rest:
            names = [str(item.get("name")) for item in values]
            near = "" if chosen else did_you_mean(name, names)
            raise DataError(
                f"'{key}' does not name a stage and its setting{near}: stages are {', '.join(names)} "
                "(or 0, 1, ... or *)"
            )
        for item in chosen:
            _assign(item, rest, value, key)
    elif not isinstance(values, dict) or not (name in values or open_ended):
        known = sorted(values) if isinstance(values, dict) else []
        there = ", ".join(known) or "nothing inside"
        named = "learning_rate" if name == "lr" else name  # as most trainers call it
        near = did_you_mean(named, known)
        stages = values.get("stages", ()) if isinstance(values, dict) and key == name else ()
        if any(named in stage for stage in stages):
            raise DataError(f"'{key}' is a setting of each stage: write stages.*.{named}=...")
        where = key.removesuffix(name).rstrip(".")
        inside = f"{where} has" if where else "it has"
        raise DataError(f"'{key}' is not a setting of this drafter{near}; {inside} {there}")
    elif rest:
        _assign(values[name], rest, value, key)
    else:
        values[name] = value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
