"""The published models: what is shipped of each makes the genuine class in its sizes, without weights."""

from pathlib import Path
from typing import Any

import pytest

from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.info import target_info
from vlmdistill.pipelines.targets.checkpoints.registry import HUB, REGISTRY, shipped
from vlmdistill.pipelines.targets.families import FAMILIES
from vlmdistill.pipelines.targets.loading import skeleton

# Layers, width, MLP, heads, key heads, vocabulary, positions, rotary base, one table serves twice.
SIZES: dict[str, tuple[int, int, int, int, int, int, int, float, bool]] = {
    "llava-1.5-7b": (32, 4096, 11008, 32, 32, 32064, 4096, 1e4, False),
    "llava-1.5-13b": (40, 5120, 13824, 40, 40, 32064, 4096, 1e4, False),
    "llava-next-7b": (32, 4096, 11008, 32, 32, 32064, 4096, 1e4, False),
    "llava-next-13b": (40, 5120, 13824, 40, 40, 32064, 4096, 1e4, False),
    "llava-onevision-7b": (28, 3584, 18944, 28, 4, 152128, 32768, 1e6, False),
    "qwen2-vl-7b": (28, 3584, 18944, 28, 4, 152064, 32768, 1e6, False),
    "qwen2.5-vl-3b": (36, 2048, 11008, 16, 2, 151936, 128000, 1e6, True),
    "qwen2.5-vl-7b": (28, 3584, 18944, 28, 4, 152064, 128000, 1e6, False),
    "qwen2.5-vl-32b": (64, 5120, 27648, 40, 8, 152064, 128000, 1e6, False),
    "qwen3-vl-4b": (36, 2560, 9728, 32, 8, 151936, 262144, 5e6, True),
    "qwen3-vl-8b": (36, 4096, 12288, 32, 8, 151936, 262144, 5e6, False),
}
SECTIONS = {
    "qwen2_vl": [16, 24, 24],
    "qwen2_5_vl": [16, 24, 24],
    "qwen3_vl": [24, 20, 20],
}  # of M-RoPE


def config(name: str) -> Path:
    path = shipped(name)
    assert path is not None
    return path


def test_every_name_has_its_configuration_and_no_other_is_shipped() -> None:
    folder = config("qwen2.5-vl-7b").parent
    named = {path.stem for path in folder.iterdir()} - {packaged.NAME}
    assert named == set(HUB) == set(SIZES)
    assert all(shipped(hub) == shipped(name) for name, hub in HUB.items())
    assert shipped("someone/some-model") is None


@pytest.mark.parametrize("name", HUB)
def test_a_published_model_is_built_without_weights(name: str) -> None:
    model: Any = skeleton(config(name))
    published = REGISTRY[name]
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert model.config.model_type == published.model_type
    assert [type(model).__name__] == model.config.architectures
    assert sum(weight.numel() for weight in model.parameters()) == published.parameters

    family = FAMILIES[published.model_type].load()
    info = target_info(name, family, model, None)
    embed, head = (
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    assert (
        info.num_layers,
        info.hidden_size,
        info.intermediate_size,
        info.num_heads,
        info.num_kv_heads,
        info.vocab_size,
        info.max_position,
        info.rope_theta,
        head is embed,
    ) == SIZES[name]
    assert embed.shape == head.shape == (info.vocab_size, info.hidden_size)
    assert info.head_dim == 128
    attention = model.model.language_model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (info.num_heads * 128, info.hidden_size)
    assert attention.k_proj.weight.shape == (info.num_kv_heads * 128, info.hidden_size)
    assert info.attention_bias == (
        family.model_type in ("llava_onevision", "qwen2_vl", "qwen2_5_vl")
    )
    assert info.rms_norm_eps == (
        1e-5 if "llava-1.5" in name or "next" in name else 1e-6
    )
    assert info.eos_ids == ((2,) if info.vocab_size == 32064 else (151645,))
    assert all(0 <= visual < info.vocab_size for visual in info.visual_ids)
    assert set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= {
        "full_attention"
    }
    rope = model.config.get_text_config().rope_parameters
    assert rope["rope_type"] == "default"
    assert rope.get("mrope_section") == SECTIONS.get(family.model_type)
    assert rope.get("mrope_interleaved", False) == (family.model_type == "qwen3_vl")


@pytest.mark.parametrize("name", HUB)
def test_the_vision_tower_fits_the_text_model(name: str) -> None:
    model: Any = skeleton(config(name))
    vision, width = (
        model.config.vision_config,
        model.config.get_text_config().hidden_size,
    )
    tower = getattr(model.model, "visual", None)
    if tower is None:
        assert model.model.multi_modal_projector.linear_2.weight.shape[0] == width
        assert (vision.image_size // vision.patch_size) ** 2 == (
            729 if "onevision" in name else 576
        )
        assert model.config.image_token_id == (151646 if "onevision" in name else 32000)
        return
    parts = dict(tower.named_parameters())
    last = parts.get("merger.linear_fc2.weight", parts.get("merger.mlp.2.weight"))
    assert last is not None
    assert last.shape[0] == width
    assert vision.spatial_merge_size == vision.temporal_patch_size == 2
    assert model.config.image_token_id == 151655
    assert model.config.video_token_id == 151656
