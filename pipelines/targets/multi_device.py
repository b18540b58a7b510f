"""A target on several devices: it generates and captures, but does not decode.

Only layers of the text model are on other devices than the first. The vision tower, embeddings, norm and LM
head are on the first device, so that states enter and leave there.
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

    `number_bytes` is the size of a parameter, `free` the free bytes of each device. TargetError if they do
    not suffice.
    """
    layers = dict(model.get_submodule(LAYERS).named_children())
    sizes = [
        number_bytes * sum(w.numel() for w in layer.parameters())
        for layer in layers.values()
    ]
    rest = number_bytes * sum(w.numel() for w in model.parameters()) - sum(sizes)
    budgets = [max(0, one - ROOM) for one in free]
    total = rest + sum(sizes)
    # Deepstack adds vision features to the states between the first layers.
    first = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    used, device = [rest] + [0] * (len(free) - 1), 0
    devices: dict[str, int | str] = dict.fromkeys(_outside(model), 0)
    for number, size in enumerate(sizes):
        share = total * budgets[device] / max(1, sum(budgets))
        if (
            number >= first
            and used[device] + size / 2 > share
            and device + 1 < len(free)
        ):
            device += 1
        used[device] += size
        devices[f"{LAYERS}.{number}"] = device
    if any(needed > budget for needed, budget in zip(used, budgets, strict=True)):
        have = ", ".join(f"{one / 2**30:.1f}" for one in free)
        raise TargetError(
            f"the weights take {total / 2**30:.1f} GiB and the GPUs have {have} GiB free, of which each "
            f"keeps {ROOM >> 30}: use more GPUs (to each worker: fewer --workers), or larger ones"
        )
    return devices


def _outside(model: Any) -> list[str]:
    """The parts of a model apart from the text layers, in as few names as possible."""
    parts: list[str] = []
    names = [name for name, _ in model.named_parameters()] + [
        name for name, _ in model.named_buffers()
    ]
    for name in names:
        if name.startswith(LAYERS + "."):
            continue
        words, common = name.split("."), LAYERS.split(".")
        depth = next(
            i for i, word in enumerate(words) if i >= len(common) or word != common[i]
        )
        parts.append(".".join(words[: depth + 1]))
    return list(dict.fromkeys(parts))
