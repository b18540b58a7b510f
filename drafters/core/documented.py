"""The documentation of settings, from the classes that define them: docstring, values and default."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from vlmdistill.drafters.core.config import DrafterConfig, Stage, ranges
from vlmdistill.drafters.core.settings import to_dict


@dataclass(frozen=True)
class Setting:
    """One setting of a drafter, for its user."""

    name: str
    text: str
    """Its docstring in one line."""
    values: str
    """What it may be; empty: what the text says."""
    default: Any
    """That of the drafter's paper."""


@dataclass(frozen=True)
class DocumentedConfig:
    """The settings of a drafter in the order of its recipe file."""

    settings: tuple[Setting, ...]
    stages: tuple[tuple[Setting, ...], ...]


def documented(paper: DrafterConfig) -> DocumentedConfig:
    """The documentation of all settings of a drafter; `paper` are its paper's."""
    values = to_dict(paper)
    stages = values.pop("stages")
    kinds = (type(paper.model), DrafterConfig, type(paper.training))
    settings = [setting for kind in kinds for setting in _settings(kind, values)]
    of_stages = [tuple(_settings(Stage, stage)) for stage in stages]
    return DocumentedConfig(tuple(settings), tuple(of_stages))


def _settings(kind: type, values: Mapping[str, Any]) -> Iterator[Setting]:
    """The fields of a class that are among the values."""
    texts = docstrings(kind)
    allowed = ranges(kind)
    for field in dataclasses.fields(kind):
        name = field.name
        if name in values:
            text = texts.get(name, "")
            numbers = str(allowed[name]) if name in allowed else ""
            choice = numbers or _choice(field.type)
            yield Setting(name, text, choice, values[name])


def _choice(kind: Any) -> str:
    """What a field of a type may be, if that is one of a few; else empty."""
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if kind is bool:
        return "true, false"
    return ""


@cache
def docstrings(kind: type) -> MappingProxyType[str, str]:
    """The docstrings of the fields of a dataclass by name, inherited ones included, each in one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _own_docstrings(base)
    return MappingProxyType(texts)


def _own_docstrings(kind: type) -> dict[str, str]:
    """The strings that follow the fields of one class in its source."""
    source = textwrap.dedent(inspect.getsource(kind))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    following = [*definition.body[1:], None]
    for field, statement in zip(definition.body, following, strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(
            field.target, ast.Name
        ):
            continue
        if not isinstance(statement, ast.Expr):
            continue
        text = ast.literal_eval(statement.value)
        texts[field.target.id] = " ".join(text.split())
    return texts
