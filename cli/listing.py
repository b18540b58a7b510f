"""`vlmdistill list`: what can be named in commands."""

from collections.abc import Callable
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


def list_names(
    kind: Annotated[
        Literal["all", "drafters", "targets", "sets", "recipes"],
        typer.Argument(help="What to list."),
    ] = "all",
    as_json: console.Json = False,
) -> None:
    """List drafters, targets, evaluation sets and recipes, with a line on each."""
    kinds = [*LISTS] if kind == "all" else [kind]
    lists = {name: LISTS[name]() for name in kinds}
    if as_json:
        console.result(lists, as_json)
        return
    width = max(len(name) for names in lists.values() for name in names)
    for number, (title, names) in enumerate(lists.items()):
        if number:
            console.echo("")
        console.echo(f"{title}, for `vlmdistill {COMMANDS[title]}`")
        for name, description in names.items():
            console.echo(f"  {name:<{width}}  {description}")


def _drafters() -> dict[str, str]:
    from vlmdistill.drafters import catalogue

    return {name: catalogue.about(name) for name in catalogue.NAMES}


def _targets() -> dict[str, str]:
    from vlmdistill.pipelines.targets.checkpoints.folder import named_targets

    return {
        name: f"{target.family}, {target.origin}"
        for name, target in named_targets().items()
    }


def _sets() -> dict[str, str]:
    from vlmdistill.pipelines.data.prompts import evaluation_sets

    sets = {name: source.repository for name, source in evaluation_sets.SETS.items()}
    sets[evaluation_sets.DEMO] = "generated scenes and dialogues, for the demo targets"
    return sets


def _recipes() -> dict[str, str]:
    from vlmdistill.drafters import catalogue

    return {name: recipe.about for name, recipe in catalogue.RECIPES.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "drafters": _drafters,
    "targets": _targets,
    "sets": _sets,
    "recipes": _recipes,
}
