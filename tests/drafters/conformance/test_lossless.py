"""Decoding with a drafter says what the target says, whatever the drafter proposes.

Shapes: P tokens of an answer, V vocabulary, N nodes of a tree.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.thorough import THOROUGH
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding import acceptance as verifying
from vlmdistill.drafters.decoding import decoders
from vlmdistill.drafters.decoding.acceptance import Acceptance, verify
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

pytestmark = pytest.mark.slow

TREES = ["chain-4", "8-2-2", "40-3-8", "chain-6-0.02"]
TOKENS = 10
QUESTIONS = (
    "what is there",
    "tell",
    "a",
    "how many of them are red",
    "say it again",
    "0123456789",
)
SHOWN: dict[str, list[Any]] = {
    "no image": [],
    "one image": [tiny.picture(56, 84)],
    "several images": [tiny.picture(84, 56, seed=1), tiny.picture(140, 28, seed=2)],
    "a video": [tiny.clip(6, 56, 56)],
}
WITHOUT_VIDEO = ("llava", "llava_next")


def said(cycles: Iterator[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.ids]


# At temperature 0: the stock model's own answer

Question = tuple[VisionLanguageTarget, Any, list[int]]


@pytest.fixture(scope="module")
def asked(checkpoint: Callable[..., Path]) -> Callable[[str, str], Question]:
    """A target, a prompt, and the stock model's greedy answer, by family and what is shown."""
    targets: dict[str, VisionLanguageTarget] = {}
    questions: dict[tuple[str, str], Question] = {}

    def ask(family: str, shown: str) -> Question:
        if family not in targets:
            targets[family] = load(str(checkpoint(family)))
        if (family, shown) not in questions:
            target = targets[family]
            prompt = certain_prompt(target, SHOWN[shown])
            answer = target.reference(prompt, max_new_tokens=TOKENS)
            assert answer is not None
            questions[family, shown] = target, prompt, list(answer.ids)
        return questions[family, shown]

    return ask


def certain_prompt(target: VisionLanguageTarget, shown: list[Any]) -> Any:
    """A prompt whose greedy answer has no ties: random weights may rank two tokens within rounding."""
    one = torch.ones(1, dtype=torch.long)
    for question in QUESTIONS:
        prompt = target.encode(tiny.message(question, *shown))
        with torch.inference_mode():
            hidden_1D = target.prefill(prompt, ()).feature("hidden", "text")[-1:]
            gaps = []
            for _ in range(TOKENS):
                best = target.logits(hidden_1D)[0].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                hidden_1D = target.extend(best.indices[:1], one, None, ("hidden",))[
                    "hidden"
                ]
                target.commit([0])
        if min(gaps) > 1e-3:
            return prompt
    raise AssertionError("every question's answer has a tie: ask others")


