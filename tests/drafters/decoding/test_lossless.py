"""Decoding with a drafter says what the target says, whatever the drafter proposes."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.base import Drafter, DraftTree, Proposer, Tree
from vlmdistill.drafters.decoding import generate
from vlmdistill.drafters.decoding.generate import plain, speculate
from vlmdistill.drafters.decoding.verify import Verdict, choose, verify
from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.schema import Feature

TREES = ["chain-4", "8-2-2", "40-3-8"]
TOKENS = 16
QUESTIONS = ("what is there", "tell", "a", "how many of them are red", "say it again", "0123456789")
PICTURES = {
    "no image": [],
    "one image": [tiny.picture(56, 84)],
    "several images": [tiny.picture(84, 56, seed=1), tiny.picture(140, 28, seed=2)],
}


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> Callable[[str], VisionLanguageTarget]:
    loaded: dict[str, VisionLanguageTarget] = {}

    def get(family: str) -> VisionLanguageTarget:
        if family not in loaded:
            loaded[family] = load(str(checkpoint(family)))
        return loaded[family]

    return get


def untrained(name: str, target: VisionLanguageTarget, seed: int = 0) -> Proposer:
    torch.manual_seed(seed)
    return catalogue.load(name)(catalogue.config(name), target.info, target.head).eval()


def said(cycles: Iterator[generate.Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.ids]


def certain_prompt(target: VisionLanguageTarget, images: str) -> Any:
    """A prompt whose greedy answer has no ties: random weights may rank two tokens within rounding."""
    one = torch.ones(1, dtype=torch.long)
    for question in QUESTIONS:
        prompt = target.encode(tiny.message(question, *PICTURES[images]))
        with torch.inference_mode():
            hidden_1D = target.prefill(prompt, ()).feature("hidden", "text")[-1:]
            gaps = []
            for _ in range(TOKENS):
                best = target.logits(hidden_1D)[0].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                hidden_1D = target.extend(best.indices[:1], one, None, ("hidden",))["hidden"]
                target.commit(one - 1)
        if min(gaps) > 1e-3:
            return prompt
    raise AssertionError("every question's answer has a tie: ask others")


@pytest.mark.parametrize("images", PICTURES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_output_is_that_of_the_stock_model(
    family: str, images: str, target: Callable[[str], VisionLanguageTarget]
) -> None:
    one = target(family)
    prompt = certain_prompt(one, images)
    stock = one.reference(prompt, max_new_tokens=TOKENS)
    assert stock is not None
    expected = list(stock.ids)
    assert said(plain(one, prompt, max_new_tokens=TOKENS)) == expected
    turn = tiny.FAMILIES.index(family) + list(PICTURES).index(images)
    for number, name in enumerate(catalogue.NAMES):  # over families and layouts, each meets every tree
        tree = TREES[(number + turn) % len(TREES)]
        drafter = untrained(name, one)
        answer = said(speculate(one, drafter, prompt, tree=Tree.parse(tree), max_new_tokens=TOKENS))
        assert answer == expected, (name, tree)


def test_a_drafter_that_is_right_gains_tokens_and_changes_nothing(
    target: Callable[[str], VisionLanguageTarget],
) -> None:
    one = target("qwen2_5_vl")
    prompt = one.encode(tiny.message("tell", *PICTURES["one image"]))
    expected = said(plain(one, prompt, max_new_tokens=24))

    class Oracle(Drafter):
        """Knows the answer: its state is how much of it has been said."""

        @classmethod
        def needs(cls, config: Any, info: Any, *, decoding: bool = False) -> frozenset[Feature]:
            return frozenset({Feature("hidden", "text")})

        def step(self, entries: Any, memory: Any) -> Tensor:
            order_N = entries.places.order_N
            rows = entries.places.rows_R
            order_R = order_N if rows is None else order_N[rows]
            said_R1: Tensor = (order_R - prompt.length + 1)[:, None].float()
            return said_R1

        def logits(self, state_ND: Tensor, hop: int = 0) -> Tensor:
            logits_NV = torch.zeros(len(state_ND), one.info.vocab_size)
            for row, said_so_far in enumerate(state_ND[:, 0].int().tolist()):
                if said_so_far < len(expected):
                    logits_NV[row, expected[said_so_far]] = 20.0
            return logits_NV

    oracle = Oracle(Drafter.Config(), one.info, one.head).eval()
    cycles = list(speculate(one, oracle, prompt, tree=Tree.parse("chain-5"), max_new_tokens=24))
    assert said(iter(cycles)) == expected
    assert [len(cycle.ids) for cycle in cycles[1:-1]] == [6] * (len(cycles) - 2)
    assert all(cycle.chain == (5, 5) for cycle in cycles[1:-1])


def test_nothing_follows_an_end_of_sequence(target: Callable[[str], VisionLanguageTarget]) -> None:
    one = target("qwen2_5_vl")
    prompt = one.encode(tiny.message("a"))
    answer = said(plain(one, prompt, max_new_tokens=40))
    drafter = untrained("eagle2", one)
    for end in range(1, len(answer)):
        stop = answer[end]
        first = answer.index(stop)
        cut = VisionLanguageTargetWithEos(one, stop)
        got = said(speculate(cut, drafter, prompt, tree=Tree.parse("8-2-2"), max_new_tokens=40))
        assert got == answer[: first + 1]
    for limit in range(1, 8):
        got = said(speculate(one, drafter, prompt, tree=Tree.parse("8-2-2"), max_new_tokens=limit))
        assert got == answer[:limit]


class VisionLanguageTargetWithEos:
    """The same target, one more token of which ends an answer."""

    def __init__(self, target: VisionLanguageTarget, eos: int) -> None:
        import dataclasses

        self._target = target
        self.info = dataclasses.replace(target.info, eos_ids=(*target.info.eos_ids, eos))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


# Sampling: whole short answers against exact enumeration

LENGTH = 3
DRAWS = 3000


@pytest.fixture(scope="module")
def small(checkpoint: Callable[..., Path]) -> VisionLanguageTarget:
    return load(str(checkpoint("qwen2_5_vl", vocabulary=14, layers=2, std=0.25)))


@pytest.fixture(scope="module")
def exact(small: VisionLanguageTarget) -> dict[tuple[int, ...], float]:
    """The probability of every answer of at most LENGTH tokens, by the stock model's own logits."""
    prompt = small.encode(tiny.message("a", *PICTURES["one image"]))
    answers: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    one = torch.ones(1, dtype=torch.long)
    for _ in range(LENGTH):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in frontier.items():
            with torch.inference_mode():
                hidden = small.prefill(prompt, ()).features
                (state,) = hidden.values()
                last = state[-1:]
                for token in prefix:
                    last = small.extend(one * token, one, None, ("hidden",))["hidden"]
                    small.commit(one - 1)
                share = (small.logits(last)[0].double() / TEMPERATURE).softmax(-1)
            for token, p in enumerate(share.tolist()):
                ended = token in small.info.eos_ids or len(prefix) + 1 == LENGTH
                (answers if ended else grown)[(*prefix, token)] = mass * p
        frontier = grown
    assert sum(answers.values()) == pytest.approx(1.0)
    return answers


