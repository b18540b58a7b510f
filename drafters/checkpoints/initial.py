"""What a run begins with: fresh weights, or those of another drafter, ours or published, where they fit."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from vlmdistill.drafters.core.config import DrafterConfig, ModelConfig
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
    drafter = catalogue.trained(name)(
        config.model, info, Head.of(store.head(), device, dtype)
    )
    drafter.tree = config.tree
    return drafter


@dataclass(frozen=True)
class Taken:
    """What a drafter took from another one, and what it did not."""

    taken: list[str]
    """Weights, by their names here."""
    fresh: dict[str, str]
    """Weights that begin as in any run -> why."""
    unused: dict[str, str]
    """Tensors of the other drafter that are not used -> why."""
    zero: list[str]
    """Biases that begin at zero, since the other drafter has none."""
    settings: dict[str, str]
    """Settings in which the two differ: theirs."""

    def lines(self) -> list[str]:
        """As text, a line for everything that was not simply taken."""
        lines = [f"{len(self.taken)} weights are taken: {', '.join(self.taken)}"]
        lines += [
            f"{name} begins at its initial value: {why}"
            for name, why in self.fresh.items()
        ]
        lines += [
            f"{name} begins at zero: the other drafter has no bias"
            for name in self.zero
        ]
        lines += [
            f"{name} of the other drafter is not used: {why}"
            for name, why in self.unused.items()
        ]
        return lines + [
            f"the other drafter has {name}={value}"
            for name, value in self.settings.items()
        ]


@dataclass(frozen=True)
class Initial:
    """Another drafter, as a run may begin with it."""

    source: str
    hash: str
    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    facts: Mapping[str, float]
    """Facts of its layer that no weight shows: rotary base and epsilon of the norms."""
    theirs: published.Published | None = None
    """The published checkpoint that it was read from."""
    samples: frozenset[str] = frozenset()
    """The keys of what it was trained on, as far as it names them."""

    @classmethod
    def read(cls, folder: Path, drafter: str) -> "Initial":
        """Read a drafter folder, or a published checkpoint as if it were of `drafter`."""
        if published.is_published(folder):
            found = published.read(folder, drafter)
            facts = {
                "rope_theta": found.layer.rope_theta,
                "rms_norm_eps": found.layer.rms_norm_eps,
            }
            return cls(
                str(folder), found.hash, found.weights, found.settings, facts, found
            )
        description = describe(folder)
        file = folder / "model.safetensors"
        try:
            config = from_dict(
                catalogue.config(description["drafter"]), description["config"]
            )
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
        samples = trained_on(folder) or frozenset()
        return cls(
            str(folder),
            digest.hexdigest()[:16],
            weights,
            settings,
            facts,
            samples=samples,
        )

    def info(self, target: TargetInfo) -> TargetInfo:
        """The target's facts with those of this drafter's layer, with which its weights were trained."""
        return replace(target, **self.facts)

    def into(self, drafter: Drafter, name: str) -> Taken:
        """Give a drafter the weights that fit; TrainingError if there are none, or if they are damaged.

        Also if a published checkpoint's copies of the target's tensors show that it is of another target.
        """
        state = drafter.state_dict()
        taken = [
            key
            for key in state
            if key in self.weights and self.weights[key].shape == state[key].shape
        ]
        fresh, unused, zero = dict[str, str](), dict[str, str](), list[str]()
        for key, value in state.items():
            if key in taken:
                continue
            if key in self.weights:
                fresh[key] = (
                    f"{[*value.shape]} here, {[*self.weights[key].shape]} there"
                )
            elif key.endswith(".bias") and f"{key[:-4]}weight" in taken:
                zero.append(key)
            else:
                fresh[key] = "not there"
        unused |= {
            key: f"{name} has no such weight"
            for key in self.weights
            if key not in state
        }
        if not taken:
            why = next(
                (f": {key} is {text}" for key, text in fresh.items() if "here" in text),
                "",
            )
            raise TrainingError(f"no weight of {self.source} fits {name}{why}")
        broken = [
            key for key in taken if not torch.isfinite(self.weights[key].float()).all()
        ]
        if broken:
            raise TrainingError(
                f"{self.source}: {broken[0]} holds values that are not finite"
            )
        with torch.no_grad():
            for key in taken:
                state[key].copy_(self.weights[key])
            for key in zero:
                state[key].zero_()
        check_columns(self.source, drafter, drafter.info.vocab_size)
        if found := self.theirs:
            chosen = any(buffer in taken for buffer, _ in drafter.named_buffers())
            copies = published.check_copies(self.source, drafter, found, chosen=chosen)
            unused |= dict.fromkeys(
                sorted({*found.others} - {*copies}), f"{name} has no such tensor"
            )
        return Taken(taken, fresh, unused, zero, self._differing(drafter.config))

    def record(self, taken: Taken) -> dict[str, Any]:
        """What a drafter's record says of it."""
        return {
            "from": self.source,
            "hash": self.hash,
            "facts": dict(self.facts),
            **asdict(taken),
        }

    def _differing(self, config: ModelConfig) -> dict[str, str]:
        mine = vars(config)
        return {
            key: str(value)
            for key, value in self.settings.items()
            if mine.get(key, value) != value
        }
