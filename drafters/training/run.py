"""A training run: its settings, its samples, and how far it has come on disk."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.initial import Initial
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.settings import flat, to_dict
from vlmdistill.drafters.training import ranks, saved
from vlmdistill.drafters.training.batches import DataSplit, split
from vlmdistill.drafters.training.saved import Saved
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.loader.epoch import select
from vlmdistill.stores.schema import Feature, content_hash
from vlmdistill.stores.store import Store

LATER = (
    "attention_window",
    "cell",
    "validate_every",
    "patience",
    "anchors",
    "pace",
)
"""Settings that came later, of a model, a run or its stages: left out of the signature when unset, so that
runs of earlier versions keep theirs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: the drafter, its settings, the data, and the folder to write."""

    drafter: str
    config: DrafterConfig
    store: str  # a folder or a URL
    cache: str | None = None  # DIR:SIZE, for a URL
    out: Path
    view: str | None = None
    seed: int = 0
    zero: int = 0
    dtype: str = "auto"  # bfloat16 on a GPU, float32 on a CPU
    micro_tokens: int = 8192  # tokens of one forward pass on one rank
    held_out: float = 0.02  # share of samples kept apart to measure agreement on
    save_every: int = 200  # optimizer steps between checkpoints
    checkpoints: str | None = (
        None  # a folder or URL that gets a copy of each checkpoint
    )
    trackers: tuple[str, ...] = ()  # that get the figures of `metrics.jsonl`, too
    init: Path | None = (
        None  # the drafter or published checkpoint whose weights it begins with
    )

    @property
    def state(self) -> Path:
        """The folder of the run's checkpoint and logs, next to the drafter's own folder."""
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def precision(self) -> str:
        """The dtype that the run computes in."""
        automatic = "bfloat16" if torch.cuda.is_available() else "float32"
        return automatic if self.dtype == "auto" else self.dtype

    def packing(self, world: int) -> tuple[int, int]:
        """The micro-batches of an optimizer step on each of `world` ranks, and the tokens of each."""
        tokens = self.config.training.batch_tokens
        micro = ceil(tokens / (world * self.micro_tokens))
        return micro, max(1, tokens // (world * micro))

    @property
    def how(self) -> dict[str, Any]:
        """How it runs, which is the same on all ranks."""
        named = (
            "zero",
            "precision",
            "micro_tokens",
            "held_out",
            "save_every",
            "checkpoints",
        )
        return {name: getattr(self, name) for name in named}


@dataclass(frozen=True)
class RunData:
    """What a run reads: the samples of each of its stages, and a hash that identifies the run."""

    store: Store
    needs: frozenset[Feature]
    samples: Sequence[DataSplit]
    signature: str
    settings: dict[str, Any]  # what the signature is a hash of, by name, and `content`
    initial: Initial | None = None

    @classmethod
    def of(cls, run: Run) -> "RunData":
        """Open the store; TrainingError when it lacks what the drafter needs."""
        store = Store.open(run.store, run.cache)
        needs = check_features(store, run.config, run.drafter)
        samples = splits(run, store)
        if run.config.training.validate_every and samples and not samples[-1].held_out:
            raise TrainingError(
                f"validate_every needs held-out samples, and at a share of {run.held_out:g} {run.store} has "
                "none: hold out more with --held-out"
            )
        keys = [sorted([*one.visual, *one.text]) for one in samples]
        settings = {"drafter": run.drafter, "seed": run.seed, **flat(run.config)}
        settings["samples"] = (
            f"{len({*chain.from_iterable(keys)})} ({content_hash(keys)})"
        )
        config = _known(to_dict(run.config))
        config["stages"] = [*map(_known, config["stages"])]
        initial = Initial.read(run.init, run.drafter) if run.init else None
        if initial:
            settings["init"] = initial.hash
        begins = [initial.hash] if initial else []
        signature = content_hash([run.drafter, config, run.seed, keys, *begins])
        settings["content"] = content_of(store, list(chain.from_iterable(keys)))
        return cls(store, needs, samples, signature, settings, initial)

    @cached_property
    def keys(self) -> list[str]:
        """All samples that any stage trains on."""
        return sorted({key for one in self.samples for key in (*one.visual, *one.text)})


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, without the members of `LATER` that are unset."""
    return {name: value for name, value in values.items() if value or name not in LATER}


def check_features(
    store: Store, config: DrafterConfig, drafter: str
) -> frozenset[Feature]:
    """What a drafter reads of a store; TrainingError when the store lacks some of it."""
    needs = config.model.needs(store.info)
    if missing := sorted(feature.name for feature in needs - {*store.features}):
        raise TrainingError(
            f"{store.path} does not hold {', '.join(missing)}, which {drafter} needs: capture "
            f"them with `vlmdistill features --for {drafter} --store {store.path}`"
        )
    return needs


def content_of(store: Store, keys: Collection[str]) -> str:
    """A hash of the target and of the tokens of some samples."""
    target = [store.provenance.config_hash, store.provenance.weights_hash]
    return content_hash(
        [target, select(store, None, keys).sort("key")["xxh3.tokens"].to_list()]
    )


def splits(run: Run, store: Store) -> list[DataSplit]:
    """The samples of each stage."""
    return [
        split(store, stage.view or run.view, run.config.training, run.held_out)
        for stage in run.config.schedule
    ]


def finished(run: Run, data: RunData) -> bool:
    """Whether the run is done; TrainingError when the folders hold another run, done or not."""
    if run.out.exists():
        description = describe(run.out)
        done = description.get("training", {})
        if done.get("signature") == data.signature:
            if (
                done.get("content", data.settings["content"])
                == data.settings["content"]
            ):
                return True
            raise TrainingError(
                f"{run.out} holds a drafter trained on another target or on other responses to the same "
                "prompts: give this one a --name of its own, or --force to replace it"
            )
        theirs = {
            "drafter": description["drafter"],
            "seed": done.get("seed"),
            **flat(description["config"]),
        }
        theirs["init"] = done.get("init", {}).get("hash")
        odd = ranks.differences(
            {name: value for name, value in data.settings.items() if name in theirs},
            theirs,
        )
        raise TrainingError(
            f"{run.out} holds a drafter trained with other settings or data ({odd or 'other samples'}): give "
            "this one a --name of its own, or --force to replace it"
        )
    found = saved.read(run.state)
    mine = data.signature, data.settings["content"]
    if found is not None and mine != (
        found.signature,
        found.settings.get("content", mine[1]),
    ):
        odd = ranks.differences(data.settings, found.settings)
        raise TrainingError(
            f"an unfinished run in {run.state} has other settings or data ({odd}): repeat its settings to "
            "continue it, give this one a --name of its own, or --force to start over"
        )
    return False


def furthest(run: Run, data: RunData) -> tuple[Saved | None, int]:
    """The run's last checkpoint, if any, and the rank whose disk holds it.

    Without a shared disk, that is an earlier rank 0, which may have another number now.
    """
    try:
        here = saved.read(run.state)
    except (
        TrainingError
    ):  # damaged: rank 0 has stopped before this; other ranks ignore theirs
        here = None
    found = [
        one if one and one.signature == data.signature else None
        for _, one in ranks.of_each(here)
    ]
    steps = [one.position.total if one else 0 for one in found]
    source = steps.index(max(steps))
    return found[source], source
