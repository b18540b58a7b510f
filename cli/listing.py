"""`vlmdistill list`: what can be named in commands."""

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from vlmdistill.cli import console

USED = {
    "drafters": "train",
    "targets": "target show",
    "sets": "eval --bench",
    "recipes": "train --recipe",
}


def list_names(
    what: Annotated[
        Literal["all", "drafters", "targets", "sets", "recipes"],
        typer.Argument(help="What to list."),
    ] = "all",
    as_json: console.Json = False,
) -> None:
    """List drafters, targets, evaluation sets and recipes, with a line on each."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.pipelines.data.prompts import evaluation_sets
    from vlmdistill.pipelines.targets.checkpoints.folder import named_targets

    def targets() -> dict[str, str]:
        return {
            name: f"{target.family}, {target.origin}"
            for name, target in named_targets().items()
        }

    def sets() -> dict[str, str]:
        sources = {name: one.repository for name, one in evaluation_sets.SETS.items()}
        return {
            **sources,
            evaluation_sets.DEMO: "generated scenes and dialogues, for the demo targets",
        }

    lists: dict[str, Callable[[], dict[str, str]]] = {
        "drafters": lambda: {name: catalogue.about(name) for name in catalogue.NAMES},
        "targets": targets,
        "sets": sets,
        "recipes": lambda: {name: one.about for name, one in catalogue.RECIPES.items()},
    }
    chosen = {name: make() for name, make in lists.items() if what in ("all", name)}
    if as_json:
        console.result(chosen, as_json)
        return
    width = max(len(name) for names in chosen.values() for name in names)
    for number, (kind, names) in enumerate(chosen.items()):
        console.echo(
            ("\n" if number else "") + f"{kind}, for `vlmdistill {USED[kind]}`"
        )
        for name, about in names.items():
            console.echo(f"  {name:<{width}}  {about}")
