"""Chooses the CPU threads and the draft trees of an evaluation."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import tree_search
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.drafters.decoding.tree_search import BestTree
from vlmdistill.pipelines.bench.sampled import prompt_seed
from vlmdistill.pipelines.bench.settings import Settings, Shape
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.stores.progress import Progress

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

SEARCH_TOKENS = 128  # of each response in a search for the fastest tree


def use_threads(wanted: int, target: "VisionLanguageTarget", prompt: Any) -> int:
    """Set torch's CPU threads to `wanted`; 0: to one or all, whichever decodes this target faster.

    `prompt` is encoded. Returns the number of threads; on a GPU it stays as it is.
    """
    available = torch.get_num_threads()
    if target.device.type != "cpu":
        return available
    threads = wanted
    if not threads:
        threads = available
        if available > 1 and _seconds(target, prompt, 1) <= _seconds(
            target, prompt, available
        ):
            threads = 1
    torch.set_num_threads(threads)
    return threads


def _seconds(target: "VisionLanguageTarget", prompt: Any, threads: int) -> float:
    """The seconds of some steps of plain decoding, the least of three times."""
    torch.set_num_threads(threads)
    list(plain(target, prompt, max_new_tokens=8))  # a warm-up
    runs = []
    for _ in range(3):
        cycles = list(plain(target, prompt, max_new_tokens=24))
        runs.append(sum(cycle.seconds for cycle in cycles[1:]))
    return min(runs)


def choose_trees(
    trained: Trained,
    drafter: Proposer,
    target: "VisionLanguageTarget",
    settings: Settings,
    search_prompts: Callable[[], Sequence[Prompt]],
    on_prompt: Progress,
) -> list[Tree]:
    """The trees to decode with, each once.

    `auto` is what an earlier search has kept with the drafter, or is searched for on `search_prompts`.
    """
    trees: list[Tree] = []
    for shape in _wanted(drafter, settings):
        if isinstance(shape, Tree):
            trees.append(shape)
        else:
            best = _fastest(
                trained, drafter, target, settings, search_prompts, on_prompt
            )
            trees.append(Tree.parse(best.tree))
    return list(dict.fromkeys(trees))


def _wanted(drafter: Proposer, settings: Settings) -> Sequence[Shape]:
    """The trees of the settings, else the drafter's own."""
    if not settings.trees:
        return (drafter.tree,)
    if drafter.shaped:
        return settings.trees
    # A drafter that drafts a tree of its own decodes alike with each: once is enough.
    first = settings.trees[0]
    return (drafter.tree,) if first == "auto" else (first,)


def _fastest(
    trained: Trained,
    drafter: Proposer,
    target: "VisionLanguageTarget",
    settings: Settings,
    search_prompts: Callable[[], Sequence[Prompt]],
    on_prompt: Progress,
) -> BestTree:
    """The tree of an earlier search under the same conditions, or of one now."""
    temperature = settings.temperatures[0]
    conditions = tree_search.conditions(target, settings.compiled, temperature)
    if best := tree_search.kept(trained.folder, conditions):
        return best

    def on_round(left: int, count: int) -> None:
        on_prompt(0, 1, f"{trained.name}: {left} trees on {count} prompts")

    best = tree_search.search(
        target,
        drafter,
        [target.encode(prompt.messages) for prompt in search_prompts()],
        max_new_tokens=min(settings.max_new_tokens, SEARCH_TOKENS),
        temperature=temperature,
        seed=prompt_seed(settings.seed, 0),
        compiled=settings.compiled,
        on_round=on_round,
    )
    if trained.folder.is_dir():
        tree_search.keep(trained.folder, best)
    return best
