"""Families whose layers all attend, and have one MLP."""

from dataclasses import replace

from tests.tiny import NORMED, Parts, grid, mrope
from tests.tiny_families.parts import PATCHES, SIGLIP, SMALL, SQUARE, VIT

TILES = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": SQUARE,
    "crop_to_patches": True,
    "max_patches": 4,
}
INTERNVL = Parts(  # tiles, pixel shuffle, a Qwen2 text model
    "InternVL",
    "<img> </img> <IMG_CONTEXT> <video>",
    "<IMG_CONTEXT>\n",
    {"image_token_id": "<IMG_CONTEXT>"},
    image_processor=TILES,
    processor={"image_seq_length": 4},
    text={"model_type": "qwen2"},
    vision={**VIT, "image_size": [28, 28], "patch_size": [7, 7]},
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
MISTRAL3 = Parts(  # images of any size in rows, a token at the end of each row
    "Mistral3",
    "[IMG] [IMG_BREAK] [IMG_END]",
    "[IMG]",
    {"image_token_index": "[IMG]"},
    processed="Pixtral",
    image_processor={
        **NORMED,
        "patch_size": {"height": 14, "width": 14},
        "size": {"longest_edge": 84},
    },
    processor={"patch_size": 14, "spatial_merge_size": 2},
    text={"model_type": "mistral", "head_dim": 8, "sliding_window": None},
    vision={"model_type": "pixtral", **SMALL, "image_size": 84, "patch_size": 14},
)
GEMMA3 = Parts(  # sliding windows, image tokens that see each other, scaled embeddings
    "Gemma3",
    "<start_of_image> <end_of_image> <image_soft_token> \n \n\n \n\n\n \n\n\n\n",
    "<start_of_image>",
    {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    image_processor={"size": SQUARE},
    processor={"image_seq_length": 4},
    text={
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    vision=SIGLIP,
    config={"mm_tokens_per_image": 4},
    named={
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)
IDEFICS3 = Parts(  # tiles with text between them
    "Idefics3",
    "<image> <fake_token_around_image> <global-img> <end_of_utterance> "
    + " ".join(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)),
    "<image>",
    {"image_token_id": "<image>"},
    image_processor={
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
    },
    processor={"image_seq_len": 4},
    text={"model_type": "llama"},
    vision={**VIT, "model_type": "idefics3_vision"},
    config={"scale_factor": 2},
)
SMOLVLM = replace(  # Idefics3's layers behind another processor, which needs num2words
    IDEFICS3, model="SmolVLM", vision={**VIT, "model_type": "smolvlm_vision"}
)
GLM4V = Parts(  # M-RoPE over a part of each head
    "Glm4v",
    "<|begin_of_image|> <|end_of_image|> <|image|> <|begin_of_video|> <|end_of_video|> <|video|>",
    "<|begin_of_image|><|image|><|end_of_image|>",
    {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    image_processor={
        **grid(14),
        **NORMED,
        "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 40},
    },
    text={
        "head_dim": 16,
        "rope_parameters": mrope([1, 1, 2], partial_rotary_factor=0.5),
        "attention_bias": True,  # as published; vLLM drops the bias without it
    },
    vision={**PATCHES, "patch_size": 14, "image_size": 56},
)
GLM46V = replace(  # GLM-4.1V's layers behind another processor
    GLM4V,
    model="Glm46V",
    text={**GLM4V.text, "model_type": "glm4v_text"},
    vision={**GLM4V.vision, "model_type": "glm4v_vision"},
)
AYA_VISION = Parts(  # Cohere's text model: parallel blocks, no positions in some layers, scaled logits
    "AyaVision",
    "<|START_OF_IMG|> <|END_OF_IMG|> <|IMG_PATCH|> <image> <|IMG_LINE_BREAK|> TILE TILE_GLOBAL",
    "<image>",
    {"image_token_index": "<|IMG_PATCH|>"},
    image_processor=TILES,
    processor={"patch_size": 7, "img_size": 28, "downsample_factor": 2},
    text={
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "tie_word_embeddings": True,  # as published; vLLM has no other head
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "logit_scale": 0.25,
    },
    vision=SIGLIP,
    config={"downsample_factor": 2, "tie_word_embeddings": True},
)
COHERE2_VISION = replace(  # the same text model; tiles with a token after each
    AYA_VISION,
    model="Cohere2Vision",
    image="<|IMG_PATCH|>",
    ids={"image_token_id": "<|IMG_PATCH|>"},
    image_processor={
        "size": SQUARE,
        "max_patches": 4,
        "patch_size": 2,  # the root of the number of tokens of a tile
    },
    processor={},
    config={**AYA_VISION.config, "alignment_intermediate_size": 64},
    named={
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
)
GEMMA4 = Parts(  # windows; heads of another size without them; an embedding for each layer; limited logits
    "Gemma4",
    "<|image> <image|> <|image|> <|video|> <|audio> <audio|> <|audio|>",
    "<|image|>",
    {
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
        "audio_token_id": "<|audio|>",
    },
    image_processor={"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 4},
    processor={"image_seq_length": 70},
    text={
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
    },
    vision={
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 8,
        "pooling_kernel_size": 4,
        "position_embedding_size": 512,
        "default_output_length": 70,  # as published; vLLM has no default
    },
    config={"audio_config": None},
    named={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
)
