"""MSD -- Speculative Decoding Reimagined for Multimodal Large Language Models, 2025.

Idea: visual tokens have no order in which one predicts the next, so EAGLE's pairing of a state with the
embedding that follows only blurs them: text entries keep it, and visual tokens enter as the embeddings that
the vision tower made (section 4.1, eqs. 8-9). Language first, then images: after a text-only stage, the
share of samples with images rises epoch by epoch (section 4.2, eq. 10).
Differs from EAGLE by: raw visual embeddings at visual positions, and the ramp.
Where paper and code differ: 20 epochs in each of the two stages and a share of 1/20, 2/20, ... 1 in the
second one, as in the code; its learning rate falls linearly here, neither by the paper's cosine nor by the
code's 800,000 steps, which is hardly at all. The code lets a timing choose the tree's total among 40 to 60,
which makes acceptance depend on the machine: fixed at 60 here, the most that it can choose.
The code for Qwen2-VL has an input norm and the target's key heads, that for LLaVA neither: they are
`input_norm=true` and `kv_heads=target`.
Departs from the code in: several images and videos are right, where it counts on a single image of 576
tokens; the first drafted token is supervised; samples may have 4096 tokens, not 2048, for the sake of
targets with larger images.

Shapes: E entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage, Tree
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class MSD(Drafter):
    """One decoder layer over text entries [embedding ; state] and raw visual embeddings."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: section 5.1, and the epochs, mix and losses of the official code."""

        vata: bool = False
        """Drop visual positions when drafting: MSD+VATA of the Sparrow paper (its table 4)."""
        input_norm: bool = False
        """Norm the layer's input, as the official code does for Qwen2-VL alone."""
        tree: Tree = Tree(60, 5, 10)
        stages: tuple[Stage, ...] = (
            Stage(name="text", epochs=20, visual=(0, 0), learning_rate=5e-5),
            Stage(name="multimodal", epochs=20, visual=(0.05, 1), learning_rate=5e-5),
        )

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states, the last visual state of each span, and the visual embeddings."""
        assert isinstance(config, cls.Config)
        always = frozenset({Feature("hidden", "text"), Feature("hidden", "span")})
        if decoding and config.vata:
            return always
        return always | {Feature("embed", "visual")}

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads, input_norm=config.input_norm)

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Visual tokens enter as their embeddings, unfused (eq. 9); under `vata`, in training alone."""
        if self.config.vata and not self.training:
            return
        places = batch.visual_places
        self.layer.remember(batch.feature("embed", "visual"), places.order_N - 1, places, memory)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Eqs. 8-9 for text: layer(fc([e_{t+1} ; h_t])) -> g_{t+1}, as EAGLE."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
