"""A drafter as serving engines load it: names of its weights and settings, and how it must be fed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from msgspec import Struct
from torch import Tensor

from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.layers import DecoderLayer
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.schema import Provenance, TargetInfo

KEY = "vlmdistill"
"""The key of `config.json` that holds a `Feeding`; a served folder without it is not ours."""

Visual = Literal["fused", "raw", "states", "dropped", "unread"]


class Built(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a drafter is built from, besides its weights."""

    config: Mapping[str, Any]
    """Its `Config`."""
    target: TargetInfo


class Feeding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine must know of a drafter before it loads it."""

    drafter: str
    visual: Visual
    """How visual tokens enter: [visual embedding ; state before it], the bare embedding, their states alone,
    or not at all; or the drafter has no entries."""
    whole_images: bool = False
    """It needs the states of a whole image in one step."""
    draft_tokens: int = 0
    """The most tokens that it drafts; 0: any number."""
    built: Built | None = None
    """The drafter whose `combine`, `fuse` and `compress` run in the engine; None: the engine has its own."""
    trained: Provenance | None = None
    """Of the features that it was trained on; `export` adds it, and an engine compares its own target."""


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter as serving engines name its settings and weights."""

    settings: Mapping[str, Any]
    """Its `config.json`, without `feeding`."""
    weights: Mapping[str, Tensor]
    feeding: Feeding
    method: Literal["eagle", "eagle3", "draft_model", "dflash", "dspark"]
    """What vLLM calls it in `--speculative-config`."""
    draft_vocabulary: int
    engines: tuple[str, ...] = ("vllm",)
    layers: tuple[int, ...] = field(default=())
    """The layers of the target whose inputs it reads; none: the last state alone."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further files, as torch saves them."""
    whole_block: bool = False
    """It was trained to draft as many tokens as it can: with fewer it drafts others."""


@runtime_checkable
class Exportable(Protocol):
    """The capability of a drafter that serving engines can run."""

    def published(self) -> ServedDrafter:
        """Its settings and weights by their names; TrainingError if they would feed it otherwise."""
        ...


def unserved(setting: str, trained: object, served: object) -> TrainingError:
    """The error for a drafter with a setting that no engine has."""
    return TrainingError(
        f"this drafter has {setting}={trained}, which serving engines do not: they have "
        f"{setting}={served}. Train one with --set {setting}={str(served).lower()}"
    )


def layer_settings(drafter: Drafter, layer: DecoderLayer) -> dict[str, Any]:
    """The shape of one decoder layer by the names of a Llama configuration."""
    info = drafter.info
    return {
        "model_type": "llama",
        "hidden_size": info.hidden_size,
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
        "tie_word_embeddings": False,
    }


def layer_weights(layer: DecoderLayer, prefix: str) -> dict[str, Tensor]:
    """The weights of one decoder layer by the names of a Llama checkpoint, its input norm left out."""
    heads = [
        count * layer.head_dim
        for count in (layer.heads, layer.kv_heads, layer.kv_heads)
    ]
    gate, up = layer.gate_up_proj.weight.chunk(2)
    weights = {
        "self_attn.o_proj.weight": layer.o_proj.weight,
        "post_attention_layernorm.weight": layer.post_attention_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down_proj.weight,
    }
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(layer, name)) is not None:
            weights[f"self_attn.{name}.weight"] = norm.weight
    for kind in ("weight", "bias"):
        if (value := getattr(layer.qkv_proj, kind)) is not None:
            for name, part in zip("qkv", torch.split(value, heads), strict=True):
                weights[f"self_attn.{name}_proj.{kind}"] = part
    return {f"{prefix}.{name}": value for name, value in weights.items()}
