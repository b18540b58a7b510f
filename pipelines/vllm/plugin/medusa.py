"""Medusa's heads as a model of vLLM, up to 0.32: later versions have no such drafters.

Shapes: N rows of a step, D hidden, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models import supports_multimodal
from vllm.model_executor.models.medusa import ResidualBlock
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.spec_decode.medusa import MedusaProposer

from vlmdistill.pipelines.vllm.plugin.limits import feeding_of
from vlmdistill.pipelines.vllm.plugin.served_model import load_all


class ServedMedusaProposer(MedusaProposer):
    """vLLM's proposer, which gives exported heads the target's LM head."""

    def load_model(self, target_model: Any) -> None:
        """Load the heads."""
        super().load_model(target_model)
        if feeding_of(self.vllm_config) is not None:
            language = target_model
            if supports_multimodal(target_model):
                language = target_model.get_language_model()
            self.model.head = (language.lm_head,)


class MedusaVlmdistill(nn.Module):
    """Medusa's heads, with the target's LM head, which `ServedMedusaProposer` sets."""

    head: tuple[nn.Module]
    """In a tuple, so that it is no part of the drafter, whose weights another version replaces."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        # vLLM has set `num_heads` to the number of drafted tokens.
        self.blocks = nn.ModuleList(
            ResidualBlock(config, config.hidden_size, 1)
            for _ in range(config.num_heads)
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        """An estimate of the target's state for each guess, [N, D]."""
        return [block(hidden_states) for block in self.blocks]

    def compute_logits(self, hidden_states: list[Tensor]) -> list[Tensor]:
        """Scores of each guess, [N, V]."""
        (head,) = self.head
        return [
            self.logits_processor(head, estimate_ND) for estimate_ND in hidden_states
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the heads that are used; ValueError when the folder lacks one."""
        names = {name for name, _ in self.named_parameters()}
        used = ((name, weight) for name, weight in weights if name in names)
        load_all(self, used, WeightsMapper())
