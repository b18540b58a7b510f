"""A target and drafters on the pretend GPU; `test_pretend.py` runs it in a process of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.pretend.device import GPU, waits
from tests.thorough import THOROUGH
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.schema import as_features

METHODS = (
    [name for name in catalogue.NAMES if name != "lookahead"]
    if THOROUGH
    else ["sparrow", "eagle3", "dspark"]
)
"""Lookahead reads its n-grams on the CPU."""
DRAFTED = [
    (None, None, 0.0),
    *((name, "chain-4", 0.0) for name in METHODS),
    (METHODS[0], "12-3-3", 1.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(
        "qwen2_5_vl", tmp_path_factory.mktemp("target") / "qwen2_5_vl"
    )


LOADED: dict[Path, VisionLanguageTarget] = {}


def loaded(folder: Path) -> VisionLanguageTarget:
    """The target, loaded within a test: the device is on there alone."""
    if folder not in LOADED:
        LOADED[folder] = load(str(folder))
    return LOADED[folder]


def question(target: VisionLanguageTarget, text: str = "what is there") -> Any:
    return target.encode(tiny.message(text, tiny.picture(56, 84)))


def test_a_target_takes_the_gpu_by_itself(folder: Path) -> None:
    target = loaded(folder)
    assert target.device == target.head.embed_VD.device == GPU
    assert target.dtype == torch.bfloat16


def test_a_batch_is_generated_and_the_stock_model_answers(folder: Path) -> None:
    target = loaded(folder)
    prompts = [question(target, "what " * count) for count in (1, 3)]
    drawn = target.generate(
        prompts, max_new_tokens=4, temperature=1.0, top_p=0.9, seed=0
    )
    assert all(response.ids for response in drawn)
    stock = target.reference(prompts[0], max_new_tokens=3)
    assert stock is not None
    assert stock.ids


def test_captured_states_come_to_the_cpu(folder: Path) -> None:
    target = loaded(folder)
    wanted = ["hidden.text", "hidden.span", "embed.visual", "layer1.visual"]
    samples = target.capture(
        [question(target)] * 2, [[5, 6, 7], [5]], wanted, keys=["a", "b"]
    )
    states = [state for sample in samples for state in sample.features.values()]
    assert len(states) == 8
    assert all(len(state) for state in states)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_a_captured_batch_waits_once_when_it_is_cut(family: str, folder: Path) -> None:
    target = loaded(
        folder
        if family in folder.name
        else tiny.checkpoint(family, folder.parent / family)
    )
    prompts = [
        target.encode(
            tiny.message("compare", tiny.picture(56, 84), tiny.picture(90, 64, 1))
        ),
        target.encode(
            tiny.message("what moves?", tiny.clip(5, 61, 45), tiny.picture(57, 29, 2))
        ),
        target.encode(tiny.message("no image")),
    ]
    features = as_features(
        ["hidden.text", "hidden.span", "embed.visual", "layer1.visual"]
    )
    responses = [[5, 6, 7], [5], [8, 9]]
    target.begin_capture(
        prompts, responses, features
    )  # the first batch is checked against the stock model
    with waits() as begun:
        (leaving,) = target.begin_capture(prompts, responses, features)
    assert not len(begun), str(begun)
    with waits() as cut:
        leaving.samples()
    assert len(cut) == 1, str(cut)


@pytest.mark.parametrize(("name", "tree", "temperature"), DRAFTED)
def test_a_cycle_waits_once(
    name: str | None, tree: str | None, temperature: float, folder: Path
) -> None:
    target = loaded(folder)
    cycles = decode(
        target,
        untrained(name, target) if name else None,
        question(target),
        tree=Tree.parse(tree) if tree else None,
        max_new_tokens=8,
        temperature=temperature,
        generator=torch.Generator(GPU).manual_seed(0),
    )
    next(cycles)  # the prefill
    with waits() as waited:
        count = len(list(cycles))
    assert count > 1
    assert len(waited) == count, str(waited)


def test_tensors_of_two_devices_do_not_meet() -> None:
    here, there = torch.ones(3), torch.ones(3, device=GPU)
    for mix in (
        lambda: here + there,
        lambda: here[there.long()],
        lambda: here.copy_(there).mul_(there),
        lambda: torch.cat([here, there]),
        lambda: there.numpy(),
    ):
        with pytest.raises(RuntimeError):
            mix()


def test_what_reads_a_value_waits_and_what_does_not_read_one_does_not() -> None:
    there = torch.arange(4, device=GPU)
    pinned = torch.ones(4).pin_memory()
    for waiting in (
        lambda: there.tolist(),
        lambda: int(there[1]),
        lambda: there[there > 1],
        lambda: there.nonzero(),
        lambda: torch.unique(there),
        lambda: there.repeat_interleave(there),
        lambda: torch.ones(4).to(GPU, non_blocking=True),
        lambda: pinned.to(GPU),
        lambda: torch.tensor([1], device=GPU),
        lambda: there[torch.tensor([1])],
    ):
        with waits() as waited:
            waiting()
        assert len(waited) == 1, str(waited)
    with waits() as waited:
        there.repeat_interleave(there, output_size=6)
        pinned.to(GPU, non_blocking=True)
        there[there > 1] = 0
        torch.full((3,), 2, device=GPU)
        there.to("cpu", non_blocking=True)
        torch.where(there > 1, there, 5)
    assert not len(waited), str(waited)
