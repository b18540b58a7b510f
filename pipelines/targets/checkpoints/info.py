"""Reads the facts that a drafter is built from off a loaded target."""

from typing import Any

from vlmdistill.pipelines.targets.families.family import Family
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import TargetInfo


def target_info(name: str, family: Family, model: Any, tokenizer: Any) -> TargetInfo:
    """The facts of a target; TargetError if it names no EOS token.

    Without a tokenizer, which may name one, `eos_ids` may stay empty.
    """
    config, text = model.config.get_text_config(), model.model.language_model
    attention, rows = text.layers[0].self_attn, model.get_output_embeddings().weight.shape[0]
    return TargetInfo(
        name=name,
        family=family.name,
        hidden_size=text.embed_tokens.weight.shape[1],
        intermediate_size=config.intermediate_size,
        num_layers=len(text.layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocab_size=rows,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        hidden_act=config.hidden_act,
        attention_bias=attention.q_proj.bias is not None,
        max_position=config.max_position_embeddings,
        eos_ids=_eos_ids(name, rows, config, model.generation_config, tokenizer),
        visual_ids=family.visual_ids(model.config),
    )


def _eos_ids(name: str, rows: int, config: Any, generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """The EOS ids of the generation config, or else those of the configuration and the tokenizer.

    The configuration comes second: its default for its class may be wrong or None.
    """

    def named(source: Any) -> list[int]:
        given = getattr(source, "eos_token_id", None)
        ids = given if isinstance(given, list | tuple) else (given,)
        if not all(isinstance(i, int | None) for i in ids):
            raise TargetError(f"{name}: eos_token_id is {given!r}, not a token id or a list of them")
        return [int(i) for i in ids if i is not None and i < rows]

    known = named(generation) or [*named(config), *named(tokenizer)]
    if not known and tokenizer is not None:
        raise TargetError(
            f"{name} names no end-of-sequence token: add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(known))
