"""Families with experts, or with layers that keep a state: linear attention and convolutions."""

from dataclasses import replace

from tests.tiny import HIDDEN, NORMED, Parts, mrope
from tests.tiny_families.dense import GLM4V
from tests.tiny_families.parts import EXPERTS, PATCHES, QWEN3, SMALL, VIT

ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}  # experts after the first layer
GLM4V_MOE = replace(
    GLM4V,
    model="Glm4vMoe",
    processed="Glm4v",
    # The last one as published; vLLM has no default.
    text={**GLM4V.text, **ROUTED, "attention_bias": False, "use_qk_norm": False},
)
QWEN3_VL_MOE = Parts(  # experts in each layer, deepstack, interleaved M-RoPE
    "Qwen3VLMoe",
    **QWEN3,
    text={
        "head_dim": 8,
        "rope_parameters": mrope([2, 1, 1], mrope_interleaved=True),
        "norm_topk_prob": True,  # as published; vLLM has no default
        **EXPERTS,
    },
    vision={
        **PATCHES,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
)
QWEN3_5 = Parts(  # linear attention in most layers
    "Qwen3_5",
    **QWEN3,
    text={
        "head_dim": 16,
        "rope_parameters": mrope(
            [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5
        ),
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    vision={**PATCHES, "num_position_embeddings": 64},
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model="Qwen3_5Moe",
    text={**QWEN3_5.text, **EXPERTS, "shared_expert_intermediate_size": 24},
)
LFM2_VL = Parts(  # short convolutions in most layers
    "Lfm2Vl",
    "<image> <|image_start|> <|image_end|> <|img_thumbnail|>",
    "<image>",
    {"image_token_id": "<image>"},
    image_processor={
        "tile_size": 64,
        "encoder_patch_size": 16,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_num_patches": 64,
        "min_tiles": 2,
        "max_tiles": 4,
    },
    text={
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_dim": HIDDEN,  # these three as published; vLLM has no default, and no other head
        "conv_dim": HIDDEN,
        "tie_word_embeddings": True,
        "block_multiple_of": 16,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    vision={
        "model_type": "siglip2_vision_model",
        **SMALL,
        "num_patches": 64,
        "patch_size": 16,
        "vision_use_head": False,
    },
    config={"projector_hidden_size": 48, "tie_word_embeddings": True},
)
MINICPMV4_6 = Parts(  # Qwen3.5's layers; an overview and slices, all in one row of patches
    "MiniCPMV4_6",
    "<image> </image> <slice> </slice> <image_id> </image_id> <|image_pad|> <|video_pad|>",
    "<|image_pad|>",
    {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    image_processor={"patch_size": 14, "scale_resolution": 112, "max_slice_nums": 4},
    text={**QWEN3_5.text, "model_type": "qwen3_5_text"},
    vision={
        **VIT,
        "num_hidden_layers": 3,
        "image_size": 112,
        "patch_size": 14,
        "insert_layer_id": 1,
    },
    config={"insert_layer_id": 1, "image_size": 112},
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
)
KIMI_K25 = Parts(  # DeepSeek V3's text model: latent attention, keys and values of two widths, experts
    "Kimi_K25",
    "<|media_begin|> <|media_content|> <|media_pad|> <|media_end|> <|kimi_k25_video_placeholder|>",
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    {
        "image_token_id": "<|media_pad|>",
        "video_token_id": "<|kimi_k25_video_placeholder|>",
        "vision_start_token_id": "<|media_begin|>",
        "vision_end_token_id": "<|media_end|>",
    },
    image_processor={
        **NORMED,
        "patch_size": 14,
        "merge_size": 2,
        "max_patches": 64,
        "size": {"max_height": 8, "max_width": 8},
    },
    text={
        **ROUTED,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    vision={**SMALL, "pos_emb_height": 8, "pos_emb_width": 8},
    config={"projection_hidden_size": 32},
    named={
        "image_token": "<|media_pad|>",
        "video_token": "<|kimi_k25_video_placeholder|>",
    },
)
