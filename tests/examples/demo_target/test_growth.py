"""A grown target computes what the smaller one computes, and all of it can be trained."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from examples.demo_target.build import STATE, build_grown
from examples.demo_target.evaluation import load
from examples.demo_target.growth import grow
from examples.demo_target.lessons import GROWN
from examples.demo_target.model import GRID, MERGE
from vlmdistill.pipelines.targets.embedded import EMBEDDED


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_a_grown_target_has_the_same_logits_for_text_and_images() -> None:
    small, tokenizer, _ = load(EMBEDDED["demo-small"])
    large = grow(small).eval()
    torch.manual_seed(0)
    visual = [small.config.image_token_id] * (GRID // MERGE) ** 2
    ids = [
        tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        *visual,
        *tokenizer.encode(" red circle"),
    ]
    shown = {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([[int(one == visual[0]) for one in ids]]),
        "pixel_values": torch.randn(GRID * GRID, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
    }
    with torch.no_grad():
        before, after = small(**shown).logits, large(**shown).logits
    assert (before - after).abs().max() < 1e-3 * before.std()


def test_every_layer_of_a_grown_target_learns() -> None:
    large = grow(load(EMBEDDED["demo-small"])[0]).train()
    optimiser = torch.optim.SGD(large.parameters(), lr=1e-2)
    ids_BT = torch.randint(0, 600, (2, 20), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first step gives new layers an output
        optimiser.zero_grad()
        large(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimiser.step()
    weights = [
        layer.mlp.gate_proj.weight.grad for layer in large.model.language_model.layers
    ]
    assert all(one is not None and one.abs().max() > 0 for one in weights)
    first_DD, second_DD = large.model.language_model.layers[
        0
    ].self_attn.o_proj.weight.chunk(2)
    assert not torch.allclose(first_DD, second_DD)


@pytest.mark.slow
def test_a_grown_build_is_a_complete_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    recipe = replace(GROWN, polish_steps=1, tokens=400)
    scores = build_grown(tmp_path / "large", recipe=recipe, scenes=2, max_new_tokens=16)
    assert scores["n"] == 2
    files = {path.name for path in EMBEDDED["demo-small"].iterdir()}
    assert {path.name for path in (tmp_path / "large").iterdir()} == files
    assert STATE not in files
    model, _, _ = load(tmp_path / "large")
    assert model.config.text_config.num_hidden_layers == 20
    stored = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert stored == pytest.approx(
        2 * sum(one.numel() for one in model.parameters()), rel=0.02
    )
