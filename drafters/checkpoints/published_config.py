"""`config.json` of a published drafter: the shape of its layers, or why drafters here have no such layers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.stores.errors import TrainingError, one_line
from vlmdistill.stores.input_files import read_bytes

FOREIGN_SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
"""Switches of later EAGLE-3 trainers that compute something else."""
NESTED = "transformer_layer_config"
"""Where speculators has the layers' configuration."""
HEAD_WIDTHS = {"qwen3": 128}
"""The width of a head by `model_type` where `head_dim` is missing; else hidden_size / heads."""
PLAIN_AXES = "qwen2_vl"
"""The `model_type` of MSD's code, which gives all axes of M-RoPE the same position: that is plain RoPE."""

Size = Annotated[int, Meta(gt=0, le=1 << 20)]
Heads = Annotated[int, Meta(gt=0, le=1 << 10)]
Positive = Annotated[float, Meta(gt=0)]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The members of `config.json` that are read; missing ones are as in the authors' code."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(gt=0, le=256)] = 1
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    model_type: str = "llama"
    vocab_size: Size | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        if self.head_dim:
            return self.head_dim
        default = self.hidden_size // self.num_attention_heads
        return HEAD_WIDTHS.get(self.model_type, default)

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of the rotary positions beside `rope_theta`."""
        return self.rope_scaling or self.rope_parameters or {}


class _EagleConfig(msgspec.Struct):
    """`eagle_config` of SpecForge and SGLang, which numbers layers by the states that leave them."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


def read_config(folder: Path, kind: type[Drafter]) -> tuple[Mapping[str, Any], Layer]:
    """The `config.json` in a folder, and the layers that it describes.

    TrainingError if drafters here have no such layers.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(read_bytes(file))
        layer = msgspec.convert({**raw, **raw.get(NESTED, {})}, Layer)
        theta = layer.rope.get("rope_theta", layer.rope_theta)
        theta = msgspec.convert(theta, Positive)
        _check_numbers(layer, theta)
        eagle_config = msgspec.convert(raw.get("eagle_config") or {}, _EagleConfig)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TrainingError(
            f"{file} is not the configuration of a drafter ({one_line(error)})"
        ) from None
    _check_architecture(file, raw, layer, kind)
    left = eagle_config.eagle_aux_hidden_state_layer_ids
    if left is not None:
        entered = tuple(number + 1 for number in left)
        layer = msgspec.structs.replace(layer, eagle_aux_hidden_state_layer_ids=entered)
    return raw, msgspec.structs.replace(layer, rope_theta=theta)


def _check_numbers(layer: Layer, theta: float) -> None:
    """ValueError if the sizes do not fit together, or a number is not finite."""
    heads = layer.num_attention_heads
    width = layer.head_width
    if heads % layer.kv_heads or not width or width % 2:
        raise ValueError(f"num_attention_heads {heads} do not fit the other sizes")
    if not math.isfinite(theta + layer.rms_norm_eps):
        raise ValueError("a number is not finite")


def _check_architecture(
    file: Path, raw: Mapping[str, Any], layer: Layer, kind: type[Drafter]
) -> None:
    """TrainingError names a setting with which the layers compute something else."""
    default_types = ("sliding_attention",) if layer.use_sliding_window else ()
    if "sliding_attention" in (layer.layer_types or default_types):
        raise TrainingError(
            f"{file}: its layers have a sliding window of {layer.sliding_window} tokens, and those of "
            "drafters here see everything"
        )
    for switch in FOREIGN_SWITCHES:
        if raw.get(switch) and switch not in kind.published_switches:
            raise TrainingError(
                f"{file}: {switch}={raw[switch]} is another architecture than the authors'"
            )
    if layer.hidden_act != "silu":
        raise TrainingError(
            f"{file}: hidden_act is {layer.hidden_act}, and drafters here have silu"
        )
    if not _has_plain_rope(layer):
        raise TrainingError(
            f"{file}: rope_scaling {layer.rope} is not plain RoPE, which drafters here have"
        )


def _has_plain_rope(layer: Layer) -> bool:
    scaling = layer.rope.get("rope_type") or layer.rope.get("type") or "default"
    if layer.model_type == PLAIN_AXES:
        return scaling in ("default", "mrope")
    return scaling == "default" and "mrope_section" not in layer.rope
