"""A drafter as serving engines load it: names of its weights and settings, and how it must be fed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from msgspec import Struct
from torch import Tensor

from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.layers import DecoderLayer, EagleBlock
from vlmdistill.stores.errors import TrainingError

KEY = "vlmdistill"
"""The key of `config.json` that holds a `Feeding`; a served folder without it is not ours."""

Visual = Literal["fused", "raw", "dropped", "unread"]
AfterImage = Literal["visual", "text"]


class Compression(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an image becomes a few entries: learned queries attend over its visual tokens."""

    reads: Literal["embed", "hidden"]
    """What they attend over: the visual embeddings, or the target's states."""
    entries: int
    """The most entries of an image; they enter bare."""
    ratio: int = 1
    """Visual tokens for each entry."""
    spread: bool = False
    """Their rotary positions are spread over the image; otherwise they are its last ones."""
    heads: int = 0
    """Heads of projected keys and values; 0: one head, nothing projected."""
    joined: bool = False
    """One more query yields a vector that is joined to every later state, until the next image."""

    def count(self, length: int) -> int:
        """Entries of an image of `length` visual tokens."""
        return min(-(-length // self.ratio), self.entries)


class Feeding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine feeds a drafter: what `Drafter.condition` and `Drafter.entries` do in our decoder."""

    drafter: str
    visual: Visual
    """Visual tokens enter as [visual embedding ; state before it], as the bare embedding, or not at all; or
    the drafter has no entries."""
    compression: Compression | None = None
    """Dropped visual tokens leave a few entries."""
    after_image: AfterImage = "visual"
    """The state that the first token after an image is paired with: the image's last, or the last of text."""
    positions: Literal["expanded", "compact"] = "expanded"
    """Rotary positions: index in the expanded sequence, or among the entries that are left."""
    guesses: int = 0
    """Rows of a table that is added to an entry by the number of guesses before it (HiViS); 0: no table."""
    placeholder: bool = False
    """A guess enters as a learned vector instead of its embedding and the state before it."""
    normed: bool = False
    """The embedding and the state of an entry are normed."""
    depths: int = 0
    """States of other layers that join the target's last one where it has read; guesses have none."""
    input_norm: bool = False
    """The decoder layer norms its input."""
    draft_tokens: int = 0
    """The most tokens that it drafts; 0: any number."""

    @property
    def whole_images(self) -> bool:
        """It needs the states of a whole image in one step."""
        return self.compression is not None and self.compression.reads == "hidden"


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter as serving engines name its settings and weights."""

    settings: Mapping[str, Any]
    """Its `config.json`, without `feeding`."""
    weights: Mapping[str, Tensor]
    feeding: Feeding
    method: Literal["eagle", "eagle3", "draft_model"]
    """What vLLM calls it in `--speculative-config`."""
    draft_vocabulary: int
    engines: tuple[str, ...] = ("vllm",)
    layers: tuple[int, ...] = field(default=())
    """The layers of the target whose inputs it reads; none: the last state alone."""


@runtime_checkable
class Exportable(Protocol):
    """The capability of a drafter that serving engines can run."""

    def published(self) -> ServedDrafter:
        """Its settings and weights by their names; TrainingError if they would feed it otherwise."""
        ...


def served_block(
    drafter: Drafter,
    block: EagleBlock,
    *,
    visual: Visual,
    after_image: AfterImage = "visual",
    compression: Compression | None = None,
    guesses_GD: Tensor | None = None,
    placeholder_D: Tensor | None = None,
    normed: bool = False,
    layers: tuple[int, ...] = (),
    draft_tokens: int = 0,
    more: Mapping[str, Tensor] | None = None,
) -> ServedDrafter:
    """A drafter that is one `EagleBlock` on the target's last state, for the plugin of vLLM.

    `guesses_GD` is added to entries by the number of guesses before them, the last row to all later ones;
    `placeholder_D` is what all guesses enter as. The inputs of `layers` join the last state. `more` are the
    weights that `compression`, `normed` and `layers` need. TrainingError when the plugin does not have its
    rotary positions.
    """
    positions = drafter.config.positions
    if positions == "target" or (compression is not None and positions != "expanded"):
        raise unserved("positions", positions, "expanded")
    layer, weights = block.layer, layer_weights(block.layer, "layer")
    if layer.input_norm is not None:
        weights["layer.input_layernorm.weight"] = layer.input_norm.weight
    if guesses_GD is not None:
        weights["guesses"] = guesses_GD
    if placeholder_D is not None:
        weights["placeholder"] = placeholder_D
    return ServedDrafter(
        settings={
            "architectures": ["Eagle3BlockVlmdistill" if layers else "EagleVlmdistill"],  # prefixes of vLLM
            "qkv_bias": layer.qkv_proj.bias is not None,
            **layer_settings(drafter, layer),
            **({"eagle_aux_hidden_state_layer_ids": [*layers]} if layers else {}),
        },
        weights={"fc.weight": block.fc.weight, "fc.bias": block.fc.bias, **weights, **(more or {})},
        feeding=Feeding(
            drafter=type(drafter).__module__.rpartition(".")[2],
            visual=visual,
            compression=compression,
            after_image=after_image,
            positions=positions,
            guesses=0 if guesses_GD is None else len(guesses_GD),
            placeholder=placeholder_D is not None,
            normed=normed,
            depths=len(layers),
            input_norm=layer.input_norm is not None,
            draft_tokens=draft_tokens,
        ),
        method="eagle3" if layers else "eagle",  # which has vLLM keep the states of several layers
        draft_vocabulary=drafter.info.vocab_size,
        layers=layers,
    )


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
    heads = [count * layer.head_dim for count in (layer.heads, layer.kv_heads, layer.kv_heads)]
    gate, up = layer.gate_up_proj.weight.chunk(2)
    weights = {
        "self_attn.o_proj.weight": layer.o_proj.weight,
        "post_attention_layernorm.weight": layer.post_attention_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down_proj.weight,
    }
    for kind in ("weight", "bias"):
        if (value := getattr(layer.qkv_proj, kind)) is not None:
            for name, part in zip("qkv", torch.split(value, heads), strict=True):
                weights[f"self_attn.{name}_proj.{kind}"] = part
    return {f"{prefix}.{name}": value for name, value in weights.items()}
