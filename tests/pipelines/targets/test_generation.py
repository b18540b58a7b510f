"""Batched generation: equal to single prompts, repeatable, ends at any EOS, exact distribution."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.pipelines.targets.stock import Stock
from vlmdistill.pipelines.targets.generation import nucleus
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError, PromptError

Checkpoint = Callable[..., Path]
PROMPTS = [
    tiny.message("say something"),
    tiny.message("what is it?", tiny.picture(90, 64)),
    tiny.message(
        "compare these two", tiny.picture(33, 95, 1), tiny.picture(120, 60, 2)
    ),
]


VIDEOS = [
    tiny.message("what moves?", tiny.clip(5, 61, 45)),
    tiny.message(
        "compare",
        tiny.clip(4, 40, 40, 1),
        tiny.picture(90, 64),
        tiny.clip(7, 30, 70, 2),
    ),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_padded_batch_equals_each_prompt_alone(
    checkpoint: Checkpoint, family: str
) -> None:
    target = load(str(checkpoint(family)))
    shown = [*PROMPTS, *(VIDEOS if family in tiny.VIDEO else [])]
    prompts = [target.encode(messages) for messages in shown]
    alone = [
        target.generate([prompt], max_new_tokens=16, temperature=0)[0]
        for prompt in prompts
    ]
    assert target.generate(prompts, max_new_tokens=16, temperature=0) == alone


@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl"])
def test_finished_responses_do_not_change_the_others(
    checkpoint: Checkpoint, family: str, tmp_path: Path
) -> None:
    """A seventh of all tokens are EOS: some responses end at every step, others are long."""
    folder = shutil.copytree(checkpoint(family), tmp_path / "often")
    config = {"eos_token_id": list(range(0, 320, 7)), "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    plain, often = load(str(checkpoint(family))), load(str(folder))
    prompts = [plain.encode(tiny.message(chr(97 + i) * (3 * i + 1))) for i in range(20)]
    whole = [
        plain.generate([prompt], max_new_tokens=40, temperature=0)[0].ids
        for prompt in prompts
    ]
    cut = [
        ids[: next((i + 1 for i, token in enumerate(ids) if token % 7 == 0), len(ids))]
        for ids in whole
    ]
    assert len({len(ids) for ids in cut}) > 3
    for batch_size in (
        None,
        1,
        3,
        8,
    ):  # fewer than the prompts: the next ones are read as slots free
        responses = often.generate(
            prompts, max_new_tokens=40, temperature=0, batch_size=batch_size
        )
        assert [response.ids for response in responses] == cut


def test_responses_longer_than_the_first_capacity(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen2_5_vl")
    target = load(str(folder))
    prompts = [target.encode(messages) for messages in PROMPTS]
    responses = target.generate(prompts, max_new_tokens=160, temperature=0)
    for messages, prompt, response in zip(PROMPTS, prompts, responses, strict=True):
        theirs = (
            Stock(folder, target).generate(messages, 160)[0, prompt.length :].tolist()
        )
        assert len(response.ids) == len(theirs) > 140
        assert list(response.ids) == theirs


def test_the_nucleus_equals_the_stock_model() -> None:
    logits_BV = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    for temperature, top_p in ((1.0, 0.9), (0.5, 0.6), (2.0, 0.999), (1.0, 1e-9)):
        stock = transformers.TopPLogitsWarper(top_p)(None, logits_BV / temperature)
        assert torch.equal(
            nucleus(logits_BV, temperature, top_p).isinf(), stock.isinf()
        )


def test_a_seed_repeats_and_does_not_change_the_global_generator(
    checkpoint: Checkpoint,
) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    prompts = [target.encode(messages) for messages in PROMPTS]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = target.generate(prompts, max_new_tokens=16, temperature=1, seed=1)
    assert torch.rand(1) == expected
    assert target.generate(prompts, max_new_tokens=16, temperature=1, seed=1) == first
    assert target.generate(prompts, max_new_tokens=16, temperature=1, seed=2) != first


def test_any_eos_ends_a_response(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_vl", vocabulary=24)))
    assert target.info.eos_ids == (1, 0)
    prompts = [target.encode(tiny.message("ate"))] * 60
    responses = target.generate(prompts, max_new_tokens=30, temperature=1, seed=0)
    last = Counter(
        response.ids[-1] for response in responses if response.finish == "stop"
    )
    assert set(last) == {0, 1}
    for response in responses:
        assert not set(response.ids[:-1]) & {0, 1}
        assert (response.finish == "stop") == (response.ids[-1] in (0, 1))
        assert response.finish == "stop" or len(response.ids) == 30


def test_sampling_settings_of_a_checkpoint_are_ignored(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Real checkpoints ship greedy settings, top_k 1 and repetition penalties."""
    advised = tmp_path / "advised"
    shutil.copytree(checkpoint("llava", vocabulary=24), advised)
    plain = load(str(advised))
    config = json.loads((advised / "generation_config.json").read_text())
    config |= {
        "do_sample": True,
        "top_k": 1,
        "repetition_penalty": 5.0,
        "temperature": 0.01,
        "top_p": 0.1,
    }
    (advised / "generation_config.json").write_text(json.dumps(config))
    target = load(str(advised))
    prompt = target.encode(tiny.message("ate", tiny.picture(30, 30)))
    for temperature in (0, 1):
        settings: dict[str, Any] = {
            "max_new_tokens": 10,
            "temperature": temperature,
            "seed": 3,
        }
        assert target.generate([prompt] * 8, **settings) == plain.generate(
            [prompt] * 8, **settings
        )


