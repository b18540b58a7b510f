"""Small genuine checkpoints of families that this project has no line about.

`checkpoint(family, folder)` writes what a hub would hold: config, weights, tokenizer, processor and chat
template. Sizes are those of `tiny`; `dense` and `mixed` say only what is peculiar to each family.
"""

from copy import deepcopy
from pathlib import Path

import transformers
from transformers.utils import is_num2words_available, is_torchvision_available

from tests.tiny import QWEN_TEMPLATE, text_sizes, tokenizer, weights, write_json
from tests.tiny_families import dense, mixed
from tests.tiny_families.parts import IMAGE_IN_TEMPLATE, Parts

FAMILIES: dict[str, Parts] = {
    name.lower(): parts
    for module in (dense, mixed)
    for name, parts in vars(module).items()
    if isinstance(parts, Parts)
}
NEED_TORCHVISION = ("cohere2_vision", "gemma4", "kimi_k25", "lfm2_vl", "minicpmv4_6", "mistral3")
CHAT = PAD, EOS, _ = "<|endoftext|>", "<|im_end|>", "<|im_start|>"


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
    parts = deepcopy(FAMILIES[family])  # transformers may write into it
    template = QWEN_TEMPLATE.replace(IMAGE_IN_TEMPLATE, parts.image)
    tokens = (*CHAT, *parts.tokens.split())
    tokenizer(
        folder,
        tokens,
        vocabulary,
        template,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=parts.named,
    )
    kind = parts.processed or parts.model
    images = {"image_processor_type": f"{kind}ImageProcessor", **parts.image_processor}
    write_json(folder, "preprocessor_config.json", **images)
    write_json(folder, "processor_config.json", processor_class=f"{kind}Processor", **parts.processor)
    config = getattr(transformers, f"{parts.model}Config")(
        text_config={**text_sizes(vocabulary, layers), **parts.text},
        vision_config=parts.vision,
        tie_word_embeddings=False,
        **parts.config,
        **{setting: tokens.index(token) for setting, token in parts.ids.items()},
    )
    weights(folder, seed, std)(
        getattr(transformers, f"{parts.model}ForConditionalGeneration"), config, [1, 0]
    )
    return folder
