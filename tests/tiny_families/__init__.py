"""Small genuine checkpoints of families that this project has no line about.

`checkpoint(family, folder)` writes what a hub would hold: config, weights, tokenizer, processor and chat
template. Sizes are those of `tiny`; each builder says only what is peculiar to its family.
"""

from collections.abc import Callable
from pathlib import Path

import transformers
from transformers.utils import is_num2words_available, is_torchvision_available

from tests.tiny import QWEN_TEMPLATE, text_sizes, tokenizer, weights, write_json
from tests.tiny_families import dense, mixed
from tests.tiny_families.parts import CHAT, EOS, IMAGE_IN_TEMPLATE, PAD, Parts

BUILDERS: dict[str, Callable[[], Parts]] = {
    one.__name__: one
    for one in (
        dense.aya_vision,
        dense.cohere2_vision,
        dense.gemma3,
        dense.gemma4,
        dense.glm46v,
        dense.glm4v,
        dense.idefics3,
        dense.internvl,
        dense.mistral3,
        dense.smolvlm,
        mixed.glm4v_moe,
        mixed.kimi_k25,
        mixed.lfm2_vl,
        mixed.minicpmv4_6,
        mixed.qwen3_5,
        mixed.qwen3_5_moe,
        mixed.qwen3_vl_moe,
    )
}


NEED_TORCHVISION = ("cohere2_vision", "gemma4", "kimi_k25", "lfm2_vl", "minicpmv4_6", "mistral3")


def runs_here(family: str) -> bool:
    """Whether the packages are here without which transformers has no processor of a family."""
    if family == "smolvlm":
        return bool(is_num2words_available())
    return family not in NEED_TORCHVISION or bool(is_torchvision_available())


def checkpoint(
    family: str, folder: Path, *, vocabulary: int = 320, layers: int = 3, seed: int = 0, std: float = 0.15
) -> Path:
    """Write a checkpoint of `family` with random weights into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = BUILDERS[family]()
    template = QWEN_TEMPLATE.replace(IMAGE_IN_TEMPLATE, parts.image)
    tokenizer(
        folder,
        (*CHAT, *parts.tokens),
        vocabulary,
        template,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=parts.named,
    )
    write_json(folder, "preprocessor_config.json", **parts.image_processor)
    write_json(folder, "processor_config.json", **parts.processor)
    config = getattr(transformers, f"{parts.model}Config")(
        text_config={**text_sizes(vocabulary, layers), **parts.text},
        vision_config=parts.vision,
        tie_word_embeddings=False,
        **parts.config,
    )
    weights(folder, seed, std)(
        getattr(transformers, f"{parts.model}ForConditionalGeneration"), config, [1, 0]
    )
    return folder
