"""Drafter configurations as text: JSON beside a checkpoint, `--set key=value`, and named recipes."""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from vlmdistill.drafters.base import DrafterConfig, Tree
from vlmdistill.stores.errors import DataError

C = TypeVar("C")

RECIPES: dict[str, tuple[str, ...]] = {
    "paper": (),
    "fair": (
        "steps=40000",
        "stages.*.learning_rate=1e-4",
        "batch_tokens=16384",
        "tree=30-3-8",
        "warmup=0.05",
    ),
    "demo": (
        "steps=600",
        "stages.text.epochs=1",
        "stages.multimodal.epochs=9",
        "stages.*.learning_rate=2e-3",
        "batch_tokens=2048",
        "tree=chain-4",
        "warmup=0.05",
        "clip=1.0",
    ),
}
"""Settings by name: each paper's own; the same steps and tree for all; the same for the small target."""


def to_dict(config: DrafterConfig) -> dict[str, Any]:
    """A JSON-able form; `from_dict` reads it back. Trees are written as text."""
    values = dataclasses.asdict(config)
    return {**values, "tree": str(config.tree)}


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Read `to_dict`'s form; DataError names a field that the class does not have."""
    hints = typing.get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise DataError(f"unknown setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return cls(**{name: _convert(value, hints[name], name) for name, value in values.items()})


def override(config: DrafterConfig, settings: Sequence[str]) -> DrafterConfig:
    """Apply `key=value` settings in order.

    A key is a field, or a path into the stages by index, name or `*`: `stages.*.learning_rate=1e-4`,
    `stages.multimodal.hops=3`. Values are JSON or plain words. DataError on a key or value that does not fit.
    """
    values = to_dict(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise DataError(f"'{setting}' is not a setting: write key=value, such as batch_tokens=8192")
        _assign(values, key.split("."), _parse(text), key)
    return from_dict(type(config), values)


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    name, rest = path[0], path[1:]
    open_ended = ".losses." in key and not rest  # a loss may be added, not only changed
    if isinstance(values, list | tuple):
        chosen = [item for i, item in enumerate(values) if name in ("*", str(i)) or item.get("name") == name]
        if not chosen or not rest:
            names = ", ".join(str(item.get("name")) for item in values)
            raise DataError(
                f"'{key}' does not say which stage and field: stages are {names} (or 0, 1, ... or *)"
            )
        for item in chosen:
            _assign(item, rest, value, key)
    elif not isinstance(values, dict) or not (name in values or open_ended):
        known = ", ".join(sorted(values)) if isinstance(values, dict) else "nothing inside"
        raise DataError(f"'{key}' is not a setting of this drafter; at '{name}' there are {known}")
    elif rest:
        _assign(values[name], rest, value, key)
    else:
        values[name] = value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _convert(value: Any, hint: Any, name: str) -> Any:
    """One JSON value as the field's type; DataError names the field when it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Tree:
        return value if isinstance(value, Tree) else Tree.parse(str(value))
    if origin is typing.Literal:
        fits = value in arguments
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        fits = len(kinds) == len(value)
        value = (
            tuple(_convert(item, kind, name) for item, kind in zip(value, kinds, strict=True))
            if fits
            else value
        )
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value) if isinstance(value, dict) else value
    elif origin in (types.UnionType, typing.Union):
        fits = any(isinstance(value, kind) for kind in arguments)
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif isinstance(hint, type):
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    else:
        fits = isinstance(value, origin or object)
    if not fits:
        raise DataError(
            f"{value!r} does not fit the setting '{name}', which takes {getattr(hint, '__name__', hint)}"
        )
    return value
