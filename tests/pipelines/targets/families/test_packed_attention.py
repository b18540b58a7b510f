"""The vision towers of Qwen-VL, with one kernel call for all windows of a length."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from vlmdistill.pipelines.targets.loading import load

Checkpoint = Callable[..., Path]
PICTURES = [tiny.picture(140, 84), tiny.picture(84, 140, 1), tiny.picture(33, 200, 2)]


class AttentionCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the attention kernels that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "attention" in str(func):
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.inference_mode()
def test_visual_tokens_are_the_stock_models(
    family: str, checkpoint: Checkpoint
) -> None:
    target = load(str(checkpoint(family)))
    prompt = target.encode(tiny.message("compare", *PICTURES))
    embed_UD = target.family.encode_images(target.model, prompt.inputs).embed_UD
    stock = target.model.model.get_image_features(
        prompt.inputs["pixel_values"], prompt.inputs["image_grid_thw"]
    )
    torch.testing.assert_close(
        embed_UD, torch.cat(stock.pooler_output), atol=1e-6, rtol=1e-6
    )


@torch.inference_mode()
def test_windows_of_one_length_take_one_kernel_call(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    calls = []
    for copies in (1, 3):
        prompt = target.encode(tiny.message("compare", *PICTURES * copies))
        with AttentionCalls() as counted:
            target.family.encode_images(target.model, prompt.inputs)
        calls.append(counted.names.total())
    assert calls[0] == calls[1] > 0  # three times as many windows


@torch.inference_mode()
def test_the_stock_model_keeps_its_own_attention(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    config = target.model.config.vision_config
    prompt = target.encode(tiny.message("what is it?", PICTURES[0]))
    before = config._attn_implementation
    target.family.encode_images(target.model, prompt.inputs)
    assert config._attn_implementation == before
    with pytest.raises(KeyError):
        target.family.encode_images(target.model, {})
    assert config._attn_implementation == before
