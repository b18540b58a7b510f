"""Agreement with the target on validation samples, which tells how well a drafter will draft.

Shapes: H hops, R rows of a batch.
"""

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import DrafterConfig, Stage
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.batches import BatchSource
from vlmdistill.drafters.training.deepspeed_engine import Engine
from vlmdistill.drafters.training.saved import HeldOut

PROBE_HOPS = 5
"""Agreement is measured for at least so many hops, whatever the stage trains."""


def measure(
    engine: Engine,
    source: BatchSource,
    keys: Sequence[str],
    config: DrafterConfig,
    stage: Stage,
    step: int,
) -> HeldOut:
    """Measure the drafter on validation samples, with the losses of a stage.

    The predicted tau is that of the longest chain in the drafter's tree: one token of the target, and each
    drafted one with the share of rows that agree up to there.
    """
    most_hops = config.model.max_hops or sys.maxsize
    chain = min(config.tree.depth + 1, most_hops)
    hops = max(chain, min(PROBE_HOPS, most_hops))
    probe = Stage(name="probe", hops=hops, anchors=stage.anchors, losses=stage.losses)
    batches = (source.batch(samples) for samples in source.epoch(keys) if samples)
    sums_3H = agreement(engine, batches, probe, source.device)
    agree_H, count_H, accepted_H = ranks.total(sums_3H)
    count_H = count_H.clamp(min=1)
    return HeldOut(
        stage=stage.name,
        step=step,
        held_out_agreement=(agree_H / count_H)[:PROBE_HOPS].tolist(),
        predicted_tau=1 + float((accepted_H / count_H)[:chain].sum()),
    )


@torch.no_grad()
def agreement(
    engine: Engine, batches: Iterable[Batch], probe: Stage, device: torch.device
) -> Tensor:
    """By hop, the rows that agree with the target, that count, and that agree at all hops so far: [3, H].

    Whole numbers, so that their sums are the same on all ranks, and all ranks decide the same.
    """
    sums_3H = torch.zeros(3, probe.hops, dtype=torch.float64, device=device)
    engine.eval()
    for batch in batches:
        scores = engine(batch, probe).scores
        count_HR = torch.stack([score.count_R for score in scores])
        agree_HR = torch.stack([score.agree_R for score in scores]) & count_HR
        accepted_HR = agree_HR.cumprod(0).bool()
        sums_3H += torch.stack([agree_HR, count_HR, accepted_HR]).sum(-1)
    engine.train()
    return sums_3H
