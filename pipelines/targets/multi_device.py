"""A target on several devices: it generates and captures, but does not decode.

Only layers of the text model are on other devices than the first. The vision tower,
embeddings, norm and LM head are on the first, so that states enter and leave there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.stores.errors import TargetError

LAYERS = "model.language_model.layers"
ROOM = 2 << 30  # bytes of each device kept free of weights: for states, keys and values
DeviceMap = Mapping[str, int | str]


class MultiDeviceTarget(TargetModel):
    """A target that is too large for one device. It generates by the stock `generate`."""


def device_map(
    model: Any, number_bytes: int, free: Sequence[int]
) -> dict[str, int | str]:
    """The device of each part of `model`: layers in order, each device filled to the same share.

    `number_bytes` is the size of a parameter, `free` the free bytes of each device.
    TargetError if they do not suffice.
    """
    layers = model.get_submodule(LAYERS).children()
    sizes = [number_bytes * _parameters(layer) for layer in layers]
    total = number_bytes * _parameters(model)
    budgets = [max(0, free_bytes - ROOM) for free_bytes in free]
    all_budgets = max(1, sum(budgets))
    shares = [total * budget / all_budgets for budget in budgets]

    # Deepstack adds vision features to the states between the first layers.
    vision = model.config.vision_config
    first_to_move = len(getattr(vision, "deepstack_visual_indexes", ()))

    devices: dict[str, int | str] = dict.fromkeys(_outside(model), 0)
    used = [0] * len(free)
    used[0] = total - sum(sizes)
    device = 0
    for number, size in enumerate(sizes):
        is_full = used[device] + size / 2 > shares[device]
        has_next = device + 1 < len(free)
        if number >= first_to_move and is_full and has_next:
            device += 1
        used[device] += size
        devices[f"{LAYERS}.{number}"] = device
    for used_bytes, budget in zip(used, budgets, strict=True):
        if used_bytes > budget:
            raise _too_large(total, free)
    return devices


def _parameters(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _too_large(total: int, free: Sequence[int]) -> TargetError:
    """The error for weights of `total` bytes that do not fit into the `free` ones."""
    free_gib = ", ".join(f"{free_bytes / 2**30:.1f}" for free_bytes in free)
    total_gib = total / 2**30
    return TargetError(
        f"the weights take {total_gib:.1f} GiB and the GPUs have {free_gib} GiB free, of "
        f"which each keeps {ROOM >> 30}: use more GPUs (to each worker: fewer "
        "--workers), or larger ones"
    )


def _outside(model: Any) -> list[str]:
    """The parts of a model apart from the text layers, in as few names as possible."""
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers()]
    outside = [name for name in names if not name.startswith(LAYERS + ".")]
    return list(dict.fromkeys(map(_branch, outside)))


def _branch(name: str) -> str:
    """The shortest prefix of a name that is not a prefix of the layers' name."""
    words = name.split(".")
    layers_words = LAYERS.split(".")
    depth = 0
    while words[: depth + 1] == layers_words[: depth + 1]:
        depth += 1
    return ".".join(words[: depth + 1])
