"""HiViS -- HiViS: Hiding Visual Tokens from the Drafter for Speculative Decoding in VLMs, 2025 (version 1).

Idea: the target's states at text tokens have already taken in what the images say, so the drafter has text
as explicit input, those states as implicit one, and no visual token in training or in drafting (section
3.1, eqs. 2-3). As nobody renews these states while it drafts, it learns to renew its own: four
self-feedback steps, each told which one it is by a sequential embedding, on the samples that are within
its reach (section 3.2, eqs. 5-7).
Differs from EAGLE by: no visual positions at all, so that an image costs nothing, whatever its size;
sequential embeddings; multi-step training with dynamic filtering, and HASS's top-K loss beside EAGLE's two.
Where the paper contradicts itself: guess n carries e_seq^min(n, threshold), as eq. 6 has it, in drafting too
(the index of eq. 4 does not fit its own first term); a row stops counting with the step that fails, as
figure 5 shows, where the text could mean the one after it (`stages.stage2.keep_failing`).
Where the paper is silent (no code is public): e_seq has no size there, but a vector concatenated before a
linear layer is a bias for each step, hence an embedding added after `fc`, from zero, in which `fc`'s own bias
is e_seq^0; rotary positions count text tokens alone; gradients are cut between steps and every loss has
its weight as in HASS, which it follows; the K of the filter is 5, that of the loss HASS's 10; stage 1 has
EAGLE's 20 epochs, stage 2 HASS's 10 and learning rate, both twice here, for an epoch of mixed data is as long
as the shorter kind; depth 7 is 7 levels of drafted tokens, 60 nodes are counted as in EAGLE-2's code.
Eq. 3 is followed to the letter: the first token after an image is paired with the last text state before
that image (`last_visual` changes that), and where no text comes before, it is no entry.
The paper's data are views of the store, none by default: `vlmdistill store filter STORE --name hivis1
--where "visual_tokens = 0 or words > 5"` for stage 1, with `--where "visual_tokens > 0 or code_ratio < 0.05"`
besides for stage 2, and `--set stages.stage1.view=hivis1`. Rows that the dynamic filter drops stay in the
mean of the loss.

Shapes: E entries, R rows, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Drafter, DrafterConfig, Entries, Head, Positions, Stage, Tree, at_least
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class HiViS(Drafter):
    """One decoder layer over text entries alone, each told how many guesses it stands on."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: section 4; schedule and weights of EAGLE and HASS, which the paper follows."""

        threshold: int = 3
        """Guesses with a sequential embedding of their own; later ones share the last. 0: none has any."""
        last_visual: bool = False
        """Pair the first token after an image with that image's last state: one state more for each image."""
        positions: Positions = "compact"
        tree: Tree = Tree(60, 6, 10)
        detach: bool = True
        stages: tuple[Stage, ...] = (
            Stage(
                name="stage1",
                epochs=40,
                visual=(0.5, 0.5),
                learning_rate=3e-5,
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
            Stage(
                name="stage2",
                epochs=20,
                visual=(0.5, 0.5),
                hops=4,
                keep_top=5,
                learning_rate=1e-5,
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 0, "threshold")

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states, and nothing of any image; under `last_visual`, the last state of each."""
        assert isinstance(config, cls.Config)
        text = frozenset({Feature("hidden", "text")})
        return text | {Feature("hidden", "span")} if config.last_visual else text

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads)
        # Row 0, of committed tokens, stays zero: the bias of `fc` is its part, and all guesses start from it.
        self.sequence = nn.Embedding(config.threshold + 1, info.hidden_size, padding_idx=0)
        nn.init.zeros_(self.sequence.weight)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Eqs. 5-6: layer(fc([e_{t+1} ; h_t]) + e_seq) -> g_{t+1}."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        guess = entries.ids_N.new_full((1,), min(entries.hop, self.config.threshold))
        x_ND = x_ND + self.sequence(guess)
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
