"""A target on several devices: captured and answering as on one, refused for decoding, its layers shared.

There is one device here that computes; layers that lie on the disk until they run stand for other ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.catalogue import shipped
from vlmdistill.pipelines.targets.loading import load, skeleton
from vlmdistill.pipelines.targets.spread import LAYERS, ROOM, device_map
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature

Checkpoint = Callable[..., Path]
GIB = 2**30
FEATURES = frozenset(
    Feature(source, where)
    for source in ("embed", "layer1", "layer2", "hidden")
    for where in ("text", "visual")
)


def spread(folder: Path) -> VisionLanguageTarget:
    """The last two layers lie elsewhere."""
    places = device_map(skeleton(folder / "config.json"), 4, [100 * GIB])
    assert set(places.values()) == {0}
    here = dict.fromkeys(places, "cpu")
    return load(str(folder), layers={**here, f"{LAYERS}.1": "disk", f"{LAYERS}.2": "disk"})


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_states_and_answers_are_those_of_one_device(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    one, several = load(str(folder)), spread(folder)
    talks = [tiny.message("what?", tiny.picture(60, 40)), tiny.message("and a longer one")]
    responses = [[7, 8, 9], [10, 11]]
    samples = [
        target.capture([target.encode(talk) for talk in talks], responses, FEATURES, "float32")
        for target in (one, several)
    ]
    for mine, theirs in zip(*samples, strict=True):
        for feature in FEATURES:
            np.testing.assert_allclose(mine.features[feature], theirs.features[feature], atol=1e-5)
    answers: list[Any] = [
        target.generate([target.encode(talk) for talk in talks], max_new_tokens=5, temperature=0)
        for target in (one, several)
    ]
    assert answers[0] == answers[1]


def test_what_the_stock_model_cannot_read_together_is_answered_apart(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llava_onevision")
    talks = [tiny.message("what?", tiny.clip(count, 40, 40)) for count in (3, 5, 3)]
    answers: list[Any] = [
        target.generate([target.encode(talk) for talk in talks], max_new_tokens=4, temperature=0)
        for target in (load(str(folder)), spread(folder))
    ]
    assert answers[0] == answers[1]


def test_decoding_is_refused_in_one_line(checkpoint: Checkpoint) -> None:
    target = spread(checkpoint("qwen2_5_vl"))
    with pytest.raises(TargetError, match=r"spread over several devices: .* decoding needs it on one"):
        target.prefill(target.encode(tiny.message("what?")))


def test_everything_on_one_device_decodes_as_ever(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("llava")), layers={"": "cpu"})
    prompt = target.encode(tiny.message("what?"))
    assert len(target.prefill(prompt).ids_T) == prompt.length


@pytest.mark.parametrize("free", [[40, 40], [24, 24, 24, 24], [20, 60], [60, 20], [80]])
@pytest.mark.parametrize("name", ["qwen2.5-vl-32b", "llava-next-13b", "qwen3-vl-8b"])
def test_layers_are_shared_in_order_and_alike(name: str, free: list[int]) -> None:
    config = shipped(name)
    assert config is not None
    model: Any = skeleton(config)
    places = device_map(model, 2, [one * GIB for one in free])
    weights = dict(model.named_parameters())
    owner = {
        weight: max((part for part in places if f"{weight}.".startswith(f"{part}.")), key=len)
        for weight in weights
    }
    taken = [0] * len(free)
    for weight, part in owner.items():
        taken[int(places[part])] += 2 * weights[weight].numel()
    order = [int(places[f"{LAYERS}.{n}"]) for n in range(len(model.get_submodule(LAYERS)))]
    assert order == sorted(order)
    assert {place for part, place in places.items() if not part.startswith(LAYERS)} == {0}
    assert all(order[n] == 0 for n in range(3)) or "qwen3" not in name, "deepstack enters there"
    assert all(mine <= one * GIB - ROOM for mine, one in zip(taken, free, strict=True))
    if "32b" in name:
        share = [mine / (one * GIB - ROOM) for mine, one in zip(taken, free, strict=True)]
        assert max(share) - min(share) < 0.1


def test_too_little_memory_is_told_with_numbers() -> None:
    config = shipped("qwen2.5-vl-32b")
    assert config is not None
    with pytest.raises(
        TargetError, match=r"take 62\.3 GiB and the GPUs have 24\.0, 24\.0 GiB free"
    ) as caught:
        device_map(skeleton(config), 2, [24 * GIB, 24 * GIB])
    assert "fewer --workers" in str(caught.value)
