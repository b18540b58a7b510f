"""Captured states are those of an independent run of the stock model, row for row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import tiny
from tests.pipelines.targets.stock import Messages, Stock
from vlmdistill.pipelines.media.images import large_images
from vlmdistill.pipelines.targets.batching import one_ahead
from vlmdistill.pipelines.targets.families import llava, qwen_vl
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import Feature, Sample

Checkpoint = Callable[..., Path]
SOURCES = ("hidden", "embed", "layer0", "layer1", "layer2")
ALL = [
    Feature(source, where) for source in SOURCES for where in ("text", "visual", "span")
]
CASES: dict[str, Messages] = {
    "no image": tiny.message("say something"),
    "one": tiny.message("what is it?", tiny.picture(90, 64)),
    "several": tiny.message(
        "compare",
        tiny.picture(33, 95, 1),
        tiny.picture(120, 30, 2),
        tiny.picture(56, 56, 3),
    ),
    "dialogue": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        *tiny.message("first", tiny.picture(57, 29, 4)),
        {"role": "assistant", "content": [{"type": "text", "text": "a thing"}]},
        *tiny.message("and this, which is longer?", tiny.picture(28, 64, 5)),
    ],
}
VIDEOS: dict[str, Messages] = {
    "video": tiny.message("what moves?", tiny.clip(5, 61, 45)),
    "video and image": [
        *tiny.message("first", tiny.clip(4, 40, 40, 1), tiny.picture(57, 29, 4)),
        {"role": "assistant", "content": [{"type": "text", "text": "a thing"}]},
        *tiny.message("and then?", tiny.picture(90, 64), tiny.clip(4, 30, 70, 2)),
    ],
    "two videos": tiny.message(
        "compare", tiny.clip(3, 33, 57, 3), tiny.clip(8, 56, 28, 4)
    ),
}
RESPONSES = [
    (40, 41, 42, 1),
    (50, 51),
    (60, 61, 62, 63, 64, 65, 66),
    (70, 71, 1),
    (80,) * 5,
    (90, 91),
    (99, 1),
]


def cases(family: str) -> dict[str, Messages]:
    """Everything that the family can be shown."""
    return CASES | VIDEOS if family in tiny.VIDEO else CASES


def rows(states: torch.Tensor, sample: Sample, where: str) -> np.ndarray[Any, Any]:
    """The rows of the stock model's [L, D] at the positions that the sample gives."""
    visual = np.zeros(len(states), bool)
    for span in sample.spans:
        visual[span.start : span.start + span.length] = True
    last = np.array([span.start + span.length - 1 for span in sample.spans], int)
    picked: np.ndarray[Any, Any] = states.numpy()[
        {"text": ~visual, "visual": visual}[where] if where != "span" else last
    ]
    return picked


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.OTHER_PARTS])
def test_padded_batch_equals_stock_model_one_by_one(
    checkpoint: Checkpoint, family: str, attention: str
) -> None:
    folder = checkpoint(family)
    target = load(str(folder), attention=attention)
    stock = Stock(folder, target, attention)
    shown = cases(family)
    prompts = [target.encode(messages) for messages in shown.values()]
    samples = target.capture(
        prompts, RESPONSES[: len(shown)], ALL, "float32", list(shown)
    )
    assert len({prompt.length for prompt in prompts}) == len(prompts), (
        "the batch has to need padding"
    )
    for messages, response, sample in zip(
        shown.values(), RESPONSES, samples, strict=False
    ):
        states = stock.states(messages, response)
        ids = states["ids"].numpy()
        assert len(sample.ids_T) + sample.visual_tokens == len(ids)
        np.testing.assert_array_equal(sample.ids_T, ids[sample.position_T])
        np.testing.assert_array_equal(
            sample.response_T, sample.position_T >= len(ids) - len(response)
        )
        for span in sample.spans:
            assert set(ids[span.start : span.start + span.length]) <= set(
                target.info.visual_ids
            )
        assert not set(sample.ids_T) & set(target.info.visual_ids)
        for feature in ALL:
            expected = rows(states[feature.source], sample, feature.where)
            assert len(expected) == sample.rows(feature.where)
            np.testing.assert_allclose(
                sample.features[feature],
                expected,
                atol=2e-5,
                rtol=1e-4,
                err_msg=feature.name,
            )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_spans_are_images(checkpoint: Checkpoint, family: str) -> None:
    """One span per image, each as long as the vision tower's output for it, also of adjacent images."""
    target = load(str(checkpoint(family)))
    for name, count in (("no image", 0), ("one", 1), ("several", 3), ("dialogue", 2)):
        prompt = target.encode(CASES[name])
        assert len(prompt.spans) == count
        if count:
            out = target.model.model.get_image_features(**prompt.inputs)
            assert [span.length for span in prompt.spans] == [
                len(image) for image in out.pooler_output
            ]


