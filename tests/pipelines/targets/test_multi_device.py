"""A target on several devices generates and captures as on one; decoding refuses it.

Only one device computes here; layers that are offloaded to disk take the part of other devices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from vlmdistill.pipelines.targets.checkpoints.registry import shipped
from vlmdistill.pipelines.targets.loading import load, load_for_capture, skeleton
from vlmdistill.pipelines.targets.multi_device import (
    LAYERS,
    ROOM,
    MultiDeviceTarget,
    device_map,
)
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature

Checkpoint = Callable[..., Path]
GIB = 2**30
FEATURES = frozenset(
    Feature(source, where)
    for source in ("embed", "layer1", "layer2", "hidden")
    for where in ("text", "visual")
)


def offloaded(folder: Path) -> dict[str, str]:
    """A device map with the last two layers elsewhere."""
    devices = device_map(skeleton(folder / "config.json"), 4, [100 * GIB])
    assert set(devices.values()) == {0}
    return {
        **dict.fromkeys(devices, "cpu"),
        f"{LAYERS}.1": "disk",
        f"{LAYERS}.2": "disk",
    }


def spread(folder: Path) -> TargetModel:
    target = load_for_capture(str(folder), layers=offloaded(folder))
    assert isinstance(target, MultiDeviceTarget)
    return target


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_states_and_responses_are_those_of_one_device(
    checkpoint: Checkpoint, family: str
) -> None:
    folder = checkpoint(family)
    one, several = load(str(folder)), spread(folder)
    talks = [
        tiny.message("what?", tiny.picture(60, 40)),
        tiny.message("and a longer one"),
    ]
    responses = [[7, 8, 9], [10, 11]]
    samples = [
        target.capture(
            [target.encode(talk) for talk in talks], responses, FEATURES, "float32"
        )
        for target in (one, several)
    ]
    for mine, theirs in zip(*samples, strict=True):
        for feature in FEATURES:
            np.testing.assert_allclose(
                mine.features[feature], theirs.features[feature], atol=1e-5
            )
    generated: list[Any] = [
        target.generate(
            [target.encode(talk) for talk in talks], max_new_tokens=5, temperature=0
        )
        for target in (one, several)
    ]
    assert generated[0] == generated[1]


def test_prompts_that_the_stock_model_cannot_batch_are_generated_separately(
    checkpoint: Checkpoint,
) -> None:
    folder = checkpoint("llava_onevision")
    talks = [tiny.message("what?", tiny.clip(count, 40, 40)) for count in (3, 5, 3)]
    generated: list[Any] = [
        target.generate(
            [target.encode(talk) for talk in talks], max_new_tokens=4, temperature=0
        )
        for target in (load(str(folder)), spread(folder))
    ]
    assert generated[0] == generated[1]


def test_decoding_is_refused_in_one_line(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen2_5_vl")
    with pytest.raises(TargetError, match="several devices"):
        load(str(folder), layers=offloaded(folder))


def test_a_device_map_of_one_device_decodes(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("llava")), layers={"": "cpu"})
    prompt = target.encode(tiny.message("what?"))
    assert len(target.prefill(prompt).ids_T) == prompt.length


@pytest.mark.parametrize("free", [[40, 40], [24, 24, 24, 24], [20, 60], [60, 20], [80]])
@pytest.mark.parametrize("name", ["qwen2.5-vl-32b", "llava-next-13b", "qwen3-vl-8b"])
def test_layers_are_split_in_order_and_evenly(name: str, free: list[int]) -> None:
    config = shipped(name)
    assert config is not None
    model: Any = skeleton(config)
    devices = device_map(model, 2, [one * GIB for one in free])
    weights = dict(model.named_parameters())
    owner = {
        weight: max(
            (part for part in devices if f"{weight}.".startswith(f"{part}.")), key=len
        )
        for weight in weights
    }
    taken = [0] * len(free)
    for weight, part in owner.items():
        taken[int(devices[part])] += 2 * weights[weight].numel()
    order = [
        int(devices[f"{LAYERS}.{n}"]) for n in range(len(model.get_submodule(LAYERS)))
    ]
    assert order == sorted(order)
    assert {
        device for part, device in devices.items() if not part.startswith(LAYERS)
    } == {0}
    assert all(order[n] == 0 for n in range(3)) or "qwen3" not in name, (
        "deepstack is added there"
    )
    assert all(mine <= one * GIB - ROOM for mine, one in zip(taken, free, strict=True))
    if "32b" in name:
        share = [
            mine / (one * GIB - ROOM) for mine, one in zip(taken, free, strict=True)
        ]
        assert max(share) - min(share) < 0.1


def test_too_little_memory_is_an_error_with_numbers() -> None:
    config = shipped("qwen2.5-vl-32b")
    assert config is not None
    with pytest.raises(
        TargetError, match=r"take 62\.3 GiB and the GPUs have 24\.0, 24\.0 GiB free"
    ) as caught:
        device_map(skeleton(config), 2, [24 * GIB, 24 * GIB])
    assert "fewer --workers" in str(caught.value)
