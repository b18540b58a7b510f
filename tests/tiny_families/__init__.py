"""Small genuine checkpoints of families that this project has no line about.

`checkpoint(family, folder)` writes what a hub would hold: config, weights, tokenizer, processor and chat
template. Sizes are those of `tiny`; `dense` and `mixed` say only what is peculiar to each family.
"""

from pathlib import Path

from transformers.utils import is_num2words_available, is_torchvision_available

from tests.tiny import Parts, write
from tests.tiny_families import dense, mixed

FAMILIES: dict[str, Parts] = {
    name.lower(): parts
    for module in (dense, mixed)
    for name, parts in vars(module).items()
    if isinstance(parts, Parts)
}
NEED_TORCHVISION = (
    "cohere2_vision",
    "gemma4",
    "kimi_k25",
    "lfm2_vl",
    "minicpmv4_6",
    "mistral3",
)


def runs_here(family: str) -> bool:
    """Whether the packages are here without which transformers has no processor of a family."""
    if family == "smolvlm":
        return bool(is_num2words_available())
    return family not in NEED_TORCHVISION or bool(is_torchvision_available())


def checkpoint(
    family: str,
    folder: Path,
    *,
    vocabulary: int = 320,
    layers: int = 3,
    seed: int = 0,
    std: float = 0.15,
) -> Path:
    """Write a checkpoint of `family` with random weights into `folder`; return it."""
    write(FAMILIES[family], folder, vocabulary, layers, seed, std)
    return folder
