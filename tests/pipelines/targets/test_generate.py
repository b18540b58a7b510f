"""Answers: batched as alone, repeatable, ended by any EOS, and sampled from the target's own distribution."""

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
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.sampling import nucleus
from vlmdistill.stores.errors import DataError, TargetError

Checkpoint = Callable[..., Path]
PROMPTS = [
    tiny.message("say something"),
    tiny.message("what is it?", tiny.picture(90, 64)),
    tiny.message("compare these two", tiny.picture(33, 95, 1), tiny.picture(120, 60, 2)),
]


VIDEOS = [
    tiny.message("what moves?", tiny.clip(5, 61, 45)),
    tiny.message("compare", tiny.clip(4, 40, 40, 1), tiny.picture(90, 64), tiny.clip(7, 30, 70, 2)),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_padded_batch_answers_as_each_prompt_alone(checkpoint: Checkpoint, family: str) -> None:
    target = load(str(checkpoint(family)))
    shown = [*PROMPTS, *(VIDEOS if family in tiny.VIDEO else [])]
    prompts = [target.encode(messages) for messages in shown]
    alone = [target.generate([prompt], max_new_tokens=16, temperature=0)[0] for prompt in prompts]
    assert target.generate(prompts, max_new_tokens=16, temperature=0) == alone


@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl"])
def test_who_ends_leaves_the_others_as_they_were(checkpoint: Checkpoint, family: str, tmp_path: Path) -> None:
    """A seventh of all tokens end an answer: some leave at every step, others go on for long."""
    folder = shutil.copytree(checkpoint(family), tmp_path / "often")
    config = {"eos_token_id": list(range(0, 320, 7)), "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    plain, often = load(str(checkpoint(family))), load(str(folder))
    prompts = [plain.encode(tiny.message(chr(97 + i) * (3 * i + 1))) for i in range(20)]
    whole = [plain.generate([prompt], max_new_tokens=40, temperature=0)[0].ids for prompt in prompts]
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token % 7 == 0), len(ids))] for ids in whole]
    assert len({len(ids) for ids in cut}) > 3
    assert [answer.ids for answer in often.generate(prompts, max_new_tokens=40, temperature=0)] == cut


def test_answers_longer_than_the_room_that_is_kept_for_them(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen2_5_vl")
    target = load(str(folder))
    prompts = [target.encode(messages) for messages in PROMPTS]
    answers = target.generate(prompts, max_new_tokens=160, temperature=0)
    for messages, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        theirs = Stock(folder, target).generate(messages, 160)[0, prompt.length :].tolist()
        assert len(answer.ids) == len(theirs) > 140
        assert list(answer.ids) == theirs


def test_the_nucleus_is_that_of_the_stock_model() -> None:
    logits_BV = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    for temperature, top_p in ((1.0, 0.9), (0.5, 0.6), (2.0, 0.999), (1.0, 1e-9)):
        stock = transformers.TopPLogitsWarper(top_p)(None, logits_BV / temperature)
        assert torch.equal(nucleus(logits_BV, temperature, top_p).isinf(), stock.isinf())


def test_a_seed_repeats_and_leaves_the_callers_randomness_alone(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    prompts = [target.encode(messages) for messages in PROMPTS]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = target.generate(prompts, max_new_tokens=16, temperature=1, seed=1)
    assert torch.rand(1) == expected
    assert target.generate(prompts, max_new_tokens=16, temperature=1, seed=1) == first
    assert target.generate(prompts, max_new_tokens=16, temperature=1, seed=2) != first


def test_any_eos_ends_an_answer_and_nothing_follows(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_vl", vocabulary=24)))
    assert target.info.eos_ids == (1, 0)
    prompts = [target.encode(tiny.message("ate"))] * 60
    answers = target.generate(prompts, max_new_tokens=30, temperature=1, seed=0)
    last = Counter(answer.ids[-1] for answer in answers if answer.finish == "stop")
    assert set(last) == {0, 1}
    for answer in answers:
        assert not set(answer.ids[:-1]) & {0, 1}
        assert (answer.finish == "stop") == (answer.ids[-1] in (0, 1))
        assert answer.finish == "stop" or len(answer.ids) == 30


def test_what_a_checkpoint_advises_is_not_inherited(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Real checkpoints ship greedy settings, top_k 1 and repetition penalties."""
    advised = tmp_path / "advised"
    shutil.copytree(checkpoint("llava", vocabulary=24), advised)
    plain = load(str(advised))
    config = json.loads((advised / "generation_config.json").read_text())
    config |= {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "temperature": 0.01, "top_p": 0.1}
    (advised / "generation_config.json").write_text(json.dumps(config))
    target = load(str(advised))
    prompt = target.encode(tiny.message("ate", tiny.picture(30, 30)))
    for temperature in (0, 1):
        settings: dict[str, Any] = {"max_new_tokens": 10, "temperature": temperature, "seed": 3}
        assert target.generate([prompt] * 8, **settings) == plain.generate([prompt] * 8, **settings)


def test_samples_follow_the_targets_distribution(checkpoint: Checkpoint) -> None:
    """The first token of 4000 answers against the softmax of the logits (chi-squared, far below p = 1e-6)."""
    target = load(str(checkpoint("qwen2_5_vl", vocabulary=24)))
    prompt = target.encode(tiny.message("ate", tiny.picture(30, 30)))
    hidden = target.prefill(prompt).feature("hidden", "text")[-1:]
    for temperature in (1.0, 0.5):
        chance_V = (target.logits(hidden)[0] / temperature).softmax(-1)
        answers = target.generate([prompt] * 4000, max_new_tokens=1, temperature=temperature, seed=0)
        count_V = torch.bincount(torch.tensor([answer.ids[0] for answer in answers]), minlength=24)
        expected_V = 4000 * chance_V
        assert float(((count_V - expected_V) ** 2 / expected_V).sum()) < 75


def test_no_token_is_left_out(checkpoint: Checkpoint) -> None:
    """The default of transformers keeps the 50 best; near-uniform answers use most of 320 tokens."""
    target = load(str(checkpoint("qwen2_5_vl")))
    prompts = [target.encode(tiny.message("hello"))] * 1000
    answers = target.generate(prompts, max_new_tokens=1, temperature=100.0)
    assert len({answer.ids[0] for answer in answers}) > 250


def test_no_memory_halves_the_batch(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(TargetError, match="alone exceeds the memory"):
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
def test_settings_out_of_range_are_refused(checkpoint: Checkpoint, wrong: dict[str, Any]) -> None:
    target = load(str(checkpoint("llava")))
    settings: dict[str, Any] = {"max_new_tokens": 5, **wrong}
    with pytest.raises(DataError, match=next(iter(wrong))):
        target.generate([target.encode(PROMPTS[0])], **settings)
