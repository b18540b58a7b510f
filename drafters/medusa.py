"""Medusa -- Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024.

Idea: no drafter beside the target; heads on its last state each guess the token one place further on, all at
once. Head n guesses from h_t the token x_{t+2+n}, since h_t itself gave x_{t+1}.
Differs from EAGLE by: nothing is drafted from what was drafted (no embedding, no attention, no memory): every
guess of a level is the same whatever stands above it, and there are no more levels than heads.
Adapted to images as the ViSpec paper does: h_t has taken them in, so that no visual position is stored or
read; the head's output goes through the target's frozen LM head (the original has an LM head per Medusa
head); the tree is EAGLE-2's and verification exact (the original's typical acceptance is lossy).
Departs from ViSpec's code in: head n learns the token n places on (the code gives every head the target of
the first); bias and weight both start at zero, so that an untrained head is the target's own (the code's
bias is random); `tree.depth` is obeyed (the code has as many levels as heads).
Where the ViSpec paper (3 heads) and its code (5) differ: 5, for the paper's tree 30-3-8 has four levels.
Losses are the original's, cross-entropy with head n weighed by 0.8^n, against the target's distribution where
the original has hard labels. ViSpec's code has EAGLE's, which mostly regress the target's state: heads that
start as the identity then hardly leave it (docs/methods.md).

Shapes: E entries, R rows, D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from vlmdistill.drafters.base import Drafter, DrafterConfig, Entries, Head, Stage, Tree, at_least
from vlmdistill.drafters.losses import Rows, Score, score
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class Medusa(Drafter):
    """One residual block per place ahead, on the target's last state alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: those under which the ViSpec paper and code train and run it."""

        heads: int = 5
        """How many places ahead it guesses: the hops of every stage, and the most levels of a tree."""
        tree: Tree = Tree(30, 3, 8)
        stages: tuple[Stage, ...] = (
            Stage(
                name="text",
                epochs=20,
                visual=(0, 0),
                learning_rate=3e-5,
                losses={"cross_entropy": 1.0},
                hop_decay=0.8,
            ),
            Stage(
                name="multimodal",
                epochs=20,
                visual=(1, 1),
                learning_rate=3e-5,
                losses={"cross_entropy": 1.0},
                hop_decay=0.8,
            ),
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 1, "heads")

        @property
        def schedule(self) -> tuple[Stage, ...]:
            """The stages, each training all heads."""
            return tuple(replace(stage, hops=self.heads) for stage in self.stages)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states."""
        return frozenset({Feature("hidden", "text")})

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.heads = nn.ModuleList(nn.Linear(info.hidden_size, info.hidden_size) for _ in range(config.heads))
        for weight in self.heads.parameters():
            nn.init.zeros_(weight)
        self.max_hops = config.heads

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Hand on the target's state h_t of the last certain token, whatever has been drafted since."""
        rows_R = entries.places.rows_R
        return entries.hidden_ND if rows_R is None else entries.hidden_ND[rows_R]

    def ahead(self, state_ND: Tensor, hop: int) -> Tensor:
        """Section 2.1.1: h + SiLU(W h + b), an estimate of the target's state `hop` + 1 places on."""
        return state_ND + nn.functional.silu(self.heads[hop](state_ND))

    def logits(self, state_ND: Tensor, hop: int = 0) -> Tensor:
        """The target's LM head on what the head of that hop makes of the state."""
        return super().logits(self.ahead(state_ND, hop), hop)

    def loss(self, rows: Rows, stage: Stage) -> Score:
        """The stage's losses between what the head of the hop makes of each state and the target's."""
        made = replace(rows, state_RD=self.ahead(rows.state_RD, rows.hop))
        return score(
            made,
            super().logits,
            self.lm_head_VD,
            stage.losses,
            keep_top=stage.keep_top,
            keep_failing=stage.keep_failing,
        )
