"""`make test-engine`: vLLM captures what transformers captures.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

import dataclasses
import json
import signal
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests import tiny, tiny_families
from tests.engines.draws import HIDDEN, Draws
from tests.quantised import quantised
from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.targets.encode import EncodedPrompt, EncodedResponse
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import Feature, Sample

CHUNK = 64  # tokens in one forward pass: most prompts come in several chunks


pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def target() -> VisionLanguageTarget:
    return load("demo-video", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def features(target: VisionLanguageTarget) -> frozenset[Feature]:
    """All that any drafter needs."""
    return frozenset().union(
        *(catalogue.config(name).model.needs(target.info) for name in catalogue.NAMES)
    )


@pytest.fixture(scope="module")
def engine(
    target: VisionLanguageTarget, features: frozenset[Feature]
) -> Iterator[EngineTarget]:
    engine = EngineTarget(target, features, CHUNK)
    yield engine
    engine.close()


def picture(seed: int, height: int = 56, width: int = 84) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def asked(target: VisionLanguageTarget, *parts: Any) -> EncodedPrompt:
    """A prompt of texts, images and videos (arrays of frames)."""
    content: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case str():
                content.append({"type": "text", "text": part})
            case Image.Image():
                content.append({"type": "image", "image": part})
            case _:
                content.append({"type": "video", "video": part})
    return target.encode([{"role": "user", "content": content}])


def clip(seed: int, frames: int) -> list[Image.Image]:
    return [picture(seed + number) for number in range(frames)]


def assert_equal(
    ours: list[Sample], theirs: list[Sample], features: Collection[Feature]
) -> None:
    """The same samples; states within 1e-4 of the largest value of their feature."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.spans == other.spans
        assert mine.features.keys() == other.features.keys()
        for name in ("ids_T", "response_T", "position_T", "rope_T"):
            assert np.array_equal(getattr(mine, name), getattr(other, name)), (
                mine.key,
                name,
            )
    for feature in sorted(features):
        pairs = zip(ours, theirs, strict=True)
        rows = [
            (mine.features[feature], other.features[feature]) for mine, other in pairs
        ]
        largest = max(float(abs(other).max(initial=0)) for _, other in rows)
        worst = max(float(abs(mine - other).max(initial=0)) for mine, other in rows)
        assert largest > 0, feature.name
        assert worst < 1e-4 * largest, feature.name


@pytest.fixture(scope="module")
def prompts(target: VisionLanguageTarget) -> dict[str, EncodedPrompt]:
    return {
        "text": asked(target, "What is this?"),
        "long text": asked(target, "What is this? " * 60),
        "image": asked(target, picture(0), "What is this?"),
        "images": asked(
            target,
            "Compare",
            picture(1),
            picture(2, 112, 56),
            "with",
            picture(3),
            "please.",
        ),
        "video": asked(target, clip(10, 8), "What happens?"),
        "mixed": asked(
            target,
            picture(4),
            clip(20, 4),
            "and",
            clip(30, 6),
            picture(5),
            "What happens?",
        ),
    }


def test_states_equal_those_of_transformers(
    target: VisionLanguageTarget,
    features: frozenset[Feature],
    engine: EngineTarget,
    prompts: dict[str, EncodedPrompt],
) -> None:
    keys, encoded = list(prompts), list(prompts.values())
    generator = np.random.default_rng(0)
    responses = [
        generator.integers(10, 400, size).tolist() for size in (5, 90, 1, 30, 20, 40)
    ]
    assert max(prompt.length for prompt in encoded) > 2 * CHUNK
    ours = engine.capture(encoded, responses, "float32", keys)
    theirs = target.capture(encoded, responses, features, "float32", keys)
    assert_equal(ours, theirs, features)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_of_responses_as_they_are_generated_equal_those_of_transformers(
    target: VisionLanguageTarget,
    features: frozenset[Feature],
    engine: EngineTarget,
    prompts: dict[str, EncodedPrompt],
    temperature: float,
) -> None:
    keys, encoded = list(prompts), list(prompts.values())
    kept = dict[str, tuple[EncodedResponse, Sample]]()

    def keep(key: str, response: EncodedResponse, sample: Sample) -> None:
        kept[key] = response, sample

    engine.respond(
        encoded, "float32", keys, keep, max_new_tokens=100, temperature=temperature
    )
    responses = [kept[key][0] for key in keys]
    if not temperature:
        assert {response.finish for response in responses} == {"stop", "length"}
        assert responses == target.generate(
            encoded, max_new_tokens=100, temperature=0.0
        )
    theirs = target.capture(
        encoded, [one.ids for one in responses], features, "float32", keys
    )
    assert_equal([kept[key][1] for key in keys], theirs, features)


