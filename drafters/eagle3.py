"""EAGLE-3 -- EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test, NeurIPS 2025.

Idea: states of three depths of the target, low, middle and high, say more than the last one, and a drafter
that need not imitate states can learn from all the data there is; it is trained on its own states for seven
steps (training-time test) and speaks the tokens that occur most.
Differs from EAGLE by: three states fused into one at hop 0, and no fc later; queries, keys and values that
read the normed embedding and the normed state side by side, the state itself being the residual; a norm and
an LM head of its own over a draft vocabulary; cross-entropy alone; key heads as the target.
Adapted to images as EAGLE-2 is: visual tokens are entries like any others, with the projected visual vector
in the place of the token embedding and the three states before it. That stores three states of every
position; `visual=none` leaves the visual entries out and stores about a third.
Departs from the official code in: supervision starts at the first drafted token (the code's unshifted mask
leaves out the first one); rotary positions have the target's theta in training as in decoding (the training
code leaves it at 10000); equally frequent tokens go by id; the mean is over supervised rows, not over all
positions; samples may have 4096 tokens. As in the code, a position whose target token is
not in the draft vocabulary costs nothing but counts in the mean; here it counts as not predicted, too.
Where it is silent (no VLM, no small target): its 40 epochs are halved between text and images; rotary
positions are 1-D, as those of its siblings; on fewer than seven layers the three depths move apart as far as
they can, and on fewer than three the highest one is the last layer's input.

Shapes: E entries, R rows, U visual tokens, D hidden, V vocabulary, K draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import (
    Batch,
    Drafter,
    DrafterConfig,
    Entries,
    Head,
    Published,
    Stage,
    at_least,
)
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.memory import Memory
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.schema import Feature, TargetInfo


class Eagle3(Drafter):
    """One decoder layer over [embedding ; fused state] of every position, with a vocabulary of its own."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: the paper's and its code's (learning rate, warm-up, clipping, seven steps, no noise)."""

        draft_vocab: int = 32000
        """How many tokens it can say: the most frequent ones of the training responses; at most all."""
        visual: Literal["all", "none"] = "all"
        """Visual tokens are entries, or do not enter (the text after them still has the states before it)."""
        kv_heads: Literal["all", "target"] = "target"
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

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 1, "draft_vocab")

    config: Config
    d2t: Tensor

    @property
    def sources(self) -> tuple[str, ...]:
        """The inputs of three layers, low to high."""
        return depths(self.info.num_layers)

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Three depths and the visual embeddings, or span ends for them; last states to learn from."""
        assert isinstance(config, cls.Config)
        where: tuple[Literal["text", "visual", "span"], ...]
        where = ("text", "visual") if config.visual == "all" else ("text", "span")
        taps = {Feature(source, place) for source in depths(info.num_layers) for place in where}
        embed = {Feature("embed", "visual")} if config.visual == "all" else set()
        return frozenset(taps | embed | (set() if decoding else {Feature("hidden", "text")}))

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.fc = nn.Linear(3 * info.hidden_size, info.hidden_size, bias=False)
        self.embed_norm = nn.RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(info.hidden_size, info.rms_norm_eps)
        # Its projections have no bias, whatever the target's have.
        self.layer = layer_like(
            replace(info, attention_bias=False), kv_heads=config.kv_heads, inputs=2 * info.hidden_size
        )
        self.norm = nn.RMSNorm(info.hidden_size, info.rms_norm_eps)
        size = min(config.draft_vocab, info.vocab_size)
        self.lm_head = nn.Linear(info.hidden_size, size, bias=False)
        # Draft id k is target id k + d2t[k]: the form in which it is published.
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.counts_tokens = size < info.vocab_size

    @property
    def vocabulary_K(self) -> Tensor | None:
        """The draft vocabulary in ascending order; None when it is the target's."""
        if not self.counts_tokens:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def prepare(self, count_V: Tensor) -> None:
        """Choose the draft vocabulary: the most frequent tokens, those never seen by id."""
        often_V = torch.sort(count_V, descending=True, stable=True).indices
        chosen_K = often_V[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen_K - torch.arange(len(chosen_K), device=chosen_K.device))

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Visual tokens enter as [visual embedding ; fused states before it], at their expanded positions."""
        if self.config.visual == "none":
            return
        states, found = zip(*(batch.before(source) for source in self.sources), strict=True)
        text = len(batch.ids_T)
        seen_U = found[0][text:]
        hidden_UD = self.fc(torch.cat([state[text:] for state in states], dim=-1)[seen_U])
        x_UD = self.beside(batch.feature("embed", "visual")[seen_U], hidden_UD)
        places = batch.visual_places.only(seen_U)
        self.layer.remember(x_UD, places.order_N - 1, places, memory)

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """g_t + layer([norm(e_{t+1}) ; norm(g_t)]) -> g_{t+1}, with g_t = fc([low ; mid ; high]) at hop 0."""
        embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
        hidden_ND = self.fc(entries.hidden_ND) if entries.hop == 0 else entries.hidden_ND
        x_ND = self.beside(embed_ND, hidden_ND)
        state_RD: Tensor = self.layer(
            x_ND, entries.position_N, entries.places, memory, entries.hop, residual_ND=hidden_ND
        )
        return state_RD

    def beside(self, embed_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        """What queries, keys and values read: both normed, side by side."""
        return torch.cat([self.embed_norm(embed_ND), self.hidden_norm(hidden_ND)], dim=-1)

    def logits(self, state_ND: Tensor, hop: int = 0) -> Tensor:
        """Its own norm and head, over the draft vocabulary; what recurs is the state before them."""
        logits_NK: Tensor = self.lm_head(self.norm(state_ND)).float()
        return logits_NK

    def published(self) -> Published:
        """As SGLang and vLLM read it (their `llama_eagle3.py`); TrainingError if they feed it otherwise."""
        for name, served in {"visual": "all", "positions": "expanded"}.items():
            if (trained := getattr(self.config, name)) != served:
                raise TrainingError(
                    f"this drafter has {name}={trained}, which serving engines do not: they have "
                    f"{name}={served}. Train one with --set {name}={served}"
                )
        info, layer, taps = self.info, self.layer, [int(name.removeprefix("layer")) for name in self.sources]
        heads = [layer.heads, layer.kv_heads, layer.kv_heads]
        query, key, value = torch.split(layer.qkv_proj.weight, [count * layer.head_dim for count in heads])
        gate, up = layer.gate_up_proj.weight.chunk(2)
        weights: dict[str, Tensor] = {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.embed_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            "midlayer.self_attn.q_proj.weight": query,
            "midlayer.self_attn.k_proj.weight": key,
            "midlayer.self_attn.v_proj.weight": value,
            "midlayer.self_attn.o_proj.weight": layer.o_proj.weight,
            "midlayer.post_attention_layernorm.weight": layer.post_attention_norm.weight,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": layer.down_proj.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        if (vocabulary_K := self.vocabulary_K) is not None:
            spoken_V = torch.zeros(info.vocab_size, dtype=torch.bool)
            spoken_V[vocabulary_K.cpu()] = True
            weights |= {"d2t": self.d2t, "t2d": spoken_V}
        settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": info.hidden_size,
            "target_hidden_size": info.hidden_size,
            "intermediate_size": info.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": info.rms_norm_eps,
            "rope_theta": info.rope_theta,
            "max_position_embeddings": info.max_position,
            "vocab_size": info.vocab_size,
            "draft_vocab_size": len(self.d2t),
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "num_aux_hidden_states": len(taps),
            "eagle_aux_hidden_state_layer_ids": taps,  # vLLM: the layers that a state enters
            "eagle_config": {  # SGLang: those that it leaves, one less
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            },
        }
        return settings, weights


def depths(layers: int) -> tuple[str, str, str]:
    """The layers whose inputs are read: 2, half and the last but two, kept apart on shallow targets."""
    middle = layers // 2
    low, high = min(2, max(middle - 1, 0)), min(max(layers - 3, middle + 1), layers - 1)
    return f"layer{low}", f"layer{middle}", f"layer{high}"
