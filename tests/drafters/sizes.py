"""The shapes of real targets, for what can be counted without their weights."""

from vlmdistill.stores.schema import TargetInfo

REAL: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    # hidden, MLP, query heads, key heads, layers, vocabulary, bias
    "LLaVA-1.6 7B": (4096, 11008, 32, 32, 32, 32064, False),
    "LLaVA-1.6 13B": (5120, 13824, 40, 40, 40, 32064, False),
    "Qwen2.5-VL 3B": (2048, 11008, 16, 2, 36, 151936, True),
    "Qwen2.5-VL 7B": (3584, 18944, 28, 4, 28, 152064, True),
}


def real(name: str) -> TargetInfo:
    hidden, intermediate, heads, kv_heads, layers, vocabulary, bias = REAL[name]
    return TargetInfo(
        name=name,
        family="qwen2_5_vl" if bias else "llava_next",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        vocab_size=vocabulary,
        rms_norm_eps=1e-6 if bias else 1e-5,
        rope_theta=1e6 if bias else 1e4,
        hidden_act="silu",
        attention_bias=bias,
        max_position=4096,
        eos_ids=(2,),
        visual_ids=(3,),
    )
