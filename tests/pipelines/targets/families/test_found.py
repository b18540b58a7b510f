"""Families that this project has no line about: found from the model, proved by the self-test, or refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import is_torchvision_available

from tests import tiny, tiny_families
from tests.pipelines.targets.spoil import edit, refusal
from tests.thorough import THOROUGH
from vlmdistill.cli.main import main
from vlmdistill.pipelines.targets import families
from vlmdistill.pipelines.targets.describe import describe
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.stock.check import lines
from vlmdistill.pipelines.targets.stock.target import StockTarget
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import PromptError, TargetError
from vlmdistill.stores.schema import Feature

Checkpoint = Callable[..., Path]
COVER = ("gemma3", "glm4v_moe", "idefics3", "qwen3_5")
"""Together: windows, scaled embeddings, experts, M-RoPE over a part of a head, tiles, linear attention."""
ALL = tuple(filter(tiny_families.runs_here, tiny_families.FAMILIES))


pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # GLM's processor


@pytest.fixture
def found(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a checkpoint of a family without a description."""
    return lambda family: tiny_families.checkpoint(family, tmp_path / family)


def first_failure(target: VisionLanguageTarget) -> str:
    """The name of the line that the self-test ends with, empty if it passes."""
    last = list(lines(target))[-1]
    return last.name if last.failed else ""


@pytest.mark.parametrize("family", ALL if THOROUGH else COVER)
def test_a_family_without_a_description_passes_the_check(
    found: Callable[[str], Path], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = found(family)
    capsys.readouterr()  # what saving it wrote
    assert main(["target", "check", str(folder), "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["name"] for one in checks if not one["failed"]] == [
        *(
            "template",
            "ids",
            "spans",
            "states",
            "logits",
            "batch",
            "response",
            "drafts",
            "window",
        )
    ]
    facts = describe(str(folder), 100, 100)
    target = load(str(folder))
    assert isinstance(target, StockTarget)
    assert facts.target == target.info


def test_every_family_that_is_shown_is_made_here() -> None:
    assert set(families.SHOWN) <= set(tiny_families.FAMILIES)


@pytest.mark.parametrize(
    "family", tiny.FAMILIES if THOROUGH else ("qwen3_vl", "llava_next")
)
def test_a_family_with_a_description_passes_too(
    checkpoint: Checkpoint, family: str
) -> None:
    assert not first_failure(load(str(checkpoint(family))))


class SpansOffByOne(StockTarget):
    def encode(self, messages: Any, thinking: Any = None) -> EncodedPrompt:
        prompt = super().encode(messages, thinking)
        return replace(
            prompt,
            kind_L=prompt.kind_L.roll(1),
            spans=tuple(replace(span, start=span.start + 1) for span in prompt.spans),
        )


class NextLayerTapped(StockTarget):
    def _states(
        self, prompts: Any, sequences: Any, sources: Any, cache: Any = None
    ) -> dict[str, Tensor]:
        last = f"layer{self.info.num_layers - 1}"
        later = {
            s: f"layer{int(s[5:]) + 1}" if s.startswith("layer") and s != last else s
            for s in sources
        }
        states = super()._states(prompts, sequences, later.values(), cache)
        return {s: states[later[s]] for s in sources} | {"hidden": states["hidden"]}


class OtherTemplate(StockTarget):
    def __init__(self, **loaded: Any):
        super().__init__(**loaded)
        self.processor.chat_template = self.processor.chat_template.replace(
            "assistant", "model"
        )


class TreesAsChains(StockTarget):
    def extend(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Any = None,
        sources: Any = ("hidden",),
    ) -> Any:
        return super().extend(ids_N, depth_N, None, sources)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (SpansOffByOne, "spans"),
        (NextLayerTapped, "states"),
        (OtherTemplate, "template"),
        (TreesAsChains, "drafts"),
    ],
)
def test_a_wrong_description_is_refused(
    found: Callable[[str], Path], kind: type[StockTarget], line: str
) -> None:
    right = load(str(found("internvl")))
    wrong = kind(
        name=right.name,
        folder=right.folder,
        family=right.family,
        model=right.model,
        processor=right.processor,
    )
    assert first_failure(wrong) == line


