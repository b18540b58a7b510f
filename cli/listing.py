"""`vlmdistill list`: what can be named in commands."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Annotated, Literal

import typer

from vlmdistill.cli import console

COMMANDS = {
    "drafters": "train",
    "targets": "target show",
    "sets": "eval --bench",
    "recipes": "train --recipe",
}
"""By kind of name, the command that takes one."""
WIDTH = 3584  # of Qwen2.5-VL-7B
STATE_BYTES = 2 * WIDTH


def list_names(
    kind: Annotated[
        Literal["all", "drafters", "targets", "sets", "recipes"],
        typer.Argument(help="What to list."),
    ] = "all",
    as_json: console.Json = False,
) -> None:
    """List drafters, targets, evaluation sets and recipes, with what to choose one by."""
    kinds = [*LISTS] if kind == "all" else [kind]
    lists = {name: LISTS[name]() for name in kinds}
    if as_json:
        facts = {
            title: {name: asdict(entry) for name, entry in entries.items()}
            for title, entries in lists.items()
        }
        console.result(facts, as_json)
        return
    for number, (title, entries) in enumerate(lists.items()):
        if number:
            console.echo("")
        console.echo(f"{title}, for `vlmdistill {COMMANDS[title]}`")
        header = [field.name for field in fields(next(iter(entries.values())))]
        header = [name.replace("_", " ") for name in header]
        lines = [(name, *astuple(entry)) for name, entry in entries.items()]
        console.rows(("name", *header), lines)
    if "drafters" in lists:
        console.remark(_count())
        console.remark(
            f"bytes of a store in bfloat16, of a target of width {WIDTH} (7B); `vlmdistill target show` has "
            "those of each target"
        )


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter in the list."""

    variant_of: str
    paper: str
    trained: str
    served_by: str
    bytes_a_text_token: int
    bytes_a_visual_token: int
    good_for: str


@dataclass(frozen=True)
class Entry:
    """A target, evaluation set or recipe in its list."""

    about: str


def _drafters() -> Mapping[str, DrafterEntry]:
    from vlmdistill.drafters import catalogue

    entries = {}
    for name in sorted(catalogue.NAMES, key=_after_its_method):
        choice = catalogue.choice(name)
        of_text, of_visual = choice.states
        base = catalogue.base(name)
        entries[name] = DrafterEntry(
            variant_of="-" if base == name else base,
            paper=choice.paper,
            trained="yes" if catalogue.is_trained(name) else "no",
            served_by=choice.engine_names,
            bytes_a_text_token=STATE_BYTES * of_text,
            bytes_a_visual_token=STATE_BYTES * of_visual,
            good_for=choice.good_for,
        )
    return entries


def _after_its_method(name: str) -> tuple[str, bool, str]:
    """To sort drafters: variants follow their method."""
    from vlmdistill.drafters import catalogue

    base = catalogue.base(name)
    return base, name != base, name


def _count() -> str:
    """The number of methods that are trained, of others, and of variants."""
    from vlmdistill.drafters import catalogue

    untrained = len(catalogue.UNTRAINED)
    return (
        f"{len(catalogue.DRAFTERS) - untrained} methods to train, {untrained} without training, and "
        f"{len(catalogue.VARIANTS)} variants: a method with other settings and a name of its own"
    )


def _targets() -> Mapping[str, Entry]:
    from vlmdistill.pipelines.targets.checkpoints.folder import named_targets

    return {
        name: Entry(f"{target.family}, {target.origin}")
        for name, target in named_targets().items()
    }


def _sets() -> Mapping[str, Entry]:
    from vlmdistill.pipelines.data.prompts import evaluation_sets

    sets = {
        name: Entry(source.repository) for name, source in evaluation_sets.SETS.items()
    }
    demo = Entry("generated scenes and dialogues, for the demo targets")
    return {**sets, evaluation_sets.DEMO: demo}


def _recipes() -> Mapping[str, Entry]:
    from vlmdistill.drafters import catalogue

    return {name: Entry(recipe.about) for name, recipe in catalogue.RECIPES.items()}


LISTS: Mapping[str, Callable[[], Mapping[str, DrafterEntry | Entry]]] = {
    "drafters": _drafters,
    "targets": _targets,
    "sets": _sets,
    "recipes": _recipes,
}
