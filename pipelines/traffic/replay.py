"""Draft again over the responses of the store, and keep there where the target would have rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training import replay as drafting
from vlmdistill.drafters.training.replay import Walk
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.store import Store


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay found."""

    drafter: str
    run: str  # under which name the store has it
    samples: int
    tau: float  # tokens for each call of the target, over all samples
    rejected: int  # cycles that the target cut short


def replay(
    folder: Path, store: Store, view: str | None = None, report: Progress = silent
) -> Replayed:
    """Draft the responses of a view again with the drafter in a folder, as the run `<name>.replay`.

    TrainingError if it needs no training, is another target's, or needs features that the store lacks.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = Head.of(store.head(), device, dtype)
    drafter = checkpoint.load(folder, head, store.info, provenance=store.provenance)
    if not isinstance(drafter, Drafter):
        raise TrainingError(f"{folder.name} is not trained: there is nothing to replay")
    rows = store.view(view).select("key", "response_tokens").iter_rows()
    keys = [key for key, tokens in rows if tokens > 1]
    if not keys:
        raise TrainingError(
            f"{store.path} has no samples to replay{f' in the view {view}' if view else ''}"
        )
    walks = list(_reported(drafting.replay(drafter, store, keys), keys, report))
    run = f"{folder.name}{drafting.RUN}"
    store.write_stats(run, drafting.table(walks))
    calls, accepted = (
        sum(getattr(one, name) for _, one in walks) for name in ("calls", "accepted")
    )
    rejected = sum(len(one.rejected) for _, one in walks)
    return Replayed(
        drafter=folder.name,
        run=run,
        samples=len(walks),
        tau=(calls + accepted) / max(1, calls),
        rejected=rejected,
    )


def _reported(
    walks: Iterator[tuple[str, Walk]], keys: Sequence[str], report: Progress
) -> Iterator[tuple[str, Walk]]:
    for done, one in enumerate(walks, 1):
        report(done, len(keys), "")
        yield one