NAMES = ["no drafter", *catalogue.NAMES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_output_is_that_of_the_stock_model(
    family: str, name: str, asked: Callable[[str, str], Question]
) -> None:
    """All pairs of family, drafter, tree and media; the thorough run shows each family everything."""
    kinds = [kind for kind in SHOWN if kind != "a video" or family not in WITHOUT_VIDEO]
    first = tiny.FAMILIES.index(family)
    if not THOROUGH:
        kinds = [kinds[(first + NAMES.index(name)) % len(kinds)]]
    for number, shown in enumerate(kinds, first):
        target, prompt, expected = asked(family, shown)
        if name == "no drafter":
            cycles = plain(target, prompt, max_new_tokens=TOKENS)
        else:
            tree = Tree.parse(TREES[number % len(TREES)])
            cycles = speculate(
                target,
                untrained(name, target),
                prompt,
                tree=tree,
                max_new_tokens=TOKENS,
            )
        assert said(cycles) == expected, shown


# At temperatures above 0: the same chance, the same answer

TEMPERATURE = 0.9
ANSWERS = 3


class Fate:
    """Chance known beforehand: Gumbel noise [P, V] for the tokens of one answer.

    The best token of logits / T + noise is a sample from the target's distribution. A decoder that, whatever
    the noise, says what plain decoding says therefore has plain decoding's distribution; that the nodes of
    a tree, each with a draw of its own, change nothing is shown by the verifier's own tests.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        chance_PV = torch.rand(
            TOKENS + 50, vocabulary, generator=generator, dtype=torch.float64
        )
        self.noise_PV = -(-chance_PV.log()).log()
        self.said = 0
        self.closest = float("inf")

    def best(self, logits_NV: Tensor, temperature: float, place_N: Tensor) -> Tensor:
        """What the target says as that token of the answer, [N]."""
        two = (logits_NV.double() / temperature + self.noise_PV[place_N]).topk(2)
        self.closest = min(
            self.closest, float((two.values[:, 0] - two.values[:, 1]).min())
        )
        return two.indices[:, 0]

    def reign(
        self, patch: pytest.MonkeyPatch, verifier: Callable[..., Acceptance]
    ) -> None:
        """Decode with this chance and that verifier."""

        def alone(logits_1V: Tensor, temperature: float, generator: None) -> Tensor:
            self.said += 1
            return self.best(logits_1V, temperature, torch.tensor([self.said - 1]))

        def in_tree(
            tree: DraftTree, logits_NV: Tensor, temperature: float, generator: None
        ) -> Acceptance:
            place_N = self.said + tree.depth_N - 1
            patch.setattr(
                verifying,
                "choose",
                lambda logits, heat, _: self.best(logits, heat, place_N),
            )
            verdict = verifier(tree, logits_NV, temperature, generator)
            self.said += int(verdict.length_1)
            return verdict

        patch.setattr(decoders, "choose", alone)
        patch.setattr(decoders, "verify", in_tree)


@pytest.fixture(scope="module")
def small(checkpoint: Callable[..., Path]) -> VisionLanguageTarget:
    """Of few tokens, so that drafters are often right and the target is often surprised."""
    return load(str(checkpoint("qwen2_5_vl", vocabulary=14, layers=2, std=0.25)))


@pytest.fixture(scope="module")
def fated(small: VisionLanguageTarget) -> tuple[Any, dict[int, list[int]]]:
    """A prompt, and plain decoding's answers by seed, none of them a close call."""
    prompt = small.encode(tiny.message("a", *SHOWN["one image"]))
    answers: dict[int, list[int]] = {}
    for seed in range(10 * ANSWERS):
        fate = Fate(seed, small.info.vocab_size)
        with pytest.MonkeyPatch.context() as patch:
            fate.reign(patch, verify)
            answer = said(
                plain(small, prompt, max_new_tokens=TOKENS, temperature=TEMPERATURE)
            )
        if len(answer) > 6 and fate.closest > 1e-3 and len(answers) < ANSWERS:
            answers[seed] = answer
    assert len(answers) == ANSWERS
    return prompt, answers


def agreed(
    target: VisionLanguageTarget,
    fated: tuple[Any, dict[int, list[int]]],
    name: str,
    tree: str,
    verifier: Callable[..., Acceptance],
) -> list[bool]:
    """Whether decoding with a drafter gives plain decoding's answer, by answer."""
    prompt, answers = fated
    same = []
    for seed, answer in answers.items():
        with pytest.MonkeyPatch.context() as patch:
            Fate(seed, target.info.vocab_size).reign(patch, verifier)
            cycles = speculate(
                target,
                untrained(name, target),
                prompt,
                tree=Tree.parse(tree),
                max_new_tokens=TOKENS,
                temperature=TEMPERATURE,
            )
            same.append(said(cycles) == answer)
    return same


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", catalogue.NAMES)
def test_sampled_output_is_that_of_plain_decoding_with_the_same_chance(
    name: str,
    tree: str,
    small: VisionLanguageTarget,
    fated: tuple[Any, dict[int, list[int]]],
) -> None:
    assert all(agreed(small, fated, name, tree, verify))


def trusting(
    tree: DraftTree, logits_NV: Tensor, temperature: float, generator: Any = None
) -> Acceptance:
    """Wrong: the drafter's best guess is kept without asking the target."""
    first = int((tree.parent_N[1:] == 0).nonzero()[0, 0]) + 1
    choice_N = verifying.choose(logits_NV, temperature, generator)
    others = [node for node in range(1, len(tree.ids_N)) if node != first]
    return Acceptance(
        torch.tensor([0, first, *others]),
        torch.tensor([2]),
        choice_N[first : first + 1],
    )


def forgotten_temperature(
    tree: DraftTree, logits_NV: Tensor, temperature: float, generator: Any = None
) -> Acceptance:
    """Wrong: the temperature is left out, as in published code."""
    return verify(tree, logits_NV, 1.3, generator)


@pytest.mark.parametrize("broken", [trusting, forgotten_temperature])
def test_a_broken_verifier_is_found_out(
    broken: Callable[..., Acceptance],
    small: VisionLanguageTarget,
    fated: tuple[Any, dict[int, list[int]]],
) -> None:
    assert not all(agreed(small, fated, "eagle2", "8-2-2", broken))
