"""Families whose layers all attend, and have one MLP."""

from tests.tiny import mrope
from tests.tiny_families.parts import GRID, PATCHES, SIGLIP, SMALL, SQUARE, VIT, Parts, ids


def internvl() -> Parts:
    """Tiles, pixel shuffle, a Qwen2 text model."""
    parts = Parts(
        "InternVL",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SQUARE,
            "crop_to_patches": True,
            "max_patches": 4,
        },
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>\n",
        text={"model_type": "qwen2"},
        vision={**VIT, "image_size": [28, 28], "patch_size": [7, 7]},
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )
    parts.config = ids(parts, image_token_id="<IMG_CONTEXT>")
    return parts


def mistral3() -> Parts:
    """Images of any size in rows, a token at the end of each row."""
    parts = Parts(
        "Mistral3",
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 14, "width": 14},
            "size": {"longest_edge": 84},
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        text={"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        vision={"model_type": "pixtral", **SMALL, "image_size": 84, "patch_size": 14},
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    )
    parts.config = ids(parts, image_token_index="[IMG]")
    return parts


def gemma3() -> Parts:
    """Sliding windows, image tokens that see each other, scaled embeddings."""
    parts = Parts(
        "Gemma3",
        {"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        text={
            "model_type": "gemma3_text",
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision=SIGLIP,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    parts.config = {
        "mm_tokens_per_image": 4,
        **ids(
            parts,
            image_token_index="<image_soft_token>",
            boi_token_index="<start_of_image>",
            eoi_token_index="<end_of_image>",
        ),
    }
    return parts


def idefics3() -> Parts:
    """Tiles with text between them."""
    rows = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
    parts = Parts(
        "Idefics3",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows),
        "<image>",
        text={"model_type": "llama"},
        vision={**VIT, "model_type": "idefics3_vision"},
        config={"scale_factor": 2},
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    )
    parts.config |= ids(parts, image_token_id="<image>")
    return parts


def glm4v() -> Parts:
    """M-RoPE over a part of each head."""
    parts = Parts(
        "Glm4v",
        {
            **GRID,
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 40},
        },
        (
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
            "<|video|>",
        ),
        "<|begin_of_image|><|image|><|end_of_image|>",
        text={"head_dim": 16, "rope_parameters": mrope([1, 1, 2], partial_rotary_factor=0.5)},
        vision={**PATCHES, "patch_size": 14, "image_size": 56},
        processor={"processor_class": "Glm4vProcessor"},
    )
    parts.config = ids(
        parts,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )
    return parts


def aya_vision() -> Parts:
    """Cohere's text model: parallel blocks, no positions in some layers, scaled logits."""
    parts = Parts(
        "AyaVision",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SQUARE,
            "crop_to_patches": True,
            "max_patches": 4,
        },
        (
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_PATCH|>",
            "<image>",
            "<|IMG_LINE_BREAK|>",
            "TILE",
            "TILE_GLOBAL",
        ),
        "<image>",
        text={
            "model_type": "cohere2",
            "head_dim": 8,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "logit_scale": 0.25,
        },
        vision=SIGLIP,
        config={"downsample_factor": 2},
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": 7,
            "img_size": 28,
            "downsample_factor": 2,
        },
    )
    parts.config |= ids(parts, image_token_index="<|IMG_PATCH|>")
    return parts


def cohere2_vision() -> Parts:
    """The same text model; tiles with a token after each."""
    parts = aya_vision()
    parts.model = "Cohere2Vision"
    parts.image_processor = {
        "image_processor_type": "Cohere2VisionImageProcessor",
        "size": SQUARE,
        "max_patches": 4,
        "patch_size": 2,  # the root of the number of tokens of a tile
    }
    parts.image = "<|IMG_PATCH|>"
    parts.config = {
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
        **ids(parts, image_token_id="<|IMG_PATCH|>"),
    }
    parts.processor = {"processor_class": "Cohere2VisionProcessor"}
    parts.named = {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    return parts


def glm46v() -> Parts:
    """GLM-4.1V's layers behind another processor."""
    parts = glm4v()
    parts.model = "Glm46V"
    parts.image_processor["image_processor_type"] = "Glm46VImageProcessor"
    parts.text["model_type"], parts.vision["model_type"] = "glm4v_text", "glm4v_vision"
    parts.processor = {"processor_class": "Glm46VProcessor"}
    return parts


def smolvlm() -> Parts:
    """Idefics3's layers behind another processor, which needs num2words."""
    parts = idefics3()
    parts.model = "SmolVLM"
    parts.image_processor["image_processor_type"] = "SmolVLMImageProcessor"
    parts.vision["model_type"] = "smolvlm_vision"
    parts.processor["processor_class"] = "SmolVLMProcessor"
    return parts


def gemma4() -> Parts:
    """Windows; heads of another size in layers without; an embedding for each layer; limited logits."""
    parts = Parts(
        "Gemma4",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 8,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 4,
        },
        ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"),
        "<|image|>",
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
        },
        processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
        named={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
    )
    parts.config = {
        "audio_config": None,
        **ids(
            parts,
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            boa_token_id="<|audio>",
            eoa_token_index="<audio|>",
            audio_token_id="<|audio|>",
        ),
    }
    return parts
