"""A drafter as serving engines load it: its weights and settings by their names, and its inputs.

Shapes: D hidden, M width of the MLP.
"""

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
"""The key of `config.json` that holds a `Feeding`, in every exported folder."""

DRAFT_IDS = "draft_ids_K"
"""The target's ids of a draft vocabulary, ascending, in the weights of an exported folder."""

Visual = Literal["fused", "raw", "states", "dropped", "unread"]
"""How visual tokens enter: [visual embedding ; state before it], the bare embedding, states
alone, not at all; unread: the drafter has no entries."""


class Built(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plugin builds a drafter from, besides its weights."""

    config: Mapping[str, Any]
    """Its `Config`."""
    target: TargetInfo


class Feeding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine must know of a drafter before it loads it."""

    drafter: str
    visual: Visual
    whole_images: bool = False
    """The states of a whole image are needed in one step."""
    draft_tokens: int = 0
    """The most tokens that it drafts; 0: any number."""
    built: Built | None = None
    """The drafter whose `combine`, `fuse` and `compress` run in the engine; None: the engine
    has an implementation of its own."""
    trained: Provenance | None = None
    """Provenance of its training features, added by `export`; an engine compares its target."""


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter as serving engines name its settings and weights."""

    settings: Mapping[str, Any]
    """Its `config.json`, without `feeding`."""
    weights: Mapping[str, Tensor]
    feeding: Feeding
    method: Literal["eagle", "eagle3", "draft_model", "dflash", "dspark"]
    """The `method` of vLLM's `--speculative-config`."""
    draft_vocabulary: int
    engines: tuple[str, ...] = ("vllm",)
    layers: tuple[int, ...] = field(default=())
    """The layers of the target whose inputs it reads; none: the last state only."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further files, as torch saves them."""
    whole_block: bool = False
    """All tokens of a block are drafted together: asking for fewer changes them."""


@runtime_checkable
class Exportable(Protocol):
    """The capability of a drafter that serving engines can run."""

    def published(self) -> ServedDrafter:
        """Its settings and weights by engines' names; TrainingError if no engine can run it."""
        ...


def unserved(setting: str, trained: object, served: object) -> TrainingError:
    """The error for a drafter with a setting that no engine has."""
    value = str(served).lower()
    return TrainingError(
        f"this drafter has {setting}={trained}, which serving engines do not have: they have "
        f"{setting}={served}. Train one with --set {setting}={value}"
    )


def layer_settings(drafter: Drafter, layer: DecoderLayer) -> dict[str, Any]:
    """The shape of a drafter of one decoder layer, by the names of a Llama configuration."""
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
    """The weights of a decoder layer, but for an input norm, by the names of Llama."""
    gate_MD, up_MD = layer.gate_up_proj.weight.chunk(2)
    weights = {
        "self_attn.o_proj.weight": layer.o_proj.weight,
        "post_attention_layernorm.weight": layer.post_attention_norm.weight,
        "mlp.gate_proj.weight": gate_MD,
        "mlp.up_proj.weight": up_MD,
        "mlp.down_proj.weight": layer.down_proj.weight,
    }
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            weights[f"self_attn.{name}.weight"] = norm.weight
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    rows = [count * layer.head_dim for count in heads]
    for kind in ("weight", "bias"):
        qkv = getattr(layer.qkv_proj, kind)
        if qkv is not None:
            query, key, value = torch.split(qkv, rows)
            weights[f"self_attn.q_proj.{kind}"] = query
            weights[f"self_attn.k_proj.{kind}"] = key
            weights[f"self_attn.v_proj.{kind}"] = value
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}