@pytest.mark.slow
def test_samples_follow_the_targets_distribution(checkpoint: Checkpoint) -> None:
    """The first token of 4000 responses against the softmax of the logits (chi-squared, p << 1e-6)."""
    target = load(str(checkpoint("qwen2_5_vl", vocabulary=24)))
    prompt = target.encode(tiny.message("ate", tiny.picture(30, 30)))
    hidden = target.prefill(prompt).feature("hidden", "text")[-1:]
    for temperature in (1.0, 0.5):
        chance_V = (target.logits(hidden)[0] / temperature).softmax(-1)
        responses = target.generate(
            [prompt] * 4000, max_new_tokens=1, temperature=temperature, seed=0
        )
        count_V = torch.bincount(
            torch.tensor([response.ids[0] for response in responses]), minlength=24
        )
        expected_V = 4000 * chance_V
        assert float(((count_V - expected_V) ** 2 / expected_V).sum()) < 75


def test_no_token_is_excluded(checkpoint: Checkpoint) -> None:
    """The default of transformers keeps the 50 best; near-uniform responses use most of 320 tokens."""
    target = load(str(checkpoint("qwen2_5_vl")))
    prompts = [target.encode(tiny.message("hello"))] * 1000
    responses = target.generate(prompts, max_new_tokens=1, temperature=100.0)
    assert len({response.ids[0] for response in responses}) > 250


def test_no_memory_halves_the_batch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(checkpoint("llava")))
    prompts = [target.encode(messages) for messages in PROMPTS]
    expected = target.generate(prompts, max_new_tokens=6, temperature=0)
    run = target._generate

    def tight(limit: int) -> Any:
        def attempt(part: Any, *more: Any) -> Any:
            if len(part) > limit:
                raise torch.OutOfMemoryError
            return run(part, *more)

        return attempt

    monkeypatch.setattr(target, "_generate", tight(1))
    assert target.generate(prompts, max_new_tokens=6, temperature=0) == expected
    monkeypatch.setattr(target, "_generate", tight(0))
    with pytest.raises(PromptError, match="memory"):
        target.generate(prompts, max_new_tokens=6, temperature=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(
    checkpoint: Checkpoint, wrong: dict[str, Any]
) -> None:
    target = load(str(checkpoint("llava")))
    settings: dict[str, Any] = {"max_new_tokens": 5, **wrong}
    with pytest.raises(DataError, match=next(iter(wrong))):
        target.generate([target.encode(PROMPTS[0])], **settings)
