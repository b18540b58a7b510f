"""Reads the facts that a drafter is built from off a loaded target."""

from typing import Any

from vlmdistill.pipelines.targets.families.family import Family
from vlmdistill.pipelines.targets.families.text_model import text_model
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import TargetInfo


def target_info(name: str, family: Family, model: Any, tokenizer: Any) -> TargetInfo:
    """The facts of a target; TargetError if it names no EOS token.

    Without a tokenizer, which may name one, `eos_ids` may stay empty.
    """
    text = text_model(model)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    layer_configs = getattr(text.config, "per_layer_config", None)
    # The layers of Gemma 4 differ in heads: a drafter is built like the first.
    config = layer_configs[0] if layer_configs else text.config

    def fact(*names: str, default: Any = None) -> Any:
        """The first of these settings that the text model has: families name some differently."""
        for setting in names:
            value = getattr(config, setting, None)
            if value is not None:
                return value
        if default is None:
            raise TargetError(
                f"{name}: the configuration of the text model has no {names[0]}"
            )
        return default

    heads = fact("num_attention_heads")
    hidden_size = fact("hidden_size")
    eos_ids = _eos_ids(
        name, vocab_size, text.config, model.generation_config, tokenizer
    )
    return TargetInfo(
        name=name,
        family=family.name,
        hidden_size=hidden_size,
        intermediate_size=fact("intermediate_size", "moe_intermediate_size"),
        num_layers=len(text.layers),
        num_heads=heads,
        num_kv_heads=fact("num_key_value_heads", default=heads),
        head_dim=fact("head_dim", default=hidden_size // heads),
        vocab_size=vocab_size,
        rms_norm_eps=fact("rms_norm_eps", "norm_eps", "layer_norm_eps"),
        rope_theta=_rope_theta(fact("rope_parameters")),
        hidden_act=fact("hidden_act", "hidden_activation", default="silu"),
        attention_bias=_attention_bias(text),
        max_position=fact("max_position_embeddings"),
        eos_ids=eos_ids,
        visual_ids=family.visual_ids(model.config),
    )


def _attention_bias(text: Any) -> bool:
    """Whether the query projection of the first attention layer has a bias."""
    for layer in text.layers:
        attention = getattr(layer, "self_attn", None)
        if query := getattr(attention, "q_proj", None):
            return query.bias is not None
    return False


def _rope_theta(parameters: Any) -> float:
    """The rotary base; that of the layers that attend to everything, if kinds of layers have their own."""
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def _eos_ids(
    name: str, vocab_size: int, config: Any, generation: Any, tokenizer: Any
) -> tuple[int, ...]:
    """The EOS ids of the generation config, else of the configuration and the tokenizer.

    The configuration comes second: its default for its class may be wrong or None.
    """

    def ids_of(source: Any) -> list[int]:
        setting = getattr(source, "eos_token_id", None)
        ids = setting if isinstance(setting, list | tuple) else (setting,)
        if not all(isinstance(i, int | None) for i in ids):
            raise TargetError(
                f"{name}: eos_token_id is {setting!r}, not a token id or a list of them"
            )
        return [int(i) for i in ids if i is not None and i < vocab_size]

    eos_ids = ids_of(generation) or [*ids_of(config), *ids_of(tokenizer)]
    if not eos_ids and tokenizer is not None:
        raise TargetError(
            f"{name} names no end-of-sequence token: add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(eos_ids))
