"""Wren -- a combination of what held in the papers' methods; no paper (docs/measurements/wren.md).

Idea: with visual tokens hidden (HiViS), what an image shows must be in the target's text states, and the last
layer's have the next token alone. So three depths of the target (EAGLE-3) join the last state of every
committed token. Its own states have no depths, and each guess has a sequential embedding (HiViS) instead.
Both halves of an entry are normed (EAGLE-3): own states then differ from the target's in direction alone.
Differs from EAGLE by: no visual positions; the depths; normed entries; sequential embeddings; two stages of
mixed data, the second through four of its own hops without cutting the gradient, and no noise.
On images: as HiViS; drafting costs the same for any number of visual tokens.

Shapes: N entries, R rows, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vlmdistill.drafters.core import Drafter, EagleBlock, Entries, Head, KVCache, Tree
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Positions,
    Stage,
    TrainConfig,
    at_least,
    depths,
    features,
)
from vlmdistill.drafters.core.serving import ServedDrafter, served_block
from vlmdistill.stores.schema import Feature, TargetInfo


class Wren(Drafter):
    """One decoder layer over text entries, with three more depths of the target where it has read."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The ingredients."""

        depths: bool = True
        """Three depths of the target join the entries of committed tokens."""
        normed: bool = True
        """Norm the embedding and the state of an entry."""
        threshold: int = 3
        """Guesses with a sequential embedding of their own; later ones share the last. 0: none has any."""
        positions: Positions = "compact"

        def __post_init__(self) -> None:
            at_least(self, 0, "threshold")

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """Text states of one depth or of four, and nothing of any image."""
            return features("hidden.text", *(f"{source}.text" for source in self.more(info)))

        def more(self, info: TargetInfo) -> tuple[str, ...]:
            """The states that join the last one."""
            return depths(info.num_layers) if self.depths else ()

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Found by the search; losses, mix of samples and hops of HiViS."""

        noise: float = 0.0
        stages: tuple[Stage, ...] = (
            Stage(
                name="stage1",
                epochs=20,
                visual=(0.5, 0.5),
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
            Stage(
                name="stage2",
                epochs=20,
                visual=(0.5, 0.5),
                hops=4,
                losses={"regression": 1.0, "cross_entropy": 0.1, "top_k": 1.0},
            ),
        )

    tree = Tree(60, 6, 10)
    config: Config

    @property
    def sources(self) -> tuple[str, ...]:
        """The last state first, then the depths."""
        return ("hidden", *self.config.more(self.info))

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width, eps = info.hidden_size, info.rms_norm_eps
        self.block = EagleBlock(info, kv_heads=config.kv_heads)
        self.embed_norm = nn.RMSNorm(width, eps) if config.normed else nn.Identity()
        self.hidden_norm = nn.RMSNorm(width, eps) if config.normed else nn.Identity()
        # Row 0, for committed tokens, stays zero: the bias of `fc` and the depths are theirs.
        self.sequence = nn.Embedding(config.threshold + 1, width, padding_idx=0)
        nn.init.zeros_(self.sequence.weight)
        if config.depths:
            self.depth_norm = nn.RMSNorm(width, eps)
            self.depth_fc = nn.Linear(3 * width, width, bias=False)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """layer(fc([norm(e_{t+1}) ; norm(h_t)]) + what only its hop has) -> g_{t+1}, [R, D]."""
        width = self.info.hidden_size
        last_ND, more_ND = entries.hidden_ND[:, :width], entries.hidden_ND[:, width:]
        if entries.hop == 0 and self.config.depths:
            offset_ND = self.depth_fc(self.depth_norm(more_ND.reshape(-1, 3, width)).flatten(1))
        else:
            guess = min(entries.hop, self.config.threshold)
            offset_ND = self.sequence.weight[guess] if guess else None
        embed_ND = self.embed_norm(self.embed(entries.ids_N))
        return self.block(embed_ND, self.hidden_norm(last_ND), entries, cache, offset_ND)

    def published(self) -> ServedDrafter:
        """As HiViS is served, with the norms and the depths."""
        parts = ["embed_norm", "hidden_norm"] if self.config.normed else []
        parts += ["depth_norm", "depth_fc"] if self.config.depths else []
        return served_block(
            self,
            self.block,
            visual="dropped",
            after_image="text",
            guesses_GD=self.sequence.weight,
            normed=self.config.normed,
            layers=self.taps,
            more={f"{part}.weight": self.get_parameter(f"{part}.weight") for part in parts},
        )
