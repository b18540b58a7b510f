"""Initial weights of a run: fresh ones, or those of another drafter, ours or published, where they fit."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from msgspec.structs import replace
from safetensors import SafetensorError
from torch import Tensor

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import published
from vlmdistill.drafters.checkpoints.description import describe, trained_on
from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.settings import from_dict
from vlmdistill.drafters.core.vocabulary import check_columns
from vlmdistill.stores.errors import DataError, TrainingError, one_line
from vlmdistill.stores.schema import TargetInfo
from vlmdistill.stores.store import Store


def fresh(
    name: str,
    config: DrafterConfig,
    store: Store,
    seed: int,
    info: TargetInfo,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """A drafter with the weights that `seed` draws, on the tables in a store, which are put on `device`.

    `info` is that of the store, or the same with an `Initial`'s facts.
    """
    torch.manual_seed(seed)
    head = Head.of(store.head(), device, dtype)
    drafter = catalogue.trained(name)(config.model, info, head)
    drafter.tree = config.tree
    return drafter


@dataclass(kw_only=True)
class WarmStart:
    """What a drafter took from another one, and what it did not."""

    taken: list[str]
    """Weights, by their names here."""
    fresh: dict[str, str] = field(default_factory=dict)
    """Weights that begin as in any run -> why."""
    unused: dict[str, str] = field(default_factory=dict)
    """Tensors of the other drafter that are not used -> why."""
    zero: list[str] = field(default_factory=list)
    """Biases that begin at zero, since the other drafter has none."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings in which the two differ -> the value of the other drafter."""

    def lines(self) -> list[str]:
        """As text, a line for everything that was not simply taken."""
        lines = [f"{len(self.taken)} weights are taken: {', '.join(self.taken)}"]
        for name, reason in self.fresh.items():
            lines.append(f"{name} begins at its initial value: {reason}")
        for name in self.zero:
            lines.append(f"{name} begins at zero: the other drafter has no bias")
        for name, reason in self.unused.items():
            lines.append(f"{name} of the other drafter is not used: {reason}")
        for name, value in self.settings.items():
            lines.append(f"the other drafter has {name}={value}")
        return lines


@dataclass(frozen=True)
class Initial:
    """Another drafter, as a run may begin with it."""

    source: str
    hash: str
    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    facts: Mapping[str, float]
    """Facts of its layer that no weight shows: rotary base and epsilon of the norms."""
    checkpoint: published.Published | None = None
    """The published checkpoint that it was read from."""
    samples: frozenset[str] | None = None
    """The keys of what it was trained on; None: it does not name them."""

    @classmethod
    def read(cls, folder: Path, drafter: str) -> "Initial":
        """Read a drafter folder, or a published checkpoint as if it were of `drafter`."""
        if published.is_published(folder):
            return cls._read_published(folder, drafter)
        description = describe(folder)
        file = folder / "model.safetensors"
        try:
            paper = catalogue.config(description["drafter"])
            config = from_dict(paper, description["config"])
            info = TargetInfo.from_dict(description["target"])
            weights = read_weights(file)
            digest = blake3(max_threads=blake3.AUTO).update_mmap(file)
        except (OSError, SafetensorError, DataError, KeyError) as error:
            raise TrainingError(
                f"{folder} cannot begin a run ({one_line(error)})"
            ) from None
        facts = {"rope_theta": info.rope_theta, "rms_norm_eps": info.rms_norm_eps}
        digest.update(json.dumps(facts).encode())
        settings = {"drafter": description["drafter"], **vars(config.model)}
        return cls(
            str(folder),
            digest.hexdigest()[:16],
            weights,
            settings,
            facts,
            samples=trained_on(folder),
        )

    @classmethod
    def _read_published(cls, folder: Path, drafter: str) -> "Initial":
        checkpoint = published.read(folder, drafter)
        layer = checkpoint.layer
        return cls(
            str(folder),
            checkpoint.hash,
            checkpoint.weights,
            checkpoint.settings,
            {"rope_theta": layer.rope_theta, "rms_norm_eps": layer.rms_norm_eps},
            checkpoint=checkpoint,
        )

    def info(self, target: TargetInfo) -> TargetInfo:
        """The target's facts with those of this drafter's layer, with which its weights were trained."""
        return replace(target, **self.facts)

    def into(self, drafter: Drafter, name: str) -> WarmStart:
        """Give a drafter the weights that fit.

        TrainingError if no weight fits, if one is damaged, or if copies of the target's tensors in a
        published checkpoint show that it is of another target.
        """
        warm_start = self._compare(drafter, name)
        if not warm_start.taken:
            raise TrainingError(
                f"no weight of {self.source} fits {name}{_first_shapes(warm_start)}"
            )
        for key in warm_start.taken:
            if not torch.isfinite(self.weights[key].float()).all():
                raise TrainingError(
                    f"{self.source}: {key} holds values that are not finite"
                )
        state = drafter.state_dict()
        with torch.no_grad():
            for key in warm_start.taken:
                state[key].copy_(self.weights[key])
            for key in warm_start.zero:
                state[key].zero_()
        check_columns(self.source, drafter, drafter.info.vocab_size)
        if self.checkpoint:
            self._check_published(self.checkpoint, drafter, name, warm_start)
        return warm_start

    def _compare(self, drafter: Drafter, name: str) -> WarmStart:
        """Which weights of the drafter are there in the right shape, and which are not."""
        state = drafter.state_dict()
        fitting = [
            key
            for key in state
            if key in self.weights and self.weights[key].shape == state[key].shape
        ]
        warm_start = WarmStart(taken=fitting)
        for key, value in state.items():
            if key in fitting:
                continue
            if key in self.weights:
                shape = [*value.shape]
                other_shape = [*self.weights[key].shape]
                warm_start.fresh[key] = f"{shape} here, {other_shape} there"
            elif key.endswith(".bias") and f"{key[:-4]}weight" in fitting:
                warm_start.zero.append(key)
            else:
                warm_start.fresh[key] = "not there"
        for key in self.weights:
            if key not in state:
                warm_start.unused[key] = f"{name} has no such weight"
        config = vars(drafter.config)
        for key, setting in self.settings.items():
            if config.get(key, setting) != setting:
                warm_start.settings[key] = str(setting)
        return warm_start

    def _check_published(
        self,
        checkpoint: published.Published,
        drafter: Drafter,
        name: str,
        warm_start: WarmStart,
    ) -> None:
        """Compare its copies of the target's tensors; all other tensors without a counterpart are unused."""
        chosen = any(
            buffer in warm_start.taken for buffer, _ in drafter.named_buffers()
        )
        copies = published.check_copies(self.source, drafter, checkpoint, chosen=chosen)
        for key in sorted({*checkpoint.others} - {*copies}):
            warm_start.unused[key] = f"{name} has no such tensor"

    @property
    def keys(self) -> frozenset[str]:
        """`samples`, or a key of no prompt for what is not known of them."""
        if self.samples is None:
            return frozenset({f"unknown:{self.hash}"})
        return self.samples

    def record(self, warm_start: WarmStart) -> dict[str, Any]:
        """What a drafter's record says of it."""
        return {
            "from": self.source,
            "hash": self.hash,
            "facts": dict(self.facts),
            **asdict(warm_start),
        }


def _first_shapes(warm_start: WarmStart) -> str:
    """The first weight whose shape does not fit, as the end of an error."""
    for key, reason in warm_start.fresh.items():
        if "here" in reason:
            return f": {key} is {reason}"
    return ""
