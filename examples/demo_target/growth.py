"""Makes a wider and deeper target that computes what a trained one computes, to be trained further.

Each state is held twice: [h ; h]. Projections of it sum over both copies, with opposite noise that cancels
until training makes the copies differ. New layers add nothing at first (Net2Net, Chen et al. 2016).
"""

from copy import deepcopy

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration


def grow(
    model: Qwen2_5_VLForConditionalGeneration, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """A model of twice the width and layers with the same logits; its vision tower stays as wide."""
    settings = deepcopy(model.config)
    text = settings.text_config
    text.hidden_size, text.intermediate_size = (
        2 * text.hidden_size,
        2 * text.intermediate_size,
    )
    text.num_attention_heads, text.num_key_value_heads = (
        2 * text.num_attention_heads,
        2 * text.num_key_value_heads,
    )
    text.num_hidden_layers = 2 * text.num_hidden_layers
    text.layer_types = 2 * text.layer_types
    settings.vision_config.out_hidden_size = text.hidden_size
    grown = Qwen2_5_VLForConditionalGeneration(settings)
    generator = torch.Generator().manual_seed(seed)
    own = grown.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            head, _, rest = name.partition("language_model.layers.")
            if rest:  # the layers of the model are each second one
                number, _, part = rest.partition(".")
                name = f"{head}language_model.layers.{2 * int(number)}.{part}"
            own[name].copy_(_widened(name, value, own[name].shape, generator))
        for layer in grown.model.language_model.layers[1::2]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    grown.generation_config = model.generation_config
    return grown


def _widened(
    name: str, value: Tensor, shape: torch.Size, generator: torch.Generator
) -> Tensor:
    if value.shape == shape:
        return value
    if "embed_tokens" in name or "lm_head" in name:
        return torch.cat([value, value], dim=1)
    if value.ndim == 1 or "merger" in name:  # the LM head sums over both copies
        doubled = torch.cat([value, value])
        return doubled / 2 if name.endswith("language_model.norm.weight") else doubled
    rows = torch.cat([value, value]) / 2
    noise = rows.std() * torch.randn(rows.shape, generator=generator)
    return torch.cat([rows + noise, rows - noise], dim=1)
