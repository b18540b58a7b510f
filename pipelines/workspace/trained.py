"""A drafter of a workspace: its folder is looked up and its description read once, and passed on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import (
    describe,
    trained_on,
    weights_hash,
)
from vlmdistill.pipelines.workspace.workspace import Workspace


@dataclass(frozen=True)
class Trained:
    """A trained drafter, or a method that needs no training, which has no folder."""

    name: str
    folder: Path
    description: Mapping[str, Any]  # the folder's `config.json`

    @classmethod
    def open(cls, workspace: Workspace, name: str) -> "Trained":
        """Read a drafter's description.

        TrainingError when there is none, or it is invalid; DataError on an invalid name.
        """
        folder = workspace.drafter(name)
        return cls(name, folder, describe(folder))

    @classmethod
    def planned(cls, workspace: Workspace, name: str) -> "Trained":
        """As `open`; a method that is not trained yet has the settings of its paper."""
        folder = workspace.drafter(name)
        if folder.exists() or name not in catalogue.NAMES:
            return cls.open(workspace, name)
        from vlmdistill.drafters.core.settings import to_dict  # loads torch

        config = to_dict(catalogue.config(name))
        description = {"drafter": name, "config": config, "training": {}}
        return cls(name, folder, description)

    @property
    def method(self) -> str:
        """Its name in the catalogue."""
        return str(self.description["drafter"])

    @property
    def shaped(self) -> bool:
        """Whether a tree can be chosen for it; else it drafts a tree of its own."""
        return catalogue.load(self.method).shaped

    @cached_property
    def weights(self) -> str | None:
        """The SHA-256 of its weights; None if there are none or they cannot be read."""
        return weights_hash(self.folder)

    @cached_property
    def samples(self) -> frozenset[str] | None:
        """The keys of the samples that it was trained on; None if it does not list them."""
        return trained_on(self.folder)


def open_drafters(
    workspace: Workspace, names: Iterable[str], *, untrained: bool = False
) -> list[Trained]:
    """Drafters of a workspace, each once; errors as of `Trained.open`, or if `untrained` of `planned`."""
    read = Trained.planned if untrained else Trained.open
    return [read(workspace, name) for name in dict.fromkeys(names)]
