"""Settings of drafters as text: JSON in a checkpoint, and `--set key=value`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean


def to_dict(config: DrafterConfig) -> dict[str, Any]:
    """A JSON-able form, all settings on one level; `from_dict` reads it back. Trees are written as text."""
    model, training = (
        dataclasses.asdict(part) for part in (config.model, config.training)
    )
    return {**model, "tree": str(config.tree), **training}


def flat(config: DrafterConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its key in `override`, such as `stages.text.hops`; to compare runs."""
    values = to_dict(config) if isinstance(config, DrafterConfig) else config
    found: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(item, dict) for item in value)
        ):
            value = {
                str(item.get("name", number)): item for number, item in enumerate(value)
            }
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
        raise DataError(
            f"the value does not fit the setting '{setting}': {reason}"
        ) from None
    config = DrafterConfig(model, training, Tree.parse(str(values["tree"])))
    known = flat(config)
    if unknown := sorted(set(flat(values)) - set(known)):
        near = did_you_mean(unknown[0], known)
        raise DataError(
            f"unknown setting {', '.join(unknown)}{near}; there are {', '.join(sorted(known))}"
        )
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
            raise DataError(
                f"'{setting}' is not a setting: write key=value, such as batch_tokens=8192"
            )
        parsed.append((key, _parse(text)))
    return changed(config, parsed)


def changed(
    config: DrafterConfig, settings: Iterable[tuple[str, Any]]
) -> DrafterConfig:
    """Assign values by key, in order."""
    values = to_dict(config)
    for key, value in settings:
        _assign(values, key.split("."), value, key)
    return from_dict(config, values)


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    name, rest = path[0], path[1:]
    open_ended = ".losses." in key and not rest  # a loss may be added, not only changed
    if isinstance(values, list | tuple):
        chosen = [
            item
            for i, item in enumerate(values)
            if name in ("*", str(i)) or item.get("name") == name
        ]
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
        stages = (
            values.get("stages", ()) if isinstance(values, dict) and key == name else ()
        )
        if any(named in stage for stage in stages):
            raise DataError(
                f"'{key}' is a setting of each stage: write stages.*.{named}=..."
            )
        where = key.removesuffix(name).rstrip(".")
        inside = f"{where} has" if where else "it has"
        raise DataError(
            f"'{key}' is not a setting of this drafter{near}; {inside} {there}"
        )
    elif rest:
        _assign(values[name], rest, value, key)
    else:
        values[name] = value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