TEMPERATURE = 0.9


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-squared test; answers expected fewer than 5 times share one bin."""
    draws = sum(counts.values())
    common = [answer for answer, p in exact.items() if p * draws >= 5]
    expected = [exact[answer] * draws for answer in common]
    seen = [counts[answer] for answer in common]
    rest = draws - sum(expected)
    if rest >= 5:
        expected, seen = [*expected, rest], [*seen, draws - sum(seen)]
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True))
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draw(target: VisionLanguageTarget, drafter: Proposer, tree: str) -> Counter[tuple[int, ...]]:
    prompt = target.encode(tiny.message("a", *PICTURES["one image"]))
    generator = torch.Generator().manual_seed(7)
    shape = Tree.parse(tree)
    return Counter(
        tuple(
            said(
                speculate(
                    target,
                    drafter,
                    prompt,
                    tree=shape,
                    max_new_tokens=LENGTH,
                    temperature=TEMPERATURE,
                    generator=generator,
                )
            )
        )
        for _ in range(DRAWS)
    )


@pytest.mark.parametrize(("name", "tree"), [("eagle2", "8-2-3"), ("sparrow", "chain-2")])
def test_sampled_answers_have_the_distribution_of_the_target(
    name: str, tree: str, small: VisionLanguageTarget, exact: dict[tuple[int, ...], float]
) -> None:
    assert p_value(draw(small, untrained(name, small), tree), exact) > 1e-3


def trusting(
    tree: DraftTree, logits_NV: Tensor, temperature: float, generator: torch.Generator | None = None
) -> Verdict:
    """Wrong: the drafter's best guess is kept without asking the target."""
    first = int((tree.parent_N[1:] == 0).nonzero()[0, 0]) + 1
    bonus_1 = choose(logits_NV[first : first + 1], temperature, generator)
    return Verdict(torch.tensor([0, first]), bonus_1)


def forgotten_temperature(
    tree: DraftTree, logits_NV: Tensor, temperature: float, generator: torch.Generator | None = None
) -> Verdict:
    """Wrong: the temperature is left out, as in published code."""
    return verify(tree, logits_NV, 1.3 if temperature else 0.0, generator)


@pytest.mark.parametrize("broken", [trusting, forgotten_temperature])
def test_the_distribution_test_finds_a_broken_verifier(
    broken: Callable[..., Verdict],
    small: VisionLanguageTarget,
    exact: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "verify", broken)
    assert p_value(draw(small, untrained("eagle2", small), "8-2-3"), exact) < 1e-6


def test_no_child_is_kept_without_its_parent() -> None:
    """A certain child scores as high as its parent: the sort must not part them."""
    from vlmdistill.drafters.decoding.tree import _prune

    root = torch.zeros(1, dtype=torch.long)
    for length, total in itertools.product(range(1, 8), range(2, 8)):
        ids = torch.arange(length)
        score = torch.zeros(length)
        parent = torch.arange(length) - 1
        tree = _prune(root, ids, score, parent, torch.zeros_like(ids), Tree(total, length, 1))
        kept = len(tree.ids_N)
        assert tree.parent_N.tolist() == [0, *range(kept - 1)]
        assert tree.visible_NN.tolist() == torch.ones(kept, kept).tril().bool().tolist()
