"""One pass of the stock model proves what `generate` would give, for every family."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from vlmdistill.pipelines.bench.greedy import GreedyCheck
from vlmdistill.pipelines.targets import target_model
from vlmdistill.pipelines.targets.loading import load

TOKENS = 12
Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.OTHER_PARTS, "llava_gemma2"])
def test_a_pass_agrees_with_generate(family: str, checkpoint: Checkpoint) -> None:
    softcapped = family == "llava_gemma2"
    target = load(str(checkpoint(family)), attention="eager" if softcapped else "sdpa")
    for shown in ([], [tiny.picture(30, 40)]):
        prompt = target.encode(tiny.message("What is it?", *shown))
        generated = target.reference(prompt, max_new_tokens=TOKENS)
        assert generated is not None
        check = GreedyCheck(target, prompt, TOKENS, None)
        assert check.check(generated.ids) in ("identical", "near_tie")
        for place in (0, len(generated.ids) // 2, len(generated.ids) - 1):
            wrong = list(generated.ids)
            wrong[place] = target.info.visual_ids[0]  # a placeholder without an image
            assert check.check(wrong) == "different"


def test_a_response_ends_where_greedy_decoding_does(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    prompt = target.encode(tiny.message("What is it?"))
    generated = target.reference(prompt, max_new_tokens=TOKENS)
    assert generated is not None
    longer = target.reference(prompt, max_new_tokens=TOKENS + 1)
    assert longer is not None
    assert len(longer.ids) == TOKENS + 1
    check = GreedyCheck(target, prompt, TOKENS, None)
    assert check.check(generated.ids) == "identical"
    assert check.check(generated.ids[:-1]) == "different"
    assert check.check(longer.ids) == "different"


def test_what_generate_gives_counts_besides(checkpoint: Checkpoint) -> None:
    """Another response than the one that the pass proves is a difference, whoever is right."""
    target = load(str(checkpoint("qwen2_5_vl")))
    prompt = target.encode(tiny.message("What is it?"))
    generated = target.reference(prompt, max_new_tokens=TOKENS)
    assert generated is not None
    for other in ((7, *generated.ids[1:]), generated.ids[:-1]):
        check = GreedyCheck(target, prompt, TOKENS, other)
        assert check.check(generated.ids) == "different"
    assert (
        GreedyCheck(target, prompt, TOKENS, generated.ids).check(generated.ids)
        == "identical"
    )


def test_a_long_response_is_passed_in_parts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all its tokens over the vocabulary need not fit."""
    target = load(str(checkpoint("qwen2_5_vl")))
    prompt = target.encode(tiny.message("What is it?", tiny.picture(30, 40)))
    generated = target.reference(prompt, max_new_tokens=TOKENS)
    assert generated is not None
    whole = target.stock_choices(prompt, generated.ids)
    monkeypatch.setattr(target_model, "LOGITS", 5)
    parts = target.stock_choices(prompt, generated.ids)
    assert whole is not None
    assert parts is not None
    assert whole.best_N.tolist() == parts.best_N.tolist() == list(generated.ids)
