"""Sparrow -- Sparrow: Text-Anchored Window Attention with Visual-Semantic Glimpsing for Speculative
Decoding in Video LLMs, 2026.

Idea: the target's text states have already taken in what the images say, so the drafter reuses them and
drops every visual token when it drafts (HSR-VATA, section 3.1, eqs. 1-2); in training the visual
positions carry states of the target's middle layer (IVSB, section 3.2, eq. 3), and a second pass runs on
the drafter's own states (MTP, eq. 4).
Differs from EAGLE by: what stands at visual positions, in training and in decoding.
Where the paper is silent (no code is public): the middle state is normed before it enters, for its scale
is not that of the entries; text keeps its training-time positions when the visual ones are dropped; losses
are those of ViSpec's code, whose data construction the paper follows (appendix C.3); the MTP pass has its
prefix from the target and then its own guess, as the decoder has, not guesses throughout; the learning rate
is EAGLE's; the "second-to-last" state is the LM head's input, as in EAGLE's own wording; the first token
after an image is paired with the image's last state; `30-4-8` has five levels, by the paper's notation,
though the ViSpec tree that it follows has four.

Shapes: E entries, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage, Tree
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.schema import Feature, TargetInfo


class Sparrow(Drafter):
    """One decoder layer over text entries; middle-layer visual states in training alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: sections 3 and 4, appendix C.3; losses of ViSpec's code."""

        vata: bool = True
        """Drop visual positions when drafting (section 3.1)."""
        ivsb: bool = True
        """Middle-layer states at visual positions (section 3.2); off: raw visual embeddings, as MSD."""
        mtp: bool = True
        """A second pass on the drafter's own states (eq. 4); off: every stage has one hop."""
        tree: Tree = Tree(30, 4, 8)
        stages: tuple[Stage, ...] = (
            Stage(
                name="text",
                epochs=20,
                visual=(0, 0),
                losses={"regression": 1.0, "cross_entropy": 0.1, "list_mle": 0.01},
            ),
            Stage(
                name="multimodal",
                epochs=20,
                visual=(1, 1),
                hops=2,
                losses={"l1": 10.0, "list_mle": 0.1},
            ),
        )

        @property
        def schedule(self) -> tuple[Stage, ...]:
            """The stages, with a single hop each when `mtp` is off."""
            return self.stages if self.mtp else tuple(replace(stage, hops=1) for stage in self.stages)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states, the last visual state of each span; in training the middle layer at visual tokens."""
        assert isinstance(config, cls.Config)
        always = frozenset({Feature("hidden", "text"), Feature("hidden", "span")})
        if decoding and config.vata:
            return always
        return always | {Feature(f"layer{info.num_layers // 2}" if config.ivsb else "embed", "visual")}

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads)
        self.visual_norm = nn.RMSNorm(info.hidden_size, info.rms_norm_eps) if config.ivsb else nn.Identity()

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Visual tokens enter in training as the middle layer's states, unfused; in decoding not at all."""
        if self.config.vata and not self.training:
            return
        source = f"layer{self.info.num_layers // 2}" if self.config.ivsb else "embed"
        x_UD = self.visual_norm(batch.feature(source, "visual"))
        places = batch.visual_places
        self.layer.remember(x_UD, places.order_N - 1, places, memory)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Eq. 1: layer(FC(e_t + h_{t-1})), the state reused being the target's (hop 0) or its own (eq. 4)."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        x_ND = self.fc(torch.cat([embed_ND, entries.hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD
