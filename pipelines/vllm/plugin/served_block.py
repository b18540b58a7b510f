"""DSpark as a model of vLLM, with what an exported drafter needs besides."""

from collections.abc import Iterable

from torch import Tensor
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from vlmdistill.drafters.core.serving import KEY


class DSparkVlmdistill(Qwen3DSparkForCausalLM):
    """vLLM's DSpark, with the learned mask of an exported drafter; other folders run as in vLLM."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a folder; ours may have a mask, which is empty where the masks have a token's embedding."""
        every = dict(weights)
        mask_D = every.pop(KEY, None)
        super().load_weights(every.items())
        if mask_D is not None and len(mask_D):
            self.model.mask_embedding.data.copy_(mask_D)
            self.model.has_separate_mask_embedding = True
