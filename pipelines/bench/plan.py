"""The plan of an evaluation: its prompts, its drafters, and what is known of both before any decodes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import polars as pl

from vlmdistill.drafters.checkpoints.description import weights_hash
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench.leaks import leaks
from vlmdistill.pipelines.bench.records import Leak, TrainedSettings, Training
from vlmdistill.pipelines.bench.settings import Settings, trees_of
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, Prompts
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.software import Software, of_this_process
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.schema import content_hash

SEARCH_PROMPTS = 32  # at most, of a search for the fastest tree


@dataclass(frozen=True)
class _Provenance:
    """What an evaluation reads of the provenance of a drafter's features."""

    thinking: Thinking = ""


@dataclass(frozen=True)
class Description:
    """The parts of a drafter's `config.json` that are copied into the record of its evaluation."""

    drafter: str
    config: TrainedSettings
    training: Training = field(default_factory=Training)
    provenance: _Provenance | None = None

    @classmethod
    def of(cls, drafter: Trained) -> "Description":
        """TrainingError if some of it is missing or invalid."""
        try:
            return msgspec.convert(drafter.description, cls)
        except msgspec.ValidationError as error:
            raise TrainingError(
                f"{drafter.folder / 'config.json'} is not a drafter ({error}): train it again"
            ) from None


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What an evaluation decodes, and what its records say before anything is decoded."""

    workspace: Workspace
    settings: Settings  # as stated, or with the reasoning of the drafters' training
    title: str
    prompts_file: Path
    prompts: Sequence[Prompt]
    asked: tuple[str, ...]  # keys that must be measured, to audit those that are
    drafters: Sequence[Trained]
    described: dict[str, Description]  # by drafter
    weights_of: dict[str, str | None]  # hashes by drafter, from before they are loaded
    leak_of: dict[str, Leak | None]  # by drafter
    software: Software

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        drafters: Sequence[Trained],
        settings: Settings,
        prompts_file: Path | None,
        title: str,
    ) -> "EvaluationPlan":
        """DataError if there are no prompts, TrainingError if the `config.json` of a drafter is invalid."""
        # First: packages may be updated during the evaluation.
        software = of_this_process()
        file = prompts_file or workspace.prompts
        chosen = held_out(file, settings.limit, workspace.model)
        # Not from `chosen`: the audit shall notice if a prompt was lost on the way.
        listed = prompt_table.load(file, workspace.model, "eval").facts["key"].sort()
        described = {drafter.name: Description.of(drafter) for drafter in drafters}
        return cls(
            workspace=workspace,
            settings=settings.trained_as(trained_thinking(described)),
            title=title,
            prompts_file=file,
            prompts=chosen,
            asked=tuple(listed[: settings.limit].to_list()),
            drafters=drafters,
            described=described,
            weights_of={drafter.name: drafter.weights for drafter in drafters},
            leak_of=leaks(workspace, drafters, chosen),
            software=software,
        )

    @cached_property
    def search_prompts(self) -> list[Prompt]:
        """Some prompts that are not evaluated, to search for a tree.

        They are of one file and split, the first that has any: of the evaluated file, then of the workspace,
        the held-out ones before the others. DataError if there are none.
        """
        evaluated = pl.Series([prompt.key for prompt in self.prompts])
        workspace = self.workspace
        files = dict.fromkeys((self.prompts_file, workspace.prompts))  # often the same
        for file in files:
            for split in ("eval", "all"):
                with suppress(DataError):  # the file has no prompts of this split
                    loaded = prompt_table.load(file, workspace.model, split)
                    others = loaded.without(evaluated)
                    if len(others):
                        return _first(others, SEARCH_PROMPTS)
        raise DataError(
            f"--tree auto needs prompts that are not evaluated, and all {len(evaluated)} are: give a lower "
            "--limit, or import more"
        )


def require_same_weights(drafters: Iterable[Trained]) -> None:
    """TrainingError if the weights of a drafter are others than those that were hashed at first."""
    for drafter in drafters:
        if weights_hash(drafter.folder) != drafter.weights:
            raise TrainingError(
                f"{drafter.name} was trained again while it was loaded: run the same command again"
            )


def settings_hash(drafter: Trained) -> str:
    """A hash of its settings and data, without seed and number of steps: equal for seeds of one method."""
    description = drafter.description
    settings = {**description["config"]}
    settings.pop("steps", None)  # of a time budget, each seed has its own
    return content_hash([settings, description.get("training", {}).get("content")])


def trained_thinking(described: dict[str, Description]) -> dict[str, Thinking]:
    """By drafter, the reasoning of its training; drafters that need no training are left out."""
    return {
        name: description.provenance.thinking
        for name, description in described.items()
        if description.provenance
    }


def held_out(file: Path, limit: int, model: str = "M") -> list[Prompt]:
    """The first `limit` prompts of the eval split, in order of their keys; DataError if there are none.

    `model` is the target that the error names.
    """
    return _first(prompt_table.load(file, model, "eval"), limit)


def _first(prompts: Prompts, count: int) -> list[Prompt]:
    """The first `count` prompts in order of their keys."""
    rows = prompts.facts["key"].arg_sort()[:count]
    return [prompts[int(row)] for row in rows]


def oversized_trees(drafters: Iterable[Trained], settings: Settings) -> list[str]:
    """A warning for each tree that drafts more tokens in a row than a response can have after its first."""
    room = settings.max_new_tokens - 1
    warnings: dict[str, str] = {}
    for drafter in drafters:
        if not drafter.shaped:
            continue
        drafter_tree = Description.of(drafter).config.tree
        for tree in settings.trees or trees_of([drafter_tree]):
            if not isinstance(tree, Tree):  # `auto`
                continue
            levels = tree.depth + 1  # `depth` levels follow the first one
            if levels > room:
                warnings[str(tree)] = (
                    f"tree {tree} drafts {levels} tokens in a row, and a response of "
                    f"--max-new-tokens {settings.max_new_tokens} has {room} after its first: the rest is "
                    "drafted in vain"
                )
    return list(warnings.values())
