"""EAGLE-3 -- EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test, NeurIPS 2025.

Idea: states of three depths of the target (low, middle, high) contain more than the last one. A drafter that
need not imitate states gains from more data; it is trained on its own states for seven hops (training-time
test), over a draft vocabulary of the most frequent tokens.
Differs from EAGLE by: three states fused into one at hop 0, and no fc later; queries, keys and values that
read [normed embedding ; normed state], with the state as residual; its own norm and LM head over a draft
vocabulary; cross-entropy alone; the target's number of key heads.
On images: as EAGLE-2, with three states before each visual token. `visual=none` leaves visual entries out and
stores about a third.

Shapes: N entries, R rows, U visual tokens, D hidden, V vocabulary, K draft vocabulary.
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
    Stage,
    TrainConfig,
    at_least,
    depths,
    features,
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


class Eagle3(FrequentTokens, Drafter):
    """One decoder layer over [embedding ; fused state] of every position, with a vocabulary of its own."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official code's."""

        draft_vocab: int = 32000
        """Size of the draft vocabulary: the most frequent tokens of the training responses."""
        visual: Literal["all", "none"] = "all"
        """Visual tokens are entries, or do not enter (the text after them still has the states before it)."""
        kv_heads: Literal["all", "target"] = "target"
        normed_residual: bool = False
        """The layer's residual is the normed state (`norm_before_residual` of speculators)."""

        def __post_init__(self) -> None:
            at_least(self, 1, "draft_vocab")

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Three depths and the visual embeddings, or span ends for them; last states to learn from."""
            where = ("text", "visual") if self.visual == "all" else ("text", "span")
            taps = features(
                *(
                    f"{source}.{rows}"
                    for source in depths(info.num_layers)
                    for rows in where
                )
            )
            embed = features("embed.visual") if self.visual == "all" else frozenset()
            return taps | embed | (frozenset() if decoding else features("hidden.text"))

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """The paper's and its code's: learning rate, warm-up, clipping, seven hops, no noise."""

        noise: float = 0.0
        warmup: float = 0.015
        stages: tuple[Stage, ...] = (
            Stage(
                name="text",
                epochs=20,
                visual=(0, 0),
                hops=7,
                hop_decay=0.8,
                learning_rate=5e-5,
                losses={"cross_entropy": 1.0},
            ),
            Stage(
                name="multimodal",
                epochs=20,
                visual=(1, 1),
                hops=7,
                hop_decay=0.8,
                learning_rate=5e-5,
                losses={"cross_entropy": 1.0},
            ),
        )

    published_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("fc", "norm", "lm_head", "d2t")},
        **{
            f"{layer}{theirs}": ours
            for layer in (
                "midlayer",
                "layers.0",
            )  # the authors' and SpecForge's; that of speculators
            for theirs, ours in {
                **layer_names("", "layer"),
                ".input_layernorm": "embed_norm",
                ".hidden_norm": "hidden_norm",
            }.items()
        },
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
        self.layer = DecoderLayer(
            replace(info, attention_bias=False),
            kv_heads=config.kv_heads,
            inputs=2 * info.hidden_size,
        )
        self.norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        size = min(config.draft_vocab, info.vocab_size)
        self.lm_head = nn.Linear(info.hidden_size, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Visual tokens enter as [visual embedding ; fused states before it], at their expanded positions."""
        if self.config.visual == "none":
            return
        seen_N, states_NS = batch.predecessors(self.sources, "visual")
        tokens = batch.visual_tokens.only(seen_N)
        embed_UD = batch.feature("embed", "visual")
        embed_ND = embed_UD[place(seen_N, embed_UD.device)]
        x_ND = self.normed(embed_ND, self.fc(states_NS))
        self.layer.write_kv(x_ND, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """g_t + layer([norm(e_{t+1}) ; norm(g_t)]) -> g_{t+1}, with g_t = fc([low ; mid ; high]) at hop 0."""
        embed_ND = self.embed(entries.ids_N)
        hidden_ND = (
            self.fc(entries.hidden_ND) if entries.hop == 0 else entries.hidden_ND
        )
        x_ND = self.normed(embed_ND, hidden_ND)
        residual_ND = (
            x_ND[:, len(hidden_ND[0]) :] if self.config.normed_residual else hidden_ND
        )
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
        """The input of queries, keys and values: [normed embedding ; normed state]."""
        return torch.cat(
            [self.embed_norm(embed_ND), self.hidden_norm(hidden_ND)], dim=-1
        )

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """Its own norm and head, over the draft vocabulary; what recurs is the state before them."""
        logits_NK: Tensor = self.lm_head(self.norm(estimate_ND)).float()
        return logits_NK

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """Its own norm and head."""
        return (*self.norm.parameters(), *self.lm_head.parameters())

    def published(self) -> ServedDrafter:
        """As SGLang and vLLM read it (their `llama_eagle3.py`); TrainingError if they feed it otherwise."""
        for name, served in {"visual": "all", "positions": "expanded"}.items():
            if (trained := getattr(self.config, name)) != served:
                raise unserved(name, trained, served)
        info, layer, taps = self.info, self.layer, self.taps
        weights: dict[str, Tensor] = {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.embed_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            **layer_weights(layer, "midlayer"),
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        if (vocabulary_K := self.vocabulary_K) is not None:
            spoken_V = torch.zeros(info.vocab_size, dtype=torch.bool)
            spoken_V[vocabulary_K.cpu()] = True
            weights |= {"d2t": self.d2t, "t2d": spoken_V}
        settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_settings(self, layer),
            "target_hidden_size": info.hidden_size,
            "draft_vocab_size": len(self.d2t),
            "norm_before_residual": self.config.normed_residual,
            "num_aux_hidden_states": len(taps),
            "eagle_aux_hidden_state_layer_ids": [
                *taps
            ],  # vLLM: the layers that a state enters
            "eagle_config": {  # SGLang: those that it leaves, one less
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            },
        }
        return ServedDrafter(
            settings,
            weights,
            Feeding(drafter="eagle3", visual="fused"),
            "eagle3",
            draft_vocabulary=len(self.d2t),
            engines=("sglang", "vllm"),
            layers=taps,
        )
