"""DFlash -- DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036; DSpark is arXiv
2607.05147.

Idea: a drafter that guesses a whole block in one pass may be several layers deep. Each layer reads the
target's fused states as keys and values of its own; a block is the last token and masks, which see each
other.
Differs from EAGLE by: no own states are fed back; context states that pass through no layer; several layers
of Qwen3's shape; the loss on some positions of each sample (`anchors`).
DSpark's switches: a Markov head, which adds to the scores of a token what the token before it says (`markov`,
its rank), and a head that tells the chance of acceptance (`tells`).
On images: `context=text` leaves visual positions out, so that drafting costs the same for any number of them
and the features are those of `wren`; `context=all` reads the states at all positions, as served VLMs do.

Shapes: N entries, R rows, J slots of a block, Q = R * J, G guesses of a block, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from vlmdistill.drafters.core import Batch, Drafter, Entries, Head, KVCache, Tree
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Positions,
    Stage,
    TrainConfig,
    at_least,
    depths,
    features,
)
from vlmdistill.drafters.core.layers import DecoderLayer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo


class DFlash(Drafter):
    """Some decoder layers over a block of masks, with the target's states as their context."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """DFlash's; a block of 8."""

        layers: int = 5
        """Decoder layers."""
        block: int = 8
        """Positions of one pass: the last token and masks."""
        from_anchor: bool = False
        """The last token's own position guesses the next token (DSpark); else the first mask's does."""
        taps: tuple[int, ...] = ()
        """Layers of the target whose inputs are read; none named: EAGLE-3's three."""
        context: Literal["text", "all"] = "text"
        """Positions whose states are read: those of text, or visual ones too."""
        markov: int = 0
        """Rank of what the token before adds to the scores; 0: nothing (DSpark: 256)."""
        tells: bool = False
        """A head for the chance that a guess is accepted; train it with the loss `confidence`."""
        kv_heads: Literal["all", "target"] = "target"
        positions: Positions = "compact"

        def __post_init__(self) -> None:
            at_least(self, 1, "layers", most=64)
            at_least(self, 1 if self.from_anchor else 2, "block", most=64)
            at_least(self, 0, "markov")
            if self.context == "all" and self.positions == "compact":
                raise DataError("with context=all, set positions=expanded: compact ones count text alone")

        @property
        def max_hops(self) -> int:
            """The guesses of a block."""
            return self.block if self.from_anchor else self.block - 1

        @property
        def tells_confidence(self) -> bool:
            """As set."""
            return self.tells

        def sources(self, info: TargetInfo) -> tuple[str, ...]:
            """The states that are fused; DataError for a layer that the target lacks."""
            if any(not 0 <= tap < info.num_layers for tap in self.taps):
                raise DataError(f"taps={[*self.taps]}: the target has layers 0 to {info.num_layers - 1}")
            return tuple(f"layer{tap}" for tap in self.taps) or depths(info.num_layers)

        def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
            """The fused states of the context; last states to learn from."""
            where = ("text", "visual") if self.context == "all" else ("text",)
            taps = features(*(f"{source}.{rows}" for source in self.sources(info) for rows in where))
            return taps if decoding else taps | features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Learning rate, warm-up, clipping, epochs, anchors and weights of the released code."""

        noise: float = 0.0
        warmup: float = 0.04
        clip: float = 1.0
        stages: tuple[Stage, ...] = (
            Stage(
                name="blocks",
                epochs=10,
                visual=(0.5, 0.5),
                hop_decay=0.7788,  # exp(-1/4)
                learning_rate=6e-4,
                anchors=512,
                losses={"cross_entropy": 1.0},
            ),
        )

    tree = Tree.parse("chain-7")
    config: Config

    @property
    def sources(self) -> tuple[str, ...]:
        """Those of the configuration."""
        return self.config.sources(self.info)

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width, eps = info.hidden_size, info.rms_norm_eps
        self.fc = nn.Linear(len(self.sources) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        unbiased = replace(info, attention_bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(unbiased, kv_heads=config.kv_heads, head_norms=True) for _ in range(config.layers)
        )
        self.input_norms = nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(config.layers))
        self.norm = nn.RMSNorm(width, eps)
        self.mask_D = nn.Parameter(torch.randn(width) * width**-0.5)
        if config.markov:
            self.markov_in = nn.Embedding(info.vocab_size, config.markov)
            self.markov_out = nn.Linear(config.markov, info.vocab_size, bias=False)
            nn.init.zeros_(self.markov_out.weight)
        if config.tells:
            self.tell = nn.Linear(width + config.markov, 1)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """With `context=all`, the fused states before visual tokens are context, at expanded positions."""
        if self.config.context == "text":
            return
        states, found = zip(*(batch.before(source, "visual") for source in self.sources), strict=True)
        seen_N = found[0].nonzero()[:, 0]
        tokens = batch.visual_tokens.only(seen_N)
        self._read(torch.cat(states, dim=-1)[seen_N], tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """One pass makes the states of a block, [R, G * D]; later hops return them."""
        if entries.hop:
            return entries.hidden_ND
        tokens, rows_R = entries.tokens, entries.tokens.rows_R
        self._read(entries.hidden_ND, entries.rotary_N, tokens, cache)
        ids_R, rotary_R = entries.ids_N, entries.rotary_N
        if rows_R is not None:
            ids_R, rotary_R = ids_R[rows_R], rotary_R[rows_R]
        slots = self.config.block
        mask_RJD = self.mask_D.expand(len(ids_R), slots - 1, -1)
        x_QD = torch.cat([self.embed(ids_R)[:, None], mask_RJD], dim=1).flatten(0, 1)
        rotary_Q = (rotary_R[:, None] + torch.arange(1, slots + 1, device=x_QD.device)).flatten()
        for number, layer in self._layers():
            query_QHd, key_QKd, value_QKd = layer.qkv(self.input_norms[number](x_QD), rotary_Q)
            mixed_QHd = cache.layer(number).attend_block(query_QHd, key_QKd, value_QKd, tokens)
            x_QD = layer.finish(x_QD, mixed_QHd)
        x_RJD: Tensor = self.norm(x_QD).view(len(ids_R), slots, -1)
        return x_RJD[:, slots - self.config.max_hops :].flatten(1)

    def _read(self, states_NS: Tensor, rotary_N: Tensor, tokens: TokenIndex, cache: KVCache) -> None:
        """Write fused states as keys and values of every layer."""
        context_ND = self.hidden_norm(self.fc(states_NS))
        for number, layer in self._layers():
            layer.write_kv(context_ND, rotary_N, tokens, cache.layer(number))

    def _layers(self) -> Iterator[tuple[int, DecoderLayer]]:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield number, layer

    def estimate(self, state_NX: Tensor, hop: int) -> Tensor:
        """The state [N, D] of a guess among those of its block, [N, G * D]."""
        width = self.info.hidden_size
        return state_NX[:, hop * width : (hop + 1) * width]

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """The target's LM head, and what the Markov head adds after a token (DSpark)."""
        logits_NV = super().lm_logits(estimate_ND, last_N)
        if not self.config.markov:
            return logits_NV
        added_NV: Tensor = self.markov_out(self.markov_in(last_N))
        return logits_NV + added_NV.float()

    def confidence(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor | None:
        """DSpark's head: of the state of a guess and the Markov vector of the token before it."""
        if not self.config.tells:
            return None
        parts = [estimate_ND, self.markov_in(last_N)] if self.config.markov else [estimate_ND]
        told_N1: Tensor = self.tell(torch.cat(parts, dim=-1))
        return told_N1[:, 0]

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """The Markov and the confidence head."""
        names = ("markov_in", "markov_out", "tell")
        return tuple(one for name in names if hasattr(self, name) for one in getattr(self, name).parameters())
