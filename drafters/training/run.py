"""A training run: its settings, its samples, and whether its folders hold another run."""

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
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.loader.epoch import select
from vlmdistill.stores.schema import Feature, content_hash
from vlmdistill.stores.store import Store


@dataclass(frozen=True)
class TrainingBudget:
    """The time that the steps of a run may take; see `training.budget`."""

    seconds: float
    of_cpu: bool = False
    """CPU seconds of all threads and ranks, in place of time by the clock."""

    @property
    def text(self) -> str:
        """The time in words."""
        if self.of_cpu:
            return f"{self.seconds:g} CPU seconds"
        return f"{self.seconds / 60:g} minutes"


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
    held_out: float = 0.02  # share of the samples that validate
    save_every: int = 200  # optimizer steps between checkpoints
    checkpoints: str | None = None
    """Folder or URL that gets a copy of each checkpoint."""
    trackers: tuple[str, ...] = ()
    """Trackers that get the figures of `metrics.jsonl`, too."""
    init: Path | None = None
    """Drafter or published checkpoint whose weights the run begins with."""
    budget: TrainingBudget | None = None
    """The time that has decided `config.training.steps`."""

    @property
    def state(self) -> Path:
        """The folder of the run's checkpoint and logs, next to the drafter's own folder."""
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def precision(self) -> str:
        """The dtype that the run computes in."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if torch.cuda.is_available() else "float32"

    def packing(self, world: int) -> tuple[int, int]:
        """The micro-batches of an optimizer step on each of `world` ranks, and the tokens of each."""
        tokens = self.config.training.batch_tokens
        micro_batches = ceil(tokens / (world * self.micro_tokens))
        return micro_batches, max(1, tokens // (world * micro_batches))

    @property
    def rank_options(self) -> dict[str, Any]:
        """Options that must be the same on all ranks and are none of the drafter's settings."""
        names = (
            "zero",
            "precision",
            "micro_tokens",
            "held_out",
            "save_every",
            "checkpoints",
        )
        budget = self.budget.text if self.budget else None
        return {"budget": budget} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class RunData:
    """The data of a run: the samples of each of its stages, and a hash that identifies the run."""

    store: Store
    needs: frozenset[Feature]
    samples: Sequence[DataSplit]  # by stage
    signature: str
    settings: dict[str, Any]
    """By name, the facts that the signature is a hash of, and `content`."""
    initial: Initial | None = None

    @classmethod
    def of(cls, run: Run) -> "RunData":
        """Open the store; TrainingError when it lacks what the drafter needs."""
        store = Store.open(run.store, run.cache)
        needs = check_features(store, run.config, run.drafter)
        samples = splits(run, store)
        _check_held_out(run, samples)
        initial = Initial.read(run.init, run.drafter) if run.init else None
        keys_by_stage = [sorted(stage.trained) for stage in samples]
        keys = {*chain.from_iterable(keys_by_stage)}
        settings = {
            "drafter": run.drafter,
            "seed": run.seed,
            **flat(run.config),
            "samples": f"{len(keys)} ({content_hash(keys_by_stage)})",
        }
        signed = [run.drafter, to_dict(run.config), run.seed, keys_by_stage]
        if initial:
            settings["init"] = initial.hash
            signed.append(initial.hash)
        if run.budget:
            settings["budget"] = run.budget.text
            signed.append(run.budget.text)
        settings["content"] = content_of(store, keys, needs)
        return cls(store, needs, samples, content_hash(signed), settings, initial)

    @cached_property
    def keys(self) -> list[str]:
        """All samples that any stage trains on."""
        return sorted({*chain.from_iterable(stage.trained for stage in self.samples)})

    @property
    def validating(self) -> int:
        """The number of samples that validate, of all stages together."""
        held_out = chain.from_iterable(stage.held_out for stage in self.samples)
        return len({*held_out})


def _check_held_out(run: Run, samples: Sequence[DataSplit]) -> None:
    """TrainingError if the run is to validate and has no samples for that."""
    if run.config.training.validate_every and samples and not samples[-1].held_out:
        raise TrainingError(
            f"validate_every needs validation samples, and at a share of {run.held_out:g} {run.store} has "
            "none: give a larger --validation-share"
        )


def check_features(
    store: Store, config: DrafterConfig, drafter: str
) -> frozenset[Feature]:
    """The features that a drafter reads of a store; TrainingError when the store lacks some of them."""
    needs = config.model.needs(store.info)
    missing = sorted(feature.name for feature in needs - {*store.features})
    if missing:
        raise TrainingError(
            f"{store.path} does not hold {', '.join(missing)}, which {drafter} needs: capture "
            f"them with `vlmdistill features --for {drafter} --store {store.path}`"
        )
    return needs


def content_of(
    store: Store, keys: Collection[str], features: Collection[Feature]
) -> str:
    """A hash of the target, and of the tokens and some features of some samples.

    The same samples may have been captured again, in another encoding or by another engine.
    """
    target = [store.provenance.config_hash, store.provenance.weights_hash]
    rows = select(store, None, keys).sort("key")
    arrays = tuple(sorted(f"xxh3.{feature.name}" for feature in features))
    columns = [name for name in sorted(rows.columns) if name.startswith(arrays)]
    checksums = {name: rows[name].to_list() for name in ("xxh3.tokens", *columns)}
    return content_hash([target, checksums])


def splits(run: Run, store: Store) -> list[DataSplit]:
    """The samples of each stage."""
    return [
        split(store, stage.view or run.view, run.config.training, run.held_out)
        for stage in run.config.schedule
    ]


def finished(run: Run, data: RunData) -> bool:
    """Whether the run is done; TrainingError when the folders hold another run, done or not."""
    if run.out.exists():
        _check_drafter(run, data, describe(run.out))
        return True
    _check_unfinished(run, data)
    return False


def _check_drafter(run: Run, data: RunData, description: Mapping[str, Any]) -> None:
    """TrainingError if the drafter in the run's folder is of another run."""
    training = description["training"]
    if training.get("signature") == data.signature:
        if training["content"] == data.settings["content"]:
            return
        raise TrainingError(
            f"{run.out} holds a drafter trained on another target, other features or other responses to "
            "the same prompts: give this one a --name of its own, or --force to replace it"
        )
    settings = {
        "drafter": description["drafter"],
        "seed": training.get("seed"),
        **flat(description["config"]),
        "init": training.get("init", {}).get("hash"),
        "budget": training.get("budget", {}).get("asked"),
    }
    compared = {name: data.settings[name] for name in data.settings if name in settings}
    differing = ranks.differences(compared, settings) or "other samples"
    raise TrainingError(
        f"{run.out} holds a drafter trained with other settings or data ({differing}): give "
        "this one a --name of its own, or --force to replace it"
    )


def _check_unfinished(run: Run, data: RunData) -> None:
    """TrainingError if the unfinished run in the run's folder is another one."""
    checkpoint = saved.read(run.state)
    if checkpoint is None:
        return
    same_content = checkpoint.settings.get("content") == data.settings["content"]
    if checkpoint.signature == data.signature and same_content:
        return
    differing = ranks.differences(data.settings, checkpoint.settings)
    raise TrainingError(
        f"an unfinished run in {run.state} has other settings or data ({differing}): repeat its settings to "
        "continue it, give this one a --name of its own, or --force to start over"
    )