@pytest.mark.parametrize("family", tiny.VIDEO)
def test_spans_of_videos(checkpoint: Checkpoint, family: str) -> None:
    """A video is one run of tokens; only Qwen3-VL has the time of each pair of frames between them."""
    target = load(str(checkpoint(family)))
    timed = family == "qwen3_vl"
    for name, count in (
        ("video", 3 if timed else 1),
        ("video and image", 2 + 2 + 2 if timed else 4),
        ("two videos", 2 + 4 if timed else 2),
    ):
        prompt = target.encode(VIDEOS[name])
        assert len(prompt.spans) == count
        assert sum(span.length for span in prompt.spans) == int(prompt.visual_L.sum())
        for span in prompt.spans:
            assert (
                len(set(prompt.ids_L[span.start : span.start + span.length].tolist()))
                == 1
            )


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, "several") for family in tiny.FAMILIES),
        *((family, "video and image") for family in tiny.VIDEO),
    ],
)
def test_step_by_step_generation_has_the_same_states(
    checkpoint: Checkpoint, family: str, case: str
) -> None:
    folder = checkpoint(family)
    target = load(str(folder))
    stock = Stock(folder, target)
    messages = cases(family)[case]
    out = stock.generate(
        messages, 8, output_hidden_states=True, return_dict_in_generate=True
    )
    prompt = target.encode(messages)
    response = out.sequences[0, prompt.length :].tolist()
    sample = target.capture(
        [prompt],
        [response],
        [Feature("hidden", "text"), Feature("embed", "text")],
        "float32",
    )[0]
    for step, states in enumerate(out.hidden_states[1:]):
        row = int(np.flatnonzero(sample.response_T)[step])
        for source, layer in (("hidden", -1), ("embed", 0)):
            mine = sample.features[Feature(source, "text")][row]
            np.testing.assert_allclose(
                mine, states[layer][0, 0].numpy(), atol=2e-5, rtol=1e-4
            )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rotary_positions_are_the_models_own(
    checkpoint: Checkpoint, family: str
) -> None:
    """After an image, M-RoPE is behind the expanded index; elsewhere both are the same."""
    target = load(str(checkpoint(family)))
    sample = target.capture(
        [target.encode(CASES["one"])], [(40, 41)], [Feature("hidden", "text")]
    )[0]
    assert (np.diff(sample.rope_T) > 0).all()
    behind = sample.position_T[-1] - sample.rope_T[-1]
    assert behind > 0 if target.family.mrope else behind == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_placeholder_in_the_response_is_an_ordinary_token(
    checkpoint: Checkpoint, family: str
) -> None:
    folder = checkpoint(family)
    target = load(str(folder))
    response = (40, target.info.visual_ids[0], 42)
    sample = target.capture(
        [target.encode(CASES["one"])],
        [response],
        [Feature("hidden", "text")],
        "float32",
    )[0]
    assert sample.ids_T[-3:].tolist() == list(response)
    # What generate feeds back after the prompt is looked up as text, too.
    target.prefill(target.encode(CASES["one"]))
    hidden = target.extend(torch.tensor(response), torch.arange(1, 4))["hidden"].numpy()
    np.testing.assert_allclose(
        sample.features[Feature("hidden", "text")][-3:], hidden, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("family", "patches"), [*((one, 30) for one in tiny.VIDEO), ("qwen2_vl", 1)]
)
def test_long_videos_are_encoded_in_parts(
    checkpoint: Checkpoint, family: str, patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between frames, and between images, the vision tower says the same."""
    target = load(str(checkpoint(family)))
    prompts = [
        target.encode(messages) for messages in [CASES["several"], *VIDEOS.values()]
    ]
    responses = [(40, 41)] * len(prompts)
    whole = target.capture(prompts, responses, ALL, "float32")
    calls = list[int]()
    monkeypatch.setattr(qwen_vl, "PATCHES", patches)
    monkeypatch.setattr(llava, "FRAMES", 3)
    tower = (
        target.model.model.vision_tower
        if family == "llava_onevision"
        else target.model.model.visual
    )
    handle = tower.register_forward_pre_hook(
        lambda module, args: calls.append(len(args[0]))
    )
    parts = target.capture(prompts, responses, ALL, "float32")
    handle.remove()
    assert len(calls) > 6
    if patches == 1:  # each frame has more, and none shares a pass
        grids = [
            g
            for p in prompts
            for name, g in p.inputs.items()
            if name.endswith("grid_thw")
        ]
        assert sorted(calls) == sorted(
            h * w for g in grids for t, h, w in g.tolist() for _ in range(t)
        )
    for one, other in zip(whole, parts, strict=True):
        for feature in ALL:
            np.testing.assert_allclose(
                one.features[feature], other.features[feature], atol=2e-5
            )


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches how many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_memory_grows_with_the_length_not_with_its_square(
    checkpoint: Checkpoint, family: str
) -> None:
    target = load(str(checkpoint(family)))
    prompt = target.encode(tiny.message("x" * 900))
    target.check(prompt)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        target.capture([prompt], [(40, 41)], [Feature("hidden", "text")])
        target.prefill(prompt)
    assert prompt.length * 40 < largest.numbers < prompt.length**2 / 4


def test_only_the_given_features_in_the_given_dtype(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    prompt = target.encode(CASES["one"])
    asked = [Feature("hidden", "text"), Feature("layer1", "visual")]
    wide = target.capture([prompt], [(40,)], asked, "float32")[0]
    assert set(wide.features) == set(asked)
    small = target.capture([prompt], [(40,)], asked, "bfloat16")[0]
    for feature in asked:
        assert small.features[feature].dtype == np.uint16
        back = torch.from_numpy(small.features[feature].view(np.int16)).view(
            torch.bfloat16
        )
        assert torch.equal(
            back, torch.from_numpy(wide.features[feature]).to(torch.bfloat16)
        )


def test_what_float16_cannot_hold_is_refused(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("llava")))
    target._text.embed_tokens.weight.data *= 1e7
    with pytest.raises(DataError, match=r"sample one: embed.*--dtype bfloat16"):
        target.capture([target.encode(CASES["one"])], [(40,)], ALL, "float16", ["one"])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_threads_encode_as_one_does(checkpoint: Checkpoint, family: str) -> None:
    target = load(str(checkpoint(family)))
    target.encode([{"role": "user", "content": ""}])
    names = [name for _ in range(20) for name in CASES]
    batches = [names[at : at + 12] for at in range(0, len(names), 12)]
    with large_images():
        made = list(
            one_ahead(batches, lambda name: target.encode(CASES[name]), threads=4)
        )
    once = {name: target.encode(CASES[name]) for name in set(names)}
    for batch, prompts in made:
        for name, prompt in zip(batch, prompts, strict=True):
            assert torch.equal(prompt.ids_L, once[name].ids_L)
            assert all(
                torch.equal(value, once[name].inputs[key])
                for key, value in prompt.inputs.items()
            )


def test_a_missing_layer_is_refused(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("llava")))
    with pytest.raises(TargetError, match="layers 0 to 2: layer3"):
        target.capture(
            [target.encode(CASES["one"])], [(40,)], [Feature("layer3", "text")]
        )


def test_states_that_do_not_give_the_logits_are_refused(checkpoint: Checkpoint) -> None:
    """As they would not if a checkpoint scaled its logits, or applied its last norm elsewhere."""
    target = load(str(checkpoint("qwen2_vl")))
    forward = target.model.lm_head.forward
    target.model.lm_head.forward = lambda hidden: 2 * forward(hidden)
    with pytest.raises(TargetError, match="do not give the target's own logits"):
        target.capture(
            [target.encode(CASES["one"])], [(40,)], [Feature("hidden", "text")]
        )


def test_no_memory_halves_the_batch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(checkpoint("llava")))
    prompts = [target.encode(messages) for messages in CASES.values()]
    responses = RESPONSES[:4]
    whole = target.capture(prompts, responses, ALL, "float32")
    run, sizes = target._capture, list[int]()

    def tight(items: Any, *more: Any) -> Any:
        sizes.append(len(items))
        if len(items) > 1:
            raise torch.OutOfMemoryError
        return run(items, *more)

    monkeypatch.setattr(target, "_capture", tight)
    parts = target.capture(prompts, responses, ALL, "float32")
    assert sizes == [4, 2, 1, 1, 1, 1], "two of that length are not tried again"
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.ids_T, other.ids_T)
        for feature in ALL:
            np.testing.assert_allclose(
                one.features[feature], other.features[feature], atol=2e-5
            )
