"""The decoder: what a right drafter gains, where an answer ends, and what the verifier makes of chance."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests import tiny
from tests.drafters.synthetic import untrained
from vlmdistill.drafters.core.config import ModelConfig, features
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding import acceptance as verifying
from vlmdistill.drafters.decoding.acceptance import choose, verify
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature


def said(cycles: Iterator[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.ids]


def test_a_drafter_that_is_right_gains_tokens_and_changes_nothing(
    target: VisionLanguageTarget,
) -> None:
    one = target
    prompt = one.encode(tiny.message("tell", tiny.picture(56, 84)))
    expected = said(plain(one, prompt, max_new_tokens=24))

    class Oracle(Drafter):
        """Knows the answer: its state is how much of it has been said."""

        @dataclass(frozen=True, kw_only=True)
        class Config(ModelConfig):
            def needs(self, info: Any, *, decoding: bool = False) -> frozenset[Feature]:
                return features("hidden.text")

        def step(self, entries: Any, cache: Any) -> Tensor:
            order_N = entries.tokens.position_N
            rows = entries.tokens.rows_R
            order_R = order_N if rows is None else order_N[rows]
            said_R1: Tensor = (order_R - prompt.length + 1)[:, None].float()
            return said_R1

        def logits(self, state_ND: Tensor, last_N: Tensor, hop: int = 0) -> Tensor:
            logits_NV = torch.zeros(len(state_ND), one.info.vocab_size)
            for row, said_so_far in enumerate(state_ND[:, 0].int().tolist()):
                if said_so_far < len(expected):
                    logits_NV[row, expected[said_so_far]] = 20.0
            return logits_NV

    oracle = Oracle(Oracle.Config(), one.info, one.head).eval()
    cycles = list(
        speculate(one, oracle, prompt, tree=Tree.parse("chain-5"), max_new_tokens=24)
    )
    assert said(iter(cycles)) == expected
    assert [len(cycle.ids) for cycle in cycles[1:-1]] == [6] * (len(cycles) - 2)
    assert all(cycle.chain == (5, 5) for cycle in cycles[1:-1])


Grown = Callable[[DraftTree], DraftTree]


def drafting_otherwise(
    target: VisionLanguageTarget,
    change: Grown = lambda tree: tree,
    shape: Tree | None = None,
) -> Any:
    """A drafter whose trees are changed, or of another shape than was asked for."""
    drafter: Any = untrained("eagle2", target)
    draft = drafter.draft

    def changed(*arguments: Any) -> Any:
        session = draft(*arguments)
        grow = session.grow
        session.grow = lambda asked: change(grow(shape or asked))
        return session

    drafter.draft = changed
    return drafter


def test_all_of_a_chain_counts_whatever_the_drafter_says(
    target: VisionLanguageTarget,
) -> None:
    """Else it may report only the drafts that it is sure of, and acceptance by position is too high."""

    def hidden(tree: DraftTree) -> DraftTree:
        return dataclasses.replace(tree, greedy_N=torch.arange(len(tree.ids_N)) == 0)

    prompt = target.encode(tiny.message("a"))
    chain = Tree.parse("chain-3")
    drafter = drafting_otherwise(target, hidden)
    cycles = [*speculate(target, drafter, prompt, tree=chain, max_new_tokens=12)]
    honest = untrained("eagle2", target)
    expected = [*speculate(target, honest, prompt, tree=chain, max_new_tokens=12)]
    assert [cycle.chain for cycle in cycles] == [cycle.chain for cycle in expected]
    assert all(verified == 3 for _, verified in [one.chain for one in cycles[1:]])


def test_a_tree_with_more_nodes_than_was_asked_for_is_refused(
    target: VisionLanguageTarget,
) -> None:
    """Its acceptance would be shown as that of a smaller tree."""
    prompt = target.encode(tiny.message("a"))
    drafter = drafting_otherwise(target, shape=Tree(8, 2, 2))
    chain = Tree.parse("chain-3")
    with pytest.raises(DataError, match="8 nodes, and the tree chain-3 has 4"):
        list(speculate(target, drafter, prompt, tree=chain, max_new_tokens=12))


def test_nothing_follows_an_end_of_sequence(target: VisionLanguageTarget) -> None:
    one = target
    prompt = one.encode(tiny.message("a"))
    answer = said(plain(one, prompt, max_new_tokens=20))
    drafter = untrained("eagle2", one)
    for end in range(1, len(answer)):
        stop = answer[end]
        first = answer.index(stop)
        cut = VisionLanguageTargetWithEos(one, stop)
        got = said(
            speculate(cut, drafter, prompt, tree=Tree.parse("8-2-2"), max_new_tokens=20)
        )
        assert got == answer[: first + 1]
    for limit in range(1, 8):
        got = said(
            speculate(
                one, drafter, prompt, tree=Tree.parse("8-2-2"), max_new_tokens=limit
            )
        )
        assert got == answer[:limit]


class VisionLanguageTargetWithEos:
    """The same target, one more token of which ends an answer."""

    def __init__(self, target: VisionLanguageTarget, eos: int) -> None:
        self._target = target
        self.info = replace(target.info, eos_ids=(*target.info.eos_ids, eos))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


# Sampling


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    logits_NV = torch.randn(9, 14, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-310, 1e-6, 1e-5):
        assert torch.equal(choose(logits_NV, temperature, None), logits_NV.argmax(-1))


def test_a_choice_has_the_distribution_of_the_target() -> None:
    logits_V, draws = (
        torch.randn(14, generator=torch.Generator().manual_seed(0)) * 2,
        50_000,
    )
    for temperature in (0.6, 1.0, 1.4):
        chosen_N = choose(
            logits_V.expand(draws, -1), temperature, torch.Generator().manual_seed(1)
        )
        share_V = (logits_V.double() / temperature).softmax(-1)
        exact: dict[tuple[int, ...], float] = {
            (token,): share for token, share in enumerate(share_V.tolist())
        }
        assert p_value(Counter((token,) for token in chosen_N.tolist()), exact) > 1e-3


TOKENS_OF_TREES = {
    "chain": ([3, 0, 1, 2], [0, 0, 1, 2]),
    "children": ([3, 0, 1, 0, 2], [0, 0, 0, 1, 2]),
    "bush": ([3, 0, 1, 2, 1, 1], [0, 0, 0, 0, 1, 2]),
    "begun alike": ([3, 0, 0, 1, 2], [0, 0, 0, 1, 2]),
    "said twice": ([3, 0, 0, 1, 1, 2], [0, 0, 0, 1, 2, 4]),
}
"""Tokens and parents; the root is node 0."""


@pytest.mark.parametrize("tree", TOKENS_OF_TREES)
def test_a_verified_text_has_exactly_the_distribution_of_the_target(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice that the nodes can make, each as likely as the target has it: no sampling here."""
    ids, parents = TOKENS_OF_TREES[tree]
    parent_N = torch.tensor(parents)
    eye_NN = visible_NN = torch.eye(len(ids)).bool()
    for _ in ids:
        visible_NN = eye_NN | visible_NN[parent_N]
    nodes = DraftTree(torch.tensor(ids), parent_N, visible_NN, eye_NN[0])
    # The target says after a node what its text asks for, wherever in the tree that text is.
    texts = [
        tuple(ids[m] for m in visible_NN[node].nonzero()[:, 0].tolist())
        for node in range(len(ids))
    ]
    after = {
        text: torch.rand(3, generator=torch.Generator().manual_seed(len(text)))
        for text in texts
    }
    share = {
        text: (chance_V / chance_V.sum()).tolist() for text, chance_V in after.items()
    }
    likely: dict[tuple[int, ...], float] = {}
    for choices in itertools.product(range(3), repeat=len(ids)):
        monkeypatch.setattr(
            verifying, "choose", lambda *_, said=choices: torch.tensor(said)
        )
        verdict = verify(nodes, torch.zeros(len(ids), 3), 1.0)
        path = verdict.path_N[: int(verdict.length_1)].tolist()
        text = (*(ids[node] for node in path), int(verdict.bonus_1))
        chance = math.prod(
            share[texts[node]][choice] for node, choice in enumerate(choices)
        )
        likely[text] = likely.get(text, 0.0) + chance
    for text, chance in likely.items():
        assert chance == pytest.approx(
            math.prod(share[text[:n]][text[n]] for n in range(1, len(text)))
        )
    assert sum(likely.values()) == pytest.approx(1)