def test_a_family_that_was_never_shown_is_checked_as_it_loads(
    found: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = found("internvl")
    monkeypatch.setattr("vlmdistill.pipelines.targets.loading.SHOWN", ())
    assert load(str(folder)).info.family == "internvl"
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", image_token_id=config["image_token_id"] - 1)
    assert "template" in refusal(folder) or "ids" in refusal(folder)
    assert main(["target", "check", str(folder)]) == 1
    shown = capsys.readouterr()
    assert "FAILED" in shown.out
    assert "is not supported as it is" in shown.err


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is here")
@pytest.mark.parametrize("family", ["gemma4", "minicpmv4_6"])
def test_a_processor_that_needs_torchvision_says_so(
    found: Callable[[str], Path], family: str
) -> None:
    assert "which needs torchvision: install it" in refusal(found(family))


def test_a_model_that_reads_images_by_cross_attention_is_refused_by_name(
    found: Callable[[str], Path],
) -> None:
    folder = found("internvl")
    config = transformers.MllamaConfig(
        text_config={
            "num_hidden_layers": 2,
            "cross_attention_layers": [1],
            "hidden_size": 32,
            "vocab_size": 320,
        }
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    assert "a mllama reads images by cross-attention" in refusal(folder)


def test_drafts_by_attention_are_refused(found: Callable[[str], Path]) -> None:
    target = load(str(found("internvl")))
    with pytest.raises(TargetError, match="need fused layers"):
        target.attention()


def test_a_state_that_cannot_be_rolled_back_is_not_changed_by_a_rejected_draft(
    found: Callable[[str], Path],
) -> None:
    """A convolution's or linear attention's state has taken the whole draft in when a part is rejected."""
    target = load(str(found("qwen3_5")))
    prompt = target.encode(tiny.message("hi", tiny.picture(60, 40)))
    one = torch.ones(1, dtype=torch.long)

    def after(*drafts: list[int]) -> Tensor:
        target.prefill(prompt)
        for draft in drafts:
            target.extend(torch.tensor(draft), torch.arange(1, len(draft) + 1))
            target.commit([0])
        return target.extend(one * 9, one)["hidden"]

    torch.testing.assert_close(
        after([20, 21, 22], [30, 31]), after([20], [30]), rtol=1e-4, atol=1e-5
    )


def test_a_placeholder_in_a_response_is_an_ordinary_token(
    found: Callable[[str], Path],
) -> None:
    """The stock model would look for an image there."""
    target = load(str(found("internvl")))
    prompt = target.encode(tiny.message("hi", tiny.picture(60, 40)))
    response = [20, *target.info.visual_ids[:1], 21]
    (sample,) = target.capture([prompt], [response], ["hidden.text"], "float32")
    target.prefill(prompt)
    states = target.extend(torch.tensor(response), torch.arange(1, 4))["hidden"]
    captured = torch.from_numpy(sample.features[Feature("hidden", "text")])
    torch.testing.assert_close(captured[-3:], states, rtol=1e-3, atol=1e-4)


def test_a_prompt_that_the_stock_model_cannot_read_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    parts = replace(tiny._llava_onevision(), text={"model_type": "olmo2"})  # not fused
    tiny.write(parts, tmp_path / "olmo", vocabulary=320, layers=2, seed=0, std=0.15)
    target = load(str(tmp_path / "olmo"))
    assert isinstance(target, StockTarget)
    alike, odd = (
        target.encode(
            tiny.message("what", tiny.clip(4, 56, 56), tiny.clip(length, 56, 56))
        )
        for length in (4, 6)
    )
    target.prefill(alike, ())
    for read in (
        lambda: target.prefill(odd, ()),
        lambda: target.capture([alike, odd], [[], []], ["hidden.text"]),
    ):
        with pytest.raises(PromptError, match="videos differ in length"):
            read()


@pytest.mark.parametrize("change", ["text model", "window"])
def test_a_described_family_with_other_layers_runs_through_the_stock_ones(
    checkpoint: Checkpoint, tmp_path: Path, change: str
) -> None:
    """A LLaVA over a text model that this project has no fused layers for, or one with a window."""
    folder, attention = tmp_path / "llava", "sdpa"
    if change == "text model":
        tiny.checkpoint("llava_gemma2", folder)
        attention = "eager"  # this model's only one
    else:
        tiny.checkpoint("llava_mistral", folder)
        text = json.loads((folder / "config.json").read_text())["text_config"]
        edit(folder / "config.json", text_config={**text, "sliding_window": 24})
    target = load(str(folder), attention=attention)  # which checks it
    assert isinstance(target, StockTarget)


PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "gemma-3-4b": (
        4.30e9,
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 262208,
                "sliding_window": 1024,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "qwen3-vl-30b-a3b": (
        31.1e9,
        {
            "model_type": "qwen3_vl_moe",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
                "tie_word_embeddings": False,
                "rope_parameters": tiny.mrope([24, 20, 20], mrope_interleaved=True),
            },
            "vision_config": {"out_hidden_size": 2048},
        },
    ),
    "mistral-small-3.1-24b": (
        24.0e9,
        {
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "mistral",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 131072,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "head_dim": 64,
                "image_size": 1540,
                "patch_size": 14,
            },
        },
    ),
}
"""The sizes of published models and their numbers of parameters, as their cards say them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_is_described_without_weights(
    name: str, tmp_path: Path
) -> None:
    parameters, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = describe(str(tmp_path), 1000, 1000)
    assert facts.parameters.all == pytest.approx(parameters, rel=0.005)
    text = config["text_config"]
    told = facts.target
    assert told.hidden_size == text["hidden_size"]
    assert (
        told.head_dim * told.num_heads == text["head_dim"] * text["num_attention_heads"]
    )
    assert facts.rope_axes == (3 if name.startswith("qwen3") else 1)
