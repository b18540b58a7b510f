"""ViSpec -- ViSpec: Accelerating Vision-Language Models with Vision-Aware Speculative Decoding, 2025.

Idea: a shallow drafter drowns in redundant visual tokens, so learnable queries compress each image to a
single token that keeps a place of the image (section 4.1), and one more query yields a global feature g
that is added to every later text state until the next image (section 4.2, eq. 5). Multi-token prediction
on the drafter's own states and sampled long answers keep it from copying the target's states (section 4.3).
Differs from EAGLE by: the adaptor, whose compressed tokens are all that is remembered of an image, and
img_fc, through which every hidden state passes together with g.
Where paper and code differ, the code: the second stage is trained on 10 L1 + 0.1 ListMLE, not on the
cross-entropy of eq. 6, which is `stages.multimodal.losses={"cross_entropy":1}`; W_g g + f_t is a linear map
of [f_t ; g] that starts as the identity on f_t; g also meets the drafter's own states, at every hop, and is
zero before the first image. A video is one span with one g, where appendix B.2 averages over its frames.
Departs from the code in: every image has its own tokens and places, however many a sample holds; the
second pass has its prefix from the target and then its own guess, as the decoder has, not guesses
throughout, and is added to the first, not averaged with it; img_fc is there from the first stage, where the
code trains a plain EAGLE drafter; a span with fewer tokens than there are compressed ones lets the first of
them share its first place; gradients are clipped by norm, and weights do not decay.

Shapes: E entries, R rows, U visual tokens, M visual spans, Q queries, X queries or compressed tokens of all
spans, H heads, d head width, D hidden.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage, Tree, at_least
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory, Places
from vlmdistill.stores.schema import Feature, TargetInfo


class ViSpec(Drafter):
    """One decoder layer over text entries and compressed images; g beside every hidden state."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: appendix A; queries, losses and passes of the official code."""

        num_q: int = 2
        """Learnable queries: the last one yields g, the others compressed tokens (table 2: 2, 5, 17, 65)."""
        injection: bool = True
        """Add g to later text (section 4.2); off: compressed tokens alone (table 3, second row)."""
        mtp: bool = True
        """A second pass on the drafter's own states (section 4.3); off: every stage has one hop."""
        tree: Tree = Tree(30, 3, 8)
        stages: tuple[Stage, ...] = (
            Stage(
                name="text",
                epochs=20,
                visual=(0, 0),
                learning_rate=3e-6,
                losses={"regression": 1.0, "cross_entropy": 0.1, "list_mle": 0.01},
            ),
            Stage(
                name="multimodal",
                epochs=20,
                visual=(1, 1),
                hops=2,
                learning_rate=3e-6,
                losses={"l1": 10.0, "list_mle": 0.1},
            ),
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 1 if self.injection else 2, "num_q")  # fewer leave the adaptor nothing to do

        @property
        def schedule(self) -> tuple[Stage, ...]:
            """The stages, with a single hop each when `mtp` is off."""
            return self.stages if self.mtp else tuple(replace(stage, hops=1) for stage in self.stages)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Text states, the last visual state of each span, and the visual embeddings."""
        return frozenset({Feature("hidden", "text"), Feature("hidden", "span"), Feature("embed", "visual")})

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = layer_like(info, kv_heads=config.kv_heads)
        self.adaptor = Adaptor(info, config.num_q if config.injection else config.num_q - 1)
        self.img_fc: nn.Linear | None = None
        if config.injection:
            self.img_fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
            with torch.no_grad():  # [I | 0]: at first an image changes no state
                self.img_fc.weight.copy_(torch.eye(info.hidden_size, 2 * info.hidden_size))
                self.img_fc.bias.zero_()

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Compressed tokens enter unfused at the last places of their span; g is kept for later text."""
        spans, compressed = len(batch.start_M), self.config.num_q - 1
        span_U = batch.visual_places.span_N
        out_MQD = self.adaptor(batch.feature("embed", "visual"), span_U, spans)
        if self.img_fc is not None:
            memory.glance_MD = out_MQD[:, -1]
        first_M1 = batch.start_M[:, None]
        back_Q = torch.arange(compressed, 0, -1, device=first_M1.device)
        order_X = torch.maximum(first_M1 + batch.length_M[:, None] - back_Q, first_M1).flatten()
        span_X = torch.arange(spans, device=first_M1.device).repeat_interleave(compressed)
        places = Places(batch.segment_M[span_X], order_X, span_X)
        self.layer.remember(out_MQD[:, :compressed].flatten(0, 1), order_X - 1, places, memory)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Eq. 5 within EAGLE's step: layer(fc([e_{t+1} ; img_fc([h_t ; g])])) -> g_{t+1}, at every hop."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        hidden_ND = entries.hidden_ND
        if self.img_fc is not None:
            assert memory.glance_MD is not None, "condition comes before step"
            # Row 0 is the g of text that no image precedes.
            glance_ND = nn.functional.pad(memory.glance_MD, (0, 0, 1, 0))[entries.places.span_N + 1]
            hidden_ND = self.img_fc(torch.cat([hidden_ND, glance_ND], dim=-1))
        x_ND = self.fc(torch.cat([embed_ND, hidden_ND], dim=-1))
        state_RD: Tensor = self.layer(x_ND, entries.position_N, entries.places, memory, entries.hop)
        return state_RD


class Adaptor(nn.Module):
    """Learnable queries, attending over the visual embeddings of one span: no order, norm or residual."""

    def __init__(self, info: TargetInfo, queries: int) -> None:
        super().__init__()
        self.heads, self.head_dim = info.num_heads, info.head_dim
        width = info.num_heads * info.head_dim
        self.query_QHd = nn.Parameter(torch.empty(queries, info.num_heads, info.head_dim))
        nn.init.normal_(self.query_QHd, std=info.head_dim**-0.5)
        self.kv_proj = nn.Linear(info.hidden_size, 2 * width, bias=info.attention_bias)
        self.o_proj = nn.Linear(width, info.hidden_size, bias=False)

    def forward(self, embed_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """What each query finds in each of the `spans` runs of visual tokens: [M, Q, D].

        The queries of all spans go over all visual tokens at once, each masked to its own: spans of any
        lengths need no padding, and there are few queries.
        """
        queries = len(self.query_QHd)
        key_UHd, value_UHd = (
            part.unflatten(-1, (self.heads, self.head_dim)) for part in self.kv_proj(embed_UD).chunk(2, -1)
        )
        span_X = torch.arange(spans, device=span_U.device).repeat_interleave(queries)
        mixed_1HXd = nn.functional.scaled_dot_product_attention(
            self.query_QHd.repeat(spans, 1, 1).transpose(0, 1)[None],
            key_UHd.transpose(0, 1)[None],
            value_UHd.transpose(0, 1)[None],
            attn_mask=span_X[:, None] == span_U,
        )
        out_XD: Tensor = self.o_proj(mixed_1HXd[0].transpose(0, 1).flatten(1))
        return out_XD.view(spans, queries, embed_UD.shape[-1])