@pytest.mark.slow
def test_sampled_answers_have_the_distribution_of_the_target(
    checkpoint: Callable[..., Path],
) -> None:
    """Whole answers of a target of few tokens, against the probability of each of them."""
    target = load(str(checkpoint("qwen2_5_vl", vocabulary=14, layers=2, std=0.25)))
    prompt, one, length, heat = (
        target.encode(tiny.message("a")),
        torch.ones(1, dtype=torch.long),
        3,
        0.9,
    )
    answers: dict[tuple[int, ...], float] = {}
    grown: dict[tuple[int, ...], float] = {(): 1.0}
    while grown:
        before, mass = grown.popitem()
        with torch.inference_mode():
            last_1D = target.prefill(prompt, ()).feature("hidden", "text")[-1:]
            for token in before:
                last_1D = target.extend(one * token, one, None, ("hidden",))["hidden"]
                target.commit([0])
            share_V = (target.logits(last_1D)[0].double() / heat).softmax(-1)
        for token, chance in enumerate(share_V.tolist()):
            ended = token in target.info.eos_ids or len(before) + 1 == length
            (answers if ended else grown)[(*before, token)] = mass * chance

    drafter, tree = untrained("eagle2", target), Tree.parse("8-2-3")

    def draw(count: int) -> list[tuple[int, ...]]:
        chance = torch.Generator().manual_seed(7)
        ask = functools.partial(
            speculate, target, drafter, prompt, tree=tree, max_new_tokens=length
        )
        return [
            tuple(said(ask(temperature=heat, generator=chance))) for _ in range(count)
        ]

    drawn = draw(500)
    assert p_value(Counter(drawn), answers) > 1e-3
    assert draw(5) == drawn[:5]  # the same seed gives the same answers


def p_value(
    counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]
) -> float:
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


def test_no_child_is_kept_without_its_parent() -> None:
    """A certain child scores as high as its parent: the sort must not part them."""
    from vlmdistill.drafters.core.tree_drafter import _Candidates, _prune

    root = torch.zeros(1, dtype=torch.long)
    for length, total in itertools.product(range(1, 8), range(2, 8)):
        ids = torch.arange(length)
        score = torch.zeros(length)
        parent = torch.arange(length) - 1
        candidates = _Candidates(ids, score, parent, torch.zeros_like(ids))
        tree = _prune(root, candidates, Tree(total, length, 1))
        kept = len(tree.ids_N)
        assert tree.parent_N.tolist() == [0, *range(kept - 1)]
        assert tree.visible_NN.tolist() == torch.ones(kept, kept).tril().bool().tolist()
