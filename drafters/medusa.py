"""Medusa -- Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024.

Idea: no separate drafter; heads on the target's last state each guess one later token, all at
once. Head n guesses x_{t+2+n} from h_t, since h_t itself gave x_{t+1}.
Differs from EAGLE by: no embedding, no attention, no KV cache: the guesses of a tree level do
not depend on the nodes above it, and a tree has at most as many levels as there are heads.
On images: as the ViSpec paper runs it. h_t already contains them; no visual position is stored
or read.

Shapes: N entries, R rows, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from vlmdistill.drafters.core import Drafter, Entries, Head, KVCache, Tree
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Range,
    Stage,
    TrainConfig,
    features,
    text_then_images,
)
from vlmdistill.drafters.core.serving import Feeding, ServedDrafter
from vlmdistill.stores.schema import Feature, TargetInfo


class Medusa(Drafter):
    """One residual block per guessed token, on the target's last state alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """As the ViSpec code runs it."""

        heads: Annotated[int, Range(1, 1000)] = 5
        """Tokens that it guesses: the hops of every stage, and the most levels of a tree."""

        @property
        def max_hops(self) -> int:
            """A token for each head."""
            return self.heads

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states."""
            return features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Medusa's losses, and the schedule with which the ViSpec paper trains it."""

        stages: tuple[Stage, ...] = text_then_images(
            3e-5, hop_decay=0.8, losses={"cross_entropy": 1.0}
        )

    tree = Tree(30, 3, 8)
    # None can be read: published heads have LM heads of their own.
    published_names: ClassVar[Mapping[str, str]] = {}
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.heads = nn.ModuleList()
        for _ in range(config.heads):
            self.heads.append(nn.Linear(info.hidden_size, info.hidden_size))
        for weight in self.heads.parameters():
            nn.init.zeros_(weight)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """Return the target's state h_t of the last committed token, at every hop."""
        return entries.tokens.wanted(entries.hidden_ND)

    def estimate(self, state_ND: Tensor, hop: int) -> Tensor:
        """Section 2.1.1: h + SiLU(W h + b), the estimate of the state `hop` + 1 tokens later."""
        guess_ND: Tensor = self.heads[hop](state_ND)
        return state_ND + nn.functional.silu(guess_ND)

    def published(self) -> ServedDrafter:
        """As vLLM's Medusa reads it, but for the LM head, which is the target's."""
        count = len(self.heads)
        weights: dict[str, Tensor] = {}
        for number, head in enumerate(self.heads):
            for name, weight in head.named_parameters():
                weights[f"blocks.{number}.layers.0.{name}"] = weight
        settings = {
            "architectures": ["MedusaVlmdistill"],
            "model_type": "medusa",
            "hidden_size": self.info.hidden_size,
            "vocab_size": self.info.vocab_size,
            "num_heads": count,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
        }
        feeding = Feeding(drafter="medusa", visual="unread", draft_tokens=count)
        return ServedDrafter(
            settings,
            weights,
            feeding,
            # vLLM knows it by `model_type`; its method "medusa" fails on targets with images.
            "draft_model",
            draft_vocabulary=self.info.vocab_size,
        )
