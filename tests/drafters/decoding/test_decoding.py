"""The decoder: what a right drafter gains, where an answer ends, and what the verifier makes of chance."""

import itertools
import math
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
from vlmdistill.drafters.decoding import verify as verifying
from vlmdistill.drafters.decoding.generate import plain, speculate
from vlmdistill.drafters.decoding.verify import choose, verify
from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.schema import Feature


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> VisionLanguageTarget:
    return load(str(checkpoint("qwen2_5_vl")))


def untrained(name: str, target: VisionLanguageTarget, seed: int = 0) -> Proposer:
    torch.manual_seed(seed)
    return catalogue.load(name)(catalogue.config(name), target.info, target.head).eval()


def said(cycles: Iterator[generate.Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.ids]


def test_a_drafter_that_is_right_gains_tokens_and_changes_nothing(
    target: VisionLanguageTarget,
) -> None:
    one = target
    prompt = one.encode(tiny.message("tell", tiny.picture(56, 84)))
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


def test_nothing_follows_an_end_of_sequence(target: VisionLanguageTarget) -> None:
    one = target
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


# Sampling


def test_a_choice_has_the_distribution_of_the_target() -> None:
    """Pearson's chi-squared test on one row, drawn many times."""
    logits_V, draws = torch.randn(14, generator=torch.Generator().manual_seed(0)) * 2, 50_000
    for temperature in (0.6, 1.0, 1.4):
        generator = torch.Generator().manual_seed(1)
        chosen_N = choose(logits_V.expand(draws, -1), temperature, generator)
        expected_V = (logits_V.double() / temperature).softmax(-1) * draws
        statistic = ((torch.bincount(chosen_N, minlength=14) - expected_V) ** 2 / expected_V).sum()
        p_value = torch.special.gammaincc(torch.tensor(13 / 2).double(), statistic / 2)
        assert p_value > 1e-3


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
    texts = [tuple(ids[m] for m in visible_NN[node].nonzero()[:, 0].tolist()) for node in range(len(ids))]
    after = {text: torch.rand(3, generator=torch.Generator().manual_seed(len(text))) for text in texts}
    share = {text: (chance_V / chance_V.sum()).tolist() for text, chance_V in after.items()}
    likely: dict[tuple[int, ...], float] = {}
    for choices in itertools.product(range(3), repeat=len(ids)):
        monkeypatch.setattr(verifying, "choose", lambda *_, said=choices: torch.tensor(said))
        verdict = verify(nodes, torch.zeros(len(ids), 3), 1.0)
        text = (*(ids[node] for node in verdict.path_K.tolist()), int(verdict.bonus_1))
        chance = math.prod(share[texts[node]][choice] for node, choice in enumerate(choices))
        likely[text] = likely.get(text, 0.0) + chance
    for text, chance in likely.items():
        assert chance == pytest.approx(math.prod(share[text[:n]][text[n]] for n in range(1, len(text))))
    assert sum(likely.values()) == pytest.approx(1)


def test_the_same_seed_gives_the_same_answer(target: VisionLanguageTarget) -> None:
    prompt = target.encode(tiny.message("a"))
    drafter = untrained("eagle2", target)

    def answer(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return said(
            speculate(
                target,
                drafter,
                prompt,
                tree=Tree.parse("8-2-2"),
                max_new_tokens=12,
                temperature=1.0,
                generator=generator,
            )
        )

    assert answer(0) == answer(0)
    assert len({tuple(answer(seed)) for seed in range(4)}) > 1


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
