"""Settings of drafters as text: JSON in a checkpoint, and `--set key=value`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean


def to_dict(config: DrafterConfig) -> dict[str, Any]:
    """All settings on one level, as JSON can hold them; `from_dict` reads them back.

    The tree is written as text.
    """
    model = dataclasses.asdict(config.model)
    training = dataclasses.asdict(config.training)
    return {**model, "tree": str(config.tree), **training}


def flat(config: DrafterConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its key in `override`, such as `stages.text.hops`; to compare runs."""
    values = to_dict(config) if isinstance(config, DrafterConfig) else config
    settings: dict[str, Any] = {}

    def add(value: Any, key: str) -> None:
        if _is_list_of_stages(value):
            stages = {}
            for number, stage in enumerate(value):
                stages[str(stage.get("name", number))] = stage
            value = stages
        if isinstance(value, dict):
            for name, inner in value.items():
                add(inner, f"{key}.{name}" if key else name)
        else:
            settings[key] = list(value) if isinstance(value, tuple) else value

    add(values, "")
    return settings


def _is_list_of_stages(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, dict) for item in value)


def from_dict(paper: DrafterConfig, values: Mapping[str, Any]) -> DrafterConfig:
    """Read what `to_dict` wrote.

    Missing settings are taken from `paper`, those of the drafter's paper. DataError names
    a setting that the drafter does not have, or a value that does not fit.
    """
    values = {**to_dict(paper), **values}
    try:
        model = msgspec.convert(values, type(paper.model))
        training = msgspec.convert(values, type(paper.training))
    except msgspec.ValidationError as error:
        reason, _, setting = str(error).partition(" - at `$.")
        setting = setting.removesuffix("`")
        raise DataError(
            f"the value does not fit the setting '{setting}': {reason}"
        ) from None
    tree = Tree.parse(str(values["tree"]))
    config = DrafterConfig(model, training, tree)
    settings = flat(config)
    unknown = sorted(set(flat(values)) - set(settings))
    if unknown:
        near = did_you_mean(unknown[0], settings)
        choice = ", ".join(sorted(settings))
        raise DataError(
            f"unknown setting {', '.join(unknown)}{near}; there are {choice}"
        )
    return config


def override(config: DrafterConfig, settings: Sequence[str]) -> DrafterConfig:
    """Apply `key=value` settings in order.

    A key is a setting, or a path into the stages by index, name or `*`:
    `stages.*.learning_rate=1e-4`, `stages.multimodal.hops=3`. A value is JSON or plain
    words. DataError on a key or value that does not fit.
    """
    parsed = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise DataError(
                f"'{setting}' is not a setting: "
                "write key=value, such as batch_tokens=8192"
            )
        parsed.append((key, _parse(text)))
    return changed(config, parsed)


def changed(
    config: DrafterConfig, settings: Iterable[tuple[str, Any]]
) -> DrafterConfig:
    """Assign values by key, in order; DataError on a key or value that does not fit."""
    values = to_dict(config)
    for key, value in settings:
        _assign(values, key.split("."), value, key)
    return from_dict(config, values)


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    """Assign to the setting at `path` within `values`; `key` is the whole path, for errors."""
    name = path[0]
    deeper = path[1:]
    if _is_list_of_stages(values):
        stages = []
        for number, stage in enumerate(values):
            if name in ("*", str(number), stage.get("name")):
                stages.append(stage)
        if not stages or not deeper:
            _refuse_stage(values, name, key, is_stage=bool(stages))
        for stage in stages:
            _assign(stage, deeper, value, key)
        return
    is_new_loss = ".losses." in key and not deeper
    if not isinstance(values, dict) or not (name in values or is_new_loss):
        _refuse_setting(values, name, key)
    if deeper:
        _assign(values[name], deeper, value, key)
    else:
        values[name] = value


def _refuse_stage(
    stages: Sequence[Mapping[str, Any]], name: str, key: str, *, is_stage: bool
) -> NoReturn:
    """Raise the DataError for a key that does not name a stage and a setting of it."""
    names = [str(stage.get("name")) for stage in stages]
    near = "" if is_stage else did_you_mean(name, names)
    raise DataError(
        f"'{key}' does not name a stage and its setting{near}: "
        f"stages are {', '.join(names)} (or 0, 1, ... or *)"
    )


def _refuse_setting(values: Any, name: str, key: str) -> NoReturn:
    """Raise the DataError for a key whose part `name` is not a setting in `values`."""
    settings: Mapping[str, Any] = values if isinstance(values, dict) else {}
    near_name = "learning_rate" if name == "lr" else name  # as most trainers call it
    stages = settings.get("stages", ()) if key == name else ()
    if any(near_name in stage for stage in stages):
        raise DataError(
            f"'{key}' is a setting of each stage: write stages.*.{near_name}=..."
        )
    parent = key.removesuffix(name).rstrip(".")
    owner = f"{parent} has" if parent else "it has"
    choice = ", ".join(sorted(settings)) or "nothing inside"
    near = did_you_mean(near_name, sorted(settings))
    raise DataError(f"'{key}' is not a setting of this drafter{near}; {owner} {choice}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
