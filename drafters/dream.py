"""DREAM -- DREAM: Drafting with Refined Target Features and Entropy-Adaptive Cross-Attention Fusion for
Multimodal Speculative Decoding, NeurIPS 2025, arXiv 2505.19201.

Idea: joined to an embedding, a state of the target loses what it knows of the image. So an
entry's input is its embedding alone, and the second of three layers is a gated
cross-attention over the target's states of all positions (section 3.1). Its output learns
from a middle layer of the target (section 3.2).
Differs from EAGLE by: three layers, one of which has states as keys and values; no fc; a
final norm; the loss `middle`.
On images: visual tokens pass through all layers, as text does. The paper drops those that
the target hardly attends to (section 3.3); here none is dropped, since no feature holds the
target's attention.

Shapes: N entries, U visual tokens, R rows, H query heads, K key heads, d head width, M width
of the MLP, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core import (
    Batch,
    Drafter,
    Entries,
    Head,
    KVCache,
    RMSNorm,
    Tree,
)
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Share,
    Stage,
    TrainConfig,
    features,
)
from vlmdistill.drafters.core.layers import DecoderLayer, layer_names
from vlmdistill.drafters.core.transfer import place
from vlmdistill.stores.schema import Feature, TargetInfo

CROSS_NAMES = {
    "input_layernorm": "input_norm",
    "cross_attn.q_proj": "q_proj",
    "cross_attn.k_proj": "kv_proj/0",
    "cross_attn.v_proj": "kv_proj/1",
    "cross_attn.o_proj": "o_proj",
    "cross_attn.q_norm": "q_norm",
    "cross_attn.k_norm": "k_norm",
    "cross_attn_attn_gate": "attention_gate",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "gate_up_proj/0",
    "mlp.up_proj": "gate_up_proj/1",
    "mlp.down_proj": "down_proj",
    "cross_attn_mlp_gate": "mlp_gate",
}
"""The modules of the authors' cross-attention layer -> their names in `CrossLayer`."""


