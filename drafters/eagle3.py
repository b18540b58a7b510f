"""EAGLE-3 -- EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test, NeurIPS 2025.

Idea: states of three depths of the target (low, middle, high) contain more than the last one.
A drafter that need not imitate states gains from more data; it is trained on its own states
for seven hops (training-time test), over a draft vocabulary of the most frequent tokens.
Differs from EAGLE by: three states fused into one at hop 0, and no fc later; queries, keys
and values that read [normed embedding ; normed state], with the state as residual; its own
norm and LM head over a draft vocabulary; cross-entropy alone; the target's number of key heads.
On images: as EAGLE-2, with three states before each visual token. `visual=none` leaves visual
entries out and stores about a third.

Shapes: N entries, R rows, U visual tokens, D hidden, V vocabulary, K draft vocabulary, S the
states of three layers side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from vlmdistill.drafters.core import Batch, Drafter, Entries, Head, KVCache, RMSNorm
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Number,
    Stage,
    TrainConfig,
    depths,
    features,
    states_of,
    text_then_images,
)
from vlmdistill.drafters.core.layers import DecoderLayer, layer_names
from vlmdistill.drafters.core.serving import (
    Feeding,
    ServedDrafter,
    layer_settings,
    layer_weights,
    unserved,
)
from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.core.vocabulary import FrequentTokens
from vlmdistill.stores.schema import Feature, TargetInfo

MIDLAYER_NAMES = {
    **layer_names("midlayer", "layer"),
    "midlayer.input_layernorm": "embed_norm",
    "midlayer.hidden_norm": "hidden_norm",
}
"""Modules of the layer of the authors and SpecForge -> their names here."""
SPECULATORS_NAMES = {
    **layer_names("layers.0", "layer"),
    "layers.0.input_layernorm": "embed_norm",
    "layers.0.hidden_norm": "hidden_norm",
}
"""The same of speculators."""


class Eagle3(FrequentTokens, Drafter):
    """One decoder layer over [embedding ; fused state], with a vocabulary of its own."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official code's."""

        draft_vocab: Number = 32000
        """Tokens of the draft vocabulary: the most frequent ones of the training responses."""
        visual: Literal["all", "none"] = "all"
        """Visual tokens are entries, or do not enter; the text after an image has the image's
        last states before it in either case."""
        kv_heads: Literal["all", "target"] = "target"
        normed_residual: bool = False
        """The layer's residual is the normed state: `norm_before_residual` of speculators."""

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Three depths and the visual embeddings; last text states to learn from.

            With `visual=none`, of images only the last states of each span.
            """
            taps = depths(info.num_layers)
            if self.visual == "all":
                needs = states_of(taps, "text", "visual") | features("embed.visual")
            else:
                needs = states_of(taps, "text", "span")
            return needs if decoding else needs | features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """The paper's and its code's: learning rate, warm-up, clipping, seven hops, no noise."""

        noise: float = 0.0
        warmup: float = 0.015
        stages: tuple[Stage, ...] = text_then_images(
            5e-5, hops=7, hop_decay=0.8, losses={"cross_entropy": 1.0}
        )

    published_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("fc", "norm", "lm_head", "d2t")},
        **MIDLAYER_NAMES,
        **SPECULATORS_NAMES,
    }
    published_settings: ClassVar[Mapping[str, str]] = {"lm_head.weight": "draft_vocab"}
    published_switches: ClassVar[Mapping[str, str]] = {
        "norm_before_residual": "normed_residual"
    }
    config: Config
    d2t: Tensor

    @property
    def sources(self) -> tuple[str, ...]:
        """The inputs of three layers, low to high."""
        return depths(self.info.num_layers)

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(3 * info.hidden_size, info.hidden_size, bias=False)
        self.embed_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.hidden_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        # Its projections have no bias, even where the target's have one.
        unbiased = replace(info, attention_bias=False)
        self.layer = DecoderLayer(
            unbiased, kv_heads=config.kv_heads, inputs=2 * info.hidden_size
        )
        self.norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.register_vocabulary(config.draft_vocab)
        self.lm_head = nn.Linear(info.hidden_size, len(self.d2t), bias=False)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Visual tokens enter as [visual embedding ; fused states before it].

        At their expanded positions; with `visual=none` they do not.
        """
        if self.config.visual == "none":
            return
        token_N, states_NS = batch.predecessors(self.sources, "visual")
        tokens = batch.visual_tokens.only(token_N)
        embed_UD = batch.feature("embed", "visual")
        embed_ND = embed_UD[place(token_N, embed_UD.device)]
        x_ND = self.normed(embed_ND, self.fc(states_NS))
        self.layer.write_kv(x_ND, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """g_t + layer([norm(e_{t+1}) ; norm(g_t)]) -> g_{t+1}, [R, D].

        At hop 0, g_t = fc([low ; mid ; high]).
        """
        embed_ND = self.embed(entries.ids_N)
        hidden_ND = entries.hidden_ND
        if entries.hop == 0:
            hidden_ND = self.fc(hidden_ND)
        x_ND = self.normed(embed_ND, hidden_ND)
        residual_ND = hidden_ND
        if self.config.normed_residual:
            residual_ND = x_ND[:, self.info.hidden_size :]
        state_RD: Tensor = self.layer(
            x_ND,
            entries.rotary_N,
            entries.tokens,
            cache,
            entries.hop,
            residual_ND=residual_ND,
        )
        return state_RD

    def normed(self, embed_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        """The input of queries, keys and values: [normed embedding ; normed state], [N, 2D]."""
        halves = [self.embed_norm(embed_ND), self.hidden_norm(hidden_ND)]
        return torch.cat(halves, dim=-1)

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """Its own norm and head, over the draft vocabulary: [N, K].

        The state that the next hop reads is the one before them.
        """
        logits_NK: Tensor = self.lm_head(self.norm(estimate_ND)).float()
        return logits_NK

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """Its own norm and head."""
        return (*self.norm.parameters(), *self.lm_head.parameters())

    def published(self) -> ServedDrafter:
        """As SGLang and vLLM read it (their `llama_eagle3.py`).

        TrainingError if they would feed it otherwise than it was trained.
        """
        for name, served in {"visual": "all", "positions": "expanded"}.items():
            own = getattr(self.config, name)
            if own != served:
                raise unserved(name, own, served)
        settings = self._published_settings()
        weights = self._published_weights()
        feeding = Feeding(drafter="eagle3", visual="fused")
        return ServedDrafter(
            settings,
            weights,
            feeding,
            "eagle3",
            draft_vocabulary=len(self.d2t),
            engines=("sglang", "vllm"),
            layers=self.taps,
        )

    def _published_settings(self) -> dict[str, Any]:
        entered = [*self.taps]  # vLLM names the layers that a state enters
        exited = [tap - 1 for tap in self.taps]  # SGLang those that it leaves
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_settings(self, self.layer),
            "target_hidden_size": self.info.hidden_size,
            "draft_vocab_size": len(self.d2t),
            "norm_before_residual": self.config.normed_residual,
            "num_aux_hidden_states": len(entered),
            "eagle_aux_hidden_state_layer_ids": entered,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": exited,
            },
        }

    def _published_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.embed_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            **layer_weights(self.layer, "midlayer"),
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        vocabulary_K = self.vocabulary_K
        if vocabulary_K is not None:
            in_vocabulary_V = torch.zeros(self.info.vocab_size, dtype=torch.bool)
            in_vocabulary_V[vocabulary_K.cpu()] = True
            weights |= {"d2t": self.d2t, "t2d": in_vocabulary_V}
        return weights
