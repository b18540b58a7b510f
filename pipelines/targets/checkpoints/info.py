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
    config, rows = text.config, model.get_output_embeddings().weight.shape[0]
    first = (getattr(config, "per_layer_config", None) or [config])[
        0
    ]  # layers of Gemma 4 differ in heads

    def fact(*names: str, default: Any = None) -> Any:
        """The first of these settings that the text model has: families name some of them differently."""
        found = (getattr(first, setting, None) for setting in names)
        value = next((one for one in found if one is not None), default)
        if value is None:
            raise TargetError(
                f"{name}: the configuration of the text model has no {names[0]}"
            )
        return value

    heads = fact("num_attention_heads")
    queries = (
        getattr(getattr(layer, "self_attn", None), "q_proj", None)
        for layer in text.layers
    )
    query = next(filter(None, queries), None)
    return TargetInfo(
        name=name,
        family=family.name,
        hidden_size=fact("hidden_size"),
        intermediate_size=fact("intermediate_size", "moe_intermediate_size"),
        num_layers=len(text.layers),
        num_heads=heads,
        num_kv_heads=fact("num_key_value_heads", default=heads),
        head_dim=fact("head_dim", default=fact("hidden_size") // heads),
        vocab_size=rows,
        rms_norm_eps=fact("rms_norm_eps", "norm_eps", "layer_norm_eps"),
        rope_theta=_rope_theta(fact("rope_parameters")),
        hidden_act=fact("hidden_act", "hidden_activation", default="silu"),
        attention_bias=query is not None and query.bias is not None,
        max_position=fact("max_position_embeddings"),
        eos_ids=_eos_ids(name, rows, config, model.generation_config, tokenizer),
        visual_ids=family.visual_ids(model.config),
    )


def _rope_theta(parameters: Any) -> float:
    """The rotary base; that of the layers that attend to everything, if kinds of layers have their own."""
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def _eos_ids(
    name: str, rows: int, config: Any, generation: Any, tokenizer: Any
) -> tuple[int, ...]:
    """The EOS ids of the generation config, or else those of the configuration and the tokenizer.

    The configuration comes second: its default for its class may be wrong or None.
    """

    def named(source: Any) -> list[int]:
        given = getattr(source, "eos_token_id", None)
        ids = given if isinstance(given, list | tuple) else (given,)
        if not all(isinstance(i, int | None) for i in ids):
            raise TargetError(
                f"{name}: eos_token_id is {given!r}, not a token id or a list of them"
            )
        return [int(i) for i in ids if i is not None and i < rows]

    known = named(generation) or [*named(config), *named(tokenizer)]
    if not known and tokenizer is not None:
        raise TargetError(
            f"{name} names no end-of-sequence token: add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(known))
