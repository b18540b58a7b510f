"""Whether sampled tokens follow the distribution of the target."""

import torch

from vlmdistill.pipelines.targets.generation import nucleus
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import Feature, Sample

HIDDEN = Feature("hidden", "text")


class Draws:
    """Sums over drawn tokens of what has mean zero if they are drawn as they should be, and its variance."""

    def __init__(
        self,
        target: VisionLanguageTarget,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> None:
        self.target, self.temperature, self.top_p, self.top_k = (
            target,
            temperature,
            top_p,
            top_k,
        )
        self.tokens, self.sums = 0, torch.zeros(2, 2)

    def add(self, sample: Sample, ids: list[int]) -> None:
        """Count the tokens of a response, whose states `sample` holds; none is of those that are left out."""
        hidden_ND = as_torch(sample.features[HIDDEN], "float32")
        ids_R = torch.tensor(ids)
        logits_RV = self.target.logits(hidden_ND[-len(ids_R) - 1 : -1])
        if self.top_k:
            least_R1 = logits_RV.topk(self.top_k).values[:, -1:]
            logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
        kept_RV = nucleus(logits_RV, self.temperature, self.top_p)
        logp_RV = (kept_RV / self.temperature).log_softmax(-1)
        p_RV = logp_RV.exp()
        drawn_R = p_RV.gather(1, ids_R[:, None])[:, 0]
        assert drawn_R.min() > 0
        known_RV = logp_RV.nan_to_num(neginf=0.0)
        mean_R = (p_RV * known_RV).sum(-1)
        spread_R = (p_RV * known_RV**2).sum(-1) - mean_R**2
        again_R = p_RV[1:].gather(1, ids_R[:-1, None])[:, 0]
        repeats = (ids_R[1:] == ids_R[:-1]).float() - again_R
        self.tokens += len(ids_R)
        self.sums += torch.tensor(
            [
                [float((drawn_R.log() - mean_R).sum()), float(spread_R.sum())],
                [float(repeats.sum()), float((again_R * (1 - again_R)).sum())],
            ]
        )

    @property
    def scores(self) -> torch.Tensor:
        """Of how likely the tokens are, and of how often one repeats the one before: standard deviations."""
        return self.sums[:, 0] / self.sums[:, 1].sqrt().clamp(min=1e-9)
