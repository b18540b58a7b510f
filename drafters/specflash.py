"""SpecFLASH -- SpecFLASH: A Latent-Guided Semi-autoregressive Speculative Decoding Framework for Efficient
Multimodal Generation, ACM Multimedia 2026.

Idea: the states of visual tokens are redundant, so learnable queries compress them (section
3.2). Image content comes in short predictable phrases, so one pass guesses several tokens, from
placeholders at the next positions (section 3.3).
Differs from EAGLE by: compressed visual states, and `group` tokens per pass.
Its ablations are switches: `group=1` is the paper's VisComp, `compress=false` its SemiAR.

Shapes: N entries, R rows, G tokens of a group, Q = R * G, U visual tokens, M spans, C queries,
K key heads, d head width, D hidden.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core import EagleDrafter, Entries, Head, KVCache, Tree, Visual
from vlmdistill.drafters.core.compressors import attend_spans, spread
from vlmdistill.drafters.core.config import (
    Count,
    EagleConfig,
    Number,
    Stage,
    TrainConfig,
    features,
)
from vlmdistill.drafters.core.serving import ServedDrafter, unserved
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo


class SpecFlash(EagleDrafter):
    """One decoder layer over text and compressed visual states; several tokens per pass."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """Sections 3 and 4, appendices C and E."""

        compress: bool = True
        """Compress visual states (section 3.2); off: visual tokens are entries, as in EAGLE-2."""
        queries: Count = 64
        """The most compressed tokens of an image (C in appendix C); 0: no image enters."""
        ratio: Number = 9
        """Visual tokens for each compressed one (N / C in appendix C)."""
        group: Number = 4
        """Tokens guessed in one pass (section 3.3); 1 is autoregressive."""
        passes: Number = 1
        """Passes that are trained and, at most, drafted: up to `group * passes` tokens."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group == 1 and self.passes > 1:
                raise DataError(
                    f"passes={self.passes}: with group=1, "
                    "set stages.*.hops to train more tokens"
                )

        @property
        def max_hops(self) -> int | None:
            """The tokens of all passes; with one token a pass there is no limit."""
            if self.group == 1:
                return None
            return self.group * self.passes

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """States everywhere; without compression the visual embeddings too."""
            states = features("hidden.text", "hidden.visual")
            return states if self.compress else states | features("embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Losses, learning rate and epochs of the released code."""

        stages: tuple[Stage, ...] = (
            Stage(name="multimodal", epochs=20, visual=(1, 1), learning_rate=3e-5),
        )

    tree = Tree(5, 3, 1)
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width = info.hidden_size
        queries = config.queries if config.compress else 0
        self.query_CD = nn.Parameter(torch.randn(queries, width))
        placeholder_D = torch.randn(width) * width**-0.5
        self.placeholder_D = nn.Parameter(placeholder_D)

    @property
    def visual(self) -> Visual:
        """Without compression visual tokens enter as for EAGLE-2."""
        return "dropped" if self.config.compress else "fused"

    @property
    def compresses(self) -> Literal["hidden"] | None:
        """The states of visual tokens."""
        return "hidden" if len(self.query_CD) else None

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """Section 3.2: F_c = softmax(Q F_v^T) F_v of each span."""
        query_C1D = self.query_CD[:, None]
        read_U1D = read_UD[:, None]
        return attend_spans(query_C1D, read_U1D, read_U1D, span_U, spans)

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Positions spread over each span, of one entry for `ratio` visual tokens."""
        count_M = (length_M - 1) // self.config.ratio + 1
        return spread(start_M, length_M, count_M, len(self.query_CD))

    def fuse(
        self,
        embed_ND: Tensor,
        state_ND: Tensor,
        guess_1: Tensor,
        joined_ND: Tensor | None = None,
    ) -> Tensor:
        """fc([e_{t+1} ; h_t]); guesses are placeholders where one pass makes several tokens."""
        x_ND = super().fuse(embed_ND, state_ND, guess_1)
        if self.config.group == 1:
            return x_ND
        return torch.where(guess_1 > 0, self.placeholder_D, x_ND)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """Section 3.3: one pass makes the states of a group, [R, G * D]; later hops return them.

        A guess that a later pass reads is written to the cache.
        """
        hop = entries.hop
        tokens = entries.tokens
        group = self.config.group
        starts_pass = hop % group == 0
        last_pass = group * (self.config.passes - 1)  # its first hop
        if starts_pass or hop < last_pass:
            hidden_ND = entries.hidden_ND
            if hop > 0:
                hidden_ND = self.estimate(hidden_ND, hop - 1)
            embed_ND = self.embed(entries.ids_N)
            entry_N2D = torch.cat([embed_ND, hidden_ND], dim=-1)
            x_ND = self.block.fc(entry_N2D)
            if starts_pass:
                return self._ahead(x_ND, entries, cache).flatten(1)
            self.block.layer.write_kv(x_ND, entries.rotary_N, tokens, cache, hop)
        return tokens.wanted(entries.hidden_ND)

    def _ahead(self, x_ND: Tensor, entries: Entries, cache: KVCache) -> Tensor:
        """The states of the wanted rows and of the G - 1 placeholders after each, [R, G, D].

        Placeholder j sees what its row sees and the placeholders before it; the cache keeps
        none of them.
        """
        layer = self.block.layer
        hop = entries.hop
        tokens = entries.tokens
        layer.write_kv(x_ND, entries.rotary_N, tokens, cache, hop)
        x_RD = tokens.wanted(x_ND)
        rotary_R = tokens.wanted(entries.rotary_N)
        rows = len(x_RD)
        group = self.config.group
        width = x_ND.shape[-1]
        placeholders_RGD = self.placeholder_D.expand(rows, group - 1, -1)
        x_RGD = torch.cat([x_RD[:, None], placeholders_RGD], dim=1)
        x_QD = x_RGD.flatten(0, 1)
        offset_G = torch.arange(group, device=x_ND.device)
        rotary_Q = (rotary_R[:, None] + offset_G).flatten()
        query_QHd, key_QKd, value_QKd = layer.qkv(x_QD, rotary_Q)
        shape = (rows, group, *key_QKd.shape[1:])
        key_RGKd = key_QKd.view(shape)
        value_RGKd = value_QKd.view(shape)
        with cache.temporary():
            row_tokens = tokens.at_rows()
            for ahead in range(1, group):
                key_RKd = key_RGKd[:, ahead]
                value_RKd = value_RGKd[:, ahead]
                cache.update(key_RKd, value_RKd, row_tokens, hop + ahead)
            mixed_QHd = cache.attend(query_QHd, tokens, hop)
        state_QD = layer.finish(x_QD, mixed_QHd)
        return state_QD.view(rows, group, width)

    def estimate(self, state_NX: Tensor, hop: int) -> Tensor:
        """The state [N, D] of a hop among those of its group, [N, G * D]."""
        width = self.info.hidden_size
        first = hop % self.config.group * width
        return state_NX[:, first : first + width]

    def published(self) -> ServedDrafter:
        """As vLLM runs it: one pass for each placeholder; TrainingError for `passes` above 1."""
        if self.config.passes > 1:
            # vLLM would have to write an entry in the pass that reads a placeholder.
            raise unserved("passes", self.config.passes, 1)
        return super().published()
