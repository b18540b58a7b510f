"""The start of a training loop of your own: a drafter on a store, its settings and its samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.initial import fresh
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.vocabulary import DraftVocabulary, columns_of
from vlmdistill.drafters.training import recipes
from vlmdistill.drafters.training.batches import DataSplit, occurrences, split
from vlmdistill.drafters.training.run import check_features, content_of
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store


@dataclass(frozen=True)
class NewDrafter:
    """A drafter before its training, and what `train` would train it with."""

    method: str
    store: Store
    drafter: Drafter
    """On the CPU, in float32."""
    config: DrafterConfig
    """`training`, the `schedule` of stages, `model` and `tree`."""
    samples: Sequence[DataSplit]
    """Of each stage: keys of samples with images (`visual`) and without (`text`), those `held_out`, and
    `draw`, which gives the samples of an epoch."""
    seed: int

    @property
    def keys(self) -> list[str]:
        """The keys of all samples to train on."""
        keys: set[str] = set()
        for stage in self.samples:
            keys.update(stage.trained)
        return sorted(keys)

    def save(self, folder: str | Path, *, steps: int) -> Path:
        """Write the drafter to a folder that `load_drafter`, `evaluate` and `export` take.

        Args:
            folder: Folder to write, such as `runs/demo/drafters/mine`; one that exists is replaced.
            steps: Optimizer steps that the drafter was trained for.

        Returns:
            The folder.

        Raises:
            TrainingError: It cannot be written; an earlier folder is then kept.
        """
        keys = self.keys
        sums: list[float] = []
        for weight in self.drafter.parameters():
            # One after the other: all weights in float64 may not fit.
            sums.append(float(weight.detach().double().sum()))
        facts = {
            "signature": content_hash([self.method, steps, self.seed, sums]),
            "content": content_of(
                self.store, keys, self.config.model.needs(self.store.info)
            ),
            "steps": steps,
            "saved_step": steps,
            "samples": len(keys),
            "seed": self.seed,
            "history": [],
        }
        provenance = self.store.provenance
        origin = checkpoint.Origin(provenance, self.config.training, facts, keys)
        checkpoint.save(self.drafter, self.method, Path(folder), origin)
        return Path(folder)


def new_drafter(
    method: str,
    store: Store,
    *,
    recipe: str = "paper",
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    validation_share: float = 0.02,
) -> NewDrafter:
    """Make a drafter to train on a store, with the weights and samples that `train` begins with.

    Args:
        method: Name of a method, such as `wren`.
        store: An open store; its copies of the target's embedding table and LM head are the drafter's.
        recipe: A recipe by name, or a file.
        settings: Settings over those of the recipe, such as `{"steps": 100}`.
        seed: Of the weights.
        validation_share: Share of the samples that are not trained on.

    Returns:
        The drafter, its settings and its samples.

    Raises:
        DataError: A name or a setting is unknown.
        TrainingError: The store lacks a feature that the drafter needs.

    Example:
        >>> new = vlmdistill.new_drafter("wren", store, recipe="demo")
        >>> optimizer = torch.optim.AdamW(new.drafter.parameters(), lr=1e-3)
    """
    texts = recipes.as_texts(settings or {})
    config = recipes.resolve(method, recipe, texts)
    check_features(store, config, method)
    samples = [
        split(store, stage.view or None, config.training, validation_share)
        for stage in config.schedule
    ]
    drafter = fresh(method, config, store, seed, store.info)
    new = NewDrafter(catalogue.base(method), store, drafter, config, samples, seed)
    if isinstance(drafter, DraftVocabulary) and columns_of(drafter) is not None:
        batch_tokens = config.training.batch_tokens
        reader = Epoch(store, (), keys=new.keys, token_budget=batch_tokens)
        drafter.choose_vocabulary(occurrences(reader, store.info.vocab_size))
    return new
