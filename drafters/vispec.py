"""ViSpec -- ViSpec: Accelerating Vision-Language Models with Vision-Aware Speculative Decoding, 2025.

Idea: a shallow drafter cannot use thousands of redundant visual tokens. Learnable queries
compress each image to one token at a position of the image (section 4.1); one more query yields
a global feature g, which joins every later text state until the next image (section 4.2, eq.
5). A second pass on the drafter's own states, and long sampled responses, keep it from copying
the target's states (section 4.3).
Differs from EAGLE by: the adaptor, whose compressed tokens are all that the KV cache holds of
an image, and img_fc, which maps every hidden state together with g.

Shapes: N entries, U visual tokens, M visual spans, C compressed tokens of a span, Q queries, D
hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core import EagleDrafter, Head, Tree
from vlmdistill.drafters.core.compressors import QueryCompressor
from vlmdistill.drafters.core.config import (
    EagleConfig,
    Number,
    Stage,
    TwoPasses,
    at_least,
    features,
    vispec_stages,
)
from vlmdistill.drafters.core.layers import EAGLE_NAMES
from vlmdistill.stores.schema import Feature, TargetInfo


class ViSpec(EagleDrafter):
    """One decoder layer over text entries and compressed images; g joins every hidden state."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """The paper's ablations; queries of the official code."""

        num_q: Number = 2
        """Learnable queries: the last one yields g, the others compressed tokens (table 2: 2, 5,
        17, 65)."""
        injection: bool = True
        """Join g to later text (section 4.2); off: compressed tokens alone (table 3, row 2)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            # The adaptor needs one query.
            at_least(self, 1 if self.injection else 2, "num_q")

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states, the last visual state of each span, and the visual embeddings."""
            return features("hidden.text", "hidden.span", "embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TwoPasses):
        """Appendix A; stages and losses of the official code."""

        stages: tuple[Stage, ...] = vispec_stages(learning_rate=3e-6)

    tree = Tree(30, 3, 8)
    published_names: ClassVar[Mapping[str, str]] = {
        **EAGLE_NAMES,
        "imadpt.q": "adaptor.query_QHd",
        "imadpt.k_proj": "adaptor.kv_proj/0",
        "imadpt.v_proj": "adaptor.kv_proj/1",
        "imadpt.o_proj": "adaptor.o_proj",
        "img_fc": "img_fc",
    }
    published_settings: ClassVar[Mapping[str, str]] = {"imadpt.q": "num_q"}
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width = info.hidden_size
        queries = config.num_q
        if not config.injection:
            queries -= 1
        self.adaptor = QueryCompressor(info, queries)
        self.img_fc: nn.Linear | None = None
        if config.injection:
            self.img_fc = nn.Linear(2 * width, width)
            with torch.no_grad():  # [I | 0]: at first an image changes no state
                identity_DX = torch.eye(width, 2 * width)
                self.img_fc.weight.copy_(identity_DX)
                self.img_fc.bias.zero_()

    @property
    def compresses(self) -> Literal["embed"]:
        """Visual embeddings; compressed tokens enter unfused."""
        return "embed"

    @property
    def joins(self) -> bool:
        """g joins later text."""
        return self.config.injection

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """Section 4.1: compressed tokens, and g, by the adaptor."""
        out_MQD: Tensor = self.adaptor(read_UD, span_U, spans)
        return out_MQD

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The last positions of each span."""
        compressed = self.config.num_q - 1
        back_C = torch.arange(compressed, 0, -1, device=start_M.device)
        end_M1 = (start_M + length_M)[:, None]
        return torch.maximum(end_M1 - back_C, start_M[:, None])

    def fuse(
        self,
        embed_ND: Tensor,
        state_ND: Tensor,
        guess_1: Tensor,
        joined_ND: Tensor | None = None,
    ) -> Tensor:
        """Eq. 5 within EAGLE's step: fc([e_{t+1} ; img_fc([h_t ; g])]), at every hop."""
        if self.img_fc is not None and joined_ND is not None:
            both_N2D = torch.cat([state_ND, joined_ND], dim=-1)
            state_ND = self.img_fc(both_N2D)
        return super().fuse(embed_ND, state_ND, guess_1)