def test_tokens_drawn_in_one_pass_follow_the_distribution_of_the_target(
    target: VisionLanguageTarget, prompts: dict[str, EncodedPrompt]
) -> None:
    """How likely they are, and how often a token repeats the one before, which is what vLLM drafts."""
    draws = Draws(target, 1.0, 0.9)

    def keep(_: str, response: EncodedResponse, sample: Sample) -> None:
        draws.add(sample, list(response.ids))

    with closing(EngineTarget(target, {HIDDEN}, 512)) as engine:
        keys = [str(number) for number in range(64)]
        engine.respond(
            [prompts["image"]] * 64, "float32", keys, keep, max_new_tokens=40, top_p=0.9
        )
    assert draws.tokens > 1000
    assert draws.scores.abs().max() < 5, (draws.tokens, draws.sums)


def heads_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tiny` make text models with heads of 32, the smallest that vLLM's CPU kernels take."""
    mrope, text = tiny.mrope, tiny.text_sizes
    for name, size in {"HIDDEN": 64, "HEADS": 2, "KV_HEADS": 1}.items():
        monkeypatch.setattr(tiny, name, size)
    monkeypatch.setattr(
        tiny, "mrope", lambda parts, **more: mrope([4 * part for part in parts], **more)
    )
    monkeypatch.setattr(
        tiny,
        "text_sizes",
        lambda *sizes, **more: text(*sizes, **{**more, "head_dim": 32}),
    )
    made = {name: _wider(parts) for name, parts in tiny_families.FAMILIES.items()}
    monkeypatch.setattr(tiny_families, "FAMILIES", made)


def _wider(parts: tiny.Parts) -> tiny.Parts:
    """The same with the sizes that follow from those of a head and of a state."""
    wider = 32 // parts.text.get("head_dim", 32)
    text, vision = dict(parts.text), dict(parts.vision)
    if "rope_parameters" in text:
        section = [wider * part for part in text["rope_parameters"]["mrope_section"]]
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": section}
    if "global_head_dim" in text:
        text["global_head_dim"] *= wider
    for sizes in (text, vision):
        sizes.update(
            {
                name: 64
                for name in ("out_hidden_size", "block_dim", "conv_dim")
                if name in sizes
            }
        )
    text.update(
        {
            name: 128
            for name in ("linear_key_head_dim", "linear_value_head_dim")
            if name in text
        }
    )
    return dataclasses.replace(parts, text=text, vision=vision)


def as_published(file: Path) -> None:
    """Name and lay out weights as hubs do, where transformers 5 loads that and saves something else.

    CLIP's and SigLIP's towers have `vision_model` in their names; experts of Qwen3-VL-MoE are transposed.
    """
    weights, old, new = load_file(file), "vision_tower.", "vision_tower.vision_model."
    config = json.loads(file.with_name("config.json").read_text())
    if config["vision_config"]["model_type"].startswith(("clip", "siglip")):
        if not any(new in name for name in weights):
            weights = {name.replace(old, new): value for name, value in weights.items()}
    elif config["model_type"] == "qwen3_vl_moe":
        weights = {
            name: value.mT.contiguous() if ".mlp.experts." in name else value
            for name, value in weights.items()
        }
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    "family", [family for family in tiny.FAMILIES if family != "qwen2_5_vl"]
)
def test_states_of_every_family_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads_of_32(monkeypatch)
    folder = tiny.checkpoint(family, tmp_path / family)
    as_published(folder / "model.safetensors")
    target = load(str(folder), device="cpu", dtype="float32")
    needs = frozenset().union(
        *(
            catalogue.config(name).model.needs(target.info)
            for name in ("sparrow", "vispec")
        )
    )
    encoded = [
        asked(target, "What is this?"),
        asked(target, tiny.picture(70, 40), "What is this?"),
        asked(
            target, tiny.picture(40, 70, 1), tiny.picture(56, 56, 2), "Compare these."
        ),
    ]
    if family in tiny.VIDEO:
        frames = [tiny.picture(56, 56, seed) for seed in range(4)]
        encoded.append(asked(target, frames, "What happens?"))
    responses = [[20, 21, 22]] * len(encoded)
    keys = [str(number) for number in range(len(encoded))]
    with closing(EngineTarget(target, needs, 512)) as engine:
        ours = engine.capture(encoded, responses, "float32", keys)
    assert_equal(
        ours, target.capture(encoded, responses, needs, "float32", keys), needs
    )


def test_states_of_a_target_of_four_bits_are_those_of_the_numbers_that_it_stands_for(
    target: VisionLanguageTarget, prompts: dict[str, EncodedPrompt], tmp_path: Path
) -> None:
    quantised(target.folder, tmp_path / "awq", "awq")
    four = load(str(tmp_path / "awq"), device="cpu", dtype="bfloat16")
    encoded, said, keys = (
        [prompts["image"], prompts["long text"]],
        [[11, 12, 13], [14, 15]],
        ["a", "b"],
    )
    with closing(EngineTarget(four, {HIDDEN}, 512)) as engine:
        samples = engine.capture(encoded, said, "bfloat16", keys)
        engine.check(encoded, said, samples, "bfloat16")
        unlike = target.capture(encoded, said, {HIDDEN}, "bfloat16", keys)
        with pytest.raises(TargetError, match=r"sample a: .* differs"):
            engine.check(encoded, said, unlike, "bfloat16")


def test_what_differs_from_transformers_is_refused(
    target: VisionLanguageTarget,
    engine: EngineTarget,
    prompts: dict[str, EncodedPrompt],
) -> None:
    prompt, response = prompts["images"], [11, 12, 13]
    (sample,) = engine.capture([prompt], [response], "bfloat16", ["k"])
    engine.check([prompt], [response], [sample], "bfloat16")
    wrong = {
        feature: np.roll(rows, 1, axis=0) if feature.where == "visual" else rows
        for feature, rows in sample.features.items()
    }
    with pytest.raises(
        TargetError, match=r"sample k: .*\.visual differs .* --engine transformers"
    ):
        engine.check(
            [prompt],
            [response],
            [dataclasses.replace(sample, features=wrong)],
            "bfloat16",
        )
    endless = [11] * target.info.max_position
    with pytest.raises(
        TargetError, match=r"a sequence has \d+ tokens, and vLLM takes \d+ at most"
    ):
        engine.capture([prompt, prompt], [response, endless], "bfloat16", ["k", "long"])
    (again,) = engine.capture([prompt], [response], "bfloat16", ["k"])
    assert all(
        np.array_equal(again.features[name], rows)
        for name, rows in sample.features.items()
    )
    last_1D = as_torch(sample.features[Feature("hidden", "text")], "bfloat16")[
        -1:
    ].float()
    unlikely = int(target.logits(last_1D)[0].argmin())
    with pytest.raises(TargetError, match=r"sample k: vLLM continues with token"):
        engine._check_greedy("k", last_1D, unlikely)


def test_responses_are_those_of_transformers_where_they_are_greedy(
    target: VisionLanguageTarget,
    prompts: dict[str, EncodedPrompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded = list(prompts.values())
    with closing(EngineTarget(target, (), CHUNK)) as engine:
        greedy = engine.generate(encoded, max_new_tokens=200, temperature=0.0)
        assert greedy == target.generate(encoded, max_new_tokens=200, temperature=0.0)
        drawn = engine.generate(encoded, max_new_tokens=24, temperature=1.0)
        assert drawn != greedy
        assert {response.finish for response in [*greedy, *drawn]} == {"stop", "length"}
        other = asked(target, "Something else")
        monkeypatch.setattr(
            target,
            "capture",
            lambda _, *rest: type(target).capture(target, [other], *rest),
        )
        with pytest.raises(TargetError, match="log-probabilities that differ"):
            engine.generate([prompts["image"]], max_new_tokens=24)


def test_an_engine_that_dies_is_an_error_of_one_line(
    target: VisionLanguageTarget, prompts: dict[str, EncodedPrompt]
) -> None:
    with closing(EngineTarget(target, {Feature("hidden", "text")}, CHUNK)) as engine:
        engine._engine._process.send_signal(signal.SIGKILL)
        with pytest.raises(
            TargetError, match="vLLM has ended: it was killed by SIGKILL"
        ):
            engine.capture([prompts["text"]], [[11]], "float32", ["k"])