class Dream(Drafter):
    """A decoder layer over embeddings, a cross-attention over states, a decoder layer."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """A fixed depth, where the paper chooses one for each token."""

        middle: Share = 0.75
        """The depth of the middle layer, as a share of the target's layers (section 4.2
        compares a quarter, a half and three quarters)."""

        def middle_source(self, info: TargetInfo) -> str:
            """The target states that the second layer learns from."""
            layer = int(self.middle * info.num_layers)
            return f"layer{min(layer, info.num_layers - 1)}"

        @property
        def own_losses(self) -> frozenset[str]:
            """The second layer's output learns by `middle`."""
            return frozenset(["middle"])

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """States everywhere and the visual embeddings; middle text states to learn from."""
            always = features("hidden.text", "hidden.visual", "embed.visual")
            if decoding:
                return always
            middle = self.middle_source(info)
            return always | features(f"{middle}.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Learning rate, clipping and weights of section 4; epochs and noise of the code."""

        stages: tuple[Stage, ...] = (
            Stage(
                name="multimodal",
                epochs=20,
                visual=(1, 1),
                learning_rate=3e-5,
                losses={"regression": 0.2, "middle": 0.2, "cross_entropy": 1.0},
            ),
        )

    tree = Tree(32, 5, 4)
    published_names: ClassVar[Mapping[str, str]] = {
        **layer_names("layers.0", "first"),
        **layer_names("layers.1", "cross", CROSS_NAMES),
        **layer_names("layers.2", "last"),
        "layers.2.input_layernorm": "last.input_norm",
        "norm": "norm",
    }
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.first = DecoderLayer(info, kv_heads=config.kv_heads)
        self.cross = CrossLayer(info, kv_heads=config.kv_heads)
        self.last = DecoderLayer(info, kv_heads=config.kv_heads)
        self.last.input_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.norm = RMSNorm(info.hidden_size, info.rms_norm_eps)

    @property
    def middle_source(self) -> str:
        """The target states that the loss `middle` compares with; see `MiddleState`."""
        return self.config.middle_source(self.info)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Keep the visual entries, [visual embedding ; state before it], for the pass of hop 0.

        They cannot be written yet: in the last layer they depend on the text before them.
        """
        token_N, state_ND = batch.predecessors(["hidden"], "visual")
        embed_UD = batch.feature("embed", "visual")
        embed_ND = embed_UD[place(token_N, embed_UD.device)]
        visual_N2D = torch.cat([embed_ND, state_ND], dim=-1)
        cache.context["visual"] = visual_N2D
        cache.context["tokens"] = batch.visual_tokens.only(token_N)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """last(cross(first(e_{t+1}), h_0 .. h_t)) -> [g_{t+1} ; output of cross], [R, 2D].

        The states of guesses are g, not h.
        """
        width = self.info.hidden_size
        hop = entries.hop
        tokens = entries.tokens
        x_ND = self.embed(entries.ids_N)
        state_ND = entries.hidden_ND[:, :width]
        rotary_N = entries.rotary_N
        if hop == 0 and "visual" in cache.context:
            visual_U2D = cache.context.pop("visual")
            visual_tokens: TokenIndex = cache.context.pop("tokens")
            visual_embed_ND = visual_U2D[:, :width]
            visual_state_ND = visual_U2D[:, width:]
            visual_rotary_N = visual_tokens.position_N - 1
            x_ND = torch.cat([visual_embed_ND, x_ND])
            state_ND = torch.cat([visual_state_ND, state_ND])
            rotary_N = torch.cat([visual_rotary_N, rotary_N])
            tokens = _behind(visual_tokens, tokens)

        every = tokens.all_rows()
        x_ND = self.first(x_ND, rotary_N, every, cache, hop)
        x_ND = self.cross(x_ND, state_ND, every, cache.layer(1), hop)
        out_RD = self.last(x_ND, rotary_N, tokens, cache.layer(2), hop)
        middle_RD = tokens.wanted(x_ND)
        return torch.cat([self.norm(out_RD), middle_RD], dim=-1)

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """The target's LM head on the first half of what `step` returned, [N, 2D]."""
        width = self.info.hidden_size
        return super().lm_logits(estimate_ND[:, :width], last_N)


def _behind(visual: TokenIndex, text: TokenIndex) -> TokenIndex:
    """The visual tokens and then those of text, whose wanted rows are wanted still."""
    readable = text.readable
    rows_R = readable.rows_R
    if rows_R is None:
        count = len(readable.segment_N)
        rows_R = torch.arange(count, device=readable.segment_N.device)
    rows_R = rows_R + len(visual.segment_N)
    return TokenIndex.cat([visual, text]).with_rows(rows_R)


class CrossLayer(nn.Module):
    """Cross-attention from entries to states, without rotary positions, and an MLP.

    Both are behind tanh gates that start at zero: at first the layer changes nothing.
    """

    def __init__(self, info: TargetInfo, *, kv_heads: str) -> None:
        """`kv_heads` is "all" (one key head for each query head) or "target"."""
        super().__init__()
        self.heads = info.num_heads
        self.head_dim = info.head_dim
        self.kv_heads = info.num_heads if kv_heads == "all" else info.num_kv_heads
        width = info.hidden_size
        mlp_width = info.intermediate_size
        eps = info.rms_norm_eps
        query_width = self.heads * self.head_dim
        key_width = self.kv_heads * self.head_dim
        self.input_norm = RMSNorm(width, eps)
        self.q_proj = nn.Linear(width, query_width, bias=False)
        self.kv_proj = nn.Linear(width, 2 * key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps)
        self.k_norm = RMSNorm(self.head_dim, eps)
        self.post_attention_norm = RMSNorm(width, eps)
        self.gate_up_proj = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down_proj = nn.Linear(mlp_width, width, bias=False)
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        x_ND: Tensor,
        state_ND: Tensor,
        tokens: TokenIndex,
        cache: KVCache,
        hop: int,
    ) -> Tensor:
        """[N, D] -> [N, D]: write the entries' states to the cache, then attend to the states."""
        count = len(x_ND)
        head_dim = self.head_dim
        query_ND = self.q_proj(self.input_norm(x_ND))
        query_NHd = self.q_norm(query_ND.view(count, self.heads, head_dim))
        kv_NX = self.kv_proj(state_ND)
        kv_N2Kd = kv_NX.view(count, 2, self.kv_heads, head_dim)
        key_NKd, value_NKd = kv_N2Kd.unbind(1)
        cache.update(self.k_norm(key_NKd), value_NKd, tokens, hop)
        mixed_NHd = cache.attend(query_NHd, tokens, hop)
        mixed_ND = self.o_proj(mixed_NHd.flatten(1))
        x_ND = x_ND + self.attention_gate.tanh() * mixed_ND
        gate_up_N2M = self.gate_up_proj(self.post_attention_norm(x_ND))
        gate_NM, up_NM = gate_up_N2M.chunk(2, dim=-1)
        hidden_NM = F.silu(gate_NM) * up_NM
        added_ND: Tensor = self.down_proj(hidden_NM)
        return x_ND + self.mlp_gate.tanh() * added_ND
