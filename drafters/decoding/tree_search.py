"""Finds the draft tree that decodes fastest on this hardware, and keeps it with the drafter.

A larger tree gains more tokens in a cycle; each of its nodes costs time on a CPU, and little
on a GPU that has compute to spare. The search halves the candidates in rounds (successive
halving): all decode the same prompts in turn, and the faster half goes on to twice as many.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import Target
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.decoding.clock import Cycle, timed
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.input_files import read_bytes

FILE = "trees.json"  # in the folder of a drafter
FIRST_ROUND = 2  # prompts
WARM_UP = 8  # tokens
THREADS = re.compile(r", threads: \d+")  # in the conditions of a search
CHAINS = (
    "chain-1 chain-2 chain-3 chain-4 chain-5 chain-6 chain-8 chain-8-0.2 chain-8-0.5"
)
WIDE = "6-2-2 8-3-2 12-4-3 16-4-4 30-3-8 30-5-8 60-5-10"
CANDIDATES = tuple(map(Tree.parse, f"{CHAINS} {WIDE}".split()))


class BestTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a search under some conditions."""

    conditions: str
    tree: str
    tokens_per_second: dict[str, float]
    """After the prefill, of each candidate in all rounds that it took part in."""
    measured: str


def conditions(target: Target, compiled: bool = False, temperature: float = 0.0) -> str:
    """What the speed of a tree depends on, besides the drafter and its target."""
    embed_VD = target.head.embed_VD
    dtype = str(embed_VD.dtype).removeprefix("torch.")
    parts = [f"{hardware.of(embed_VD.device).name}, {dtype}"]
    if not embed_VD.is_cuda:
        parts.append(f"threads: {torch.get_num_threads()}")
    if compiled:
        parts.append("compiled")
    if temperature:
        parts.append(f"temperature {temperature:g}")
    return ", ".join(parts)


class _Race:
    """Decodes prompts with trees, and knows how fast each tree was."""

    def __init__(
        self, target: Target, drafter: Proposer, temperature: float, seed: int
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.temperature = temperature
        self.seed = seed
        self.seconds: dict[Tree, float] = {}  # without the prefill
        self.tokens: dict[Tree, int] = {}  # without the prefill's token

    def decode(self, tree: Tree, prompt: Any, max_new_tokens: int) -> None:
        """Decode a prompt, and count its tokens and seconds."""
        device = self.target.head.embed_VD.device
        generator = torch.Generator(device).manual_seed(self.seed)

        def run() -> Iterator[Cycle]:
            return speculate(
                self.target,
                self.drafter,
                prompt,
                tree=tree,
                max_new_tokens=max_new_tokens,
                temperature=self.temperature,
                generator=generator,
            )

        response = timed(run, device)
        self.seconds[tree] += response.seconds - response.prefill_seconds
        self.tokens[tree] += max(0, len(response.ids) - 1)

    def warm_up(self, tree: Tree, prompt: Any, max_new_tokens: int) -> None:
        """Decode without counting: the first tree of a shape allocates and compiles."""
        self.seconds[tree] = 0.0
        self.tokens[tree] = 0
        self.decode(tree, prompt, max_new_tokens)
        self.seconds[tree] = 0.0
        self.tokens[tree] = 0

    def tokens_per_second(self, tree: Tree) -> float:
        """How fast a tree has decoded so far."""
        seconds = self.seconds[tree]
        return self.tokens[tree] / seconds if seconds else 0.0


def search(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    compiled: bool = False,
    on_round: Callable[[int, int], None] = lambda trees, prompts: None,
) -> BestTree:
    """The fastest of `CANDIDATES` and the drafter's own tree on encoded prompts.

    The prompts are used again when they run out. `on_round` gets the numbers of trees and
    prompts of each round.
    """
    deepest = drafter.config.max_hops or CANDIDATES[-1].total
    candidates = [tree for tree in CANDIDATES if tree.depth < deepest]
    trees = [*dict.fromkeys([drafter.tree, *candidates])]
    race = _Race(target, drafter, temperature, seed)
    for tree in trees:
        race.warm_up(tree, prompts[0], min(WARM_UP, max_new_tokens))
    endless_prompts = enumerate(cycle(prompts))
    count = FIRST_ROUND
    while len(trees) > 1:
        on_round(len(trees), count)
        for number, prompt in islice(endless_prompts, count):
            # Another tree begins with each prompt, so that none is always the first.
            turn = number % len(trees)
            for tree in [*trees[turn:], *trees[:turn]]:
                race.decode(tree, prompt, max_new_tokens)
        trees.sort(key=race.tokens_per_second, reverse=True)
        trees = trees[: (len(trees) + 1) // 2]
        count *= 2
    speeds = {}
    for tree in race.seconds:
        speeds[str(tree)] = round(race.tokens_per_second(tree), 2)
    measured = time.strftime("%Y-%m-%d %H:%M:%S")
    under = conditions(target, compiled, temperature)
    return BestTree(under, str(trees[0]), speeds, measured)


def kept(folder: Path, under: str, *, any_threads: bool = False) -> BestTree | None:
    """The best tree of the drafter in `folder` under the conditions `under`, if searched for.

    With `any_threads`, the number of threads may differ.
    """
    searches = {best.conditions: best for best in _read(folder)}
    if any_threads and under not in searches:
        under = THREADS.sub("", under)
        searches = {
            THREADS.sub("", conditions): best for conditions, best in searches.items()
        }
    return searches.get(under)


def keep(folder: Path, best: BestTree) -> None:
    """Write a search into the folder of the drafter; it replaces one under the same conditions."""
    trees = [tree for tree in _read(folder) if tree.conditions != best.conditions]
    rows = msgspec.to_builtins([*trees, best])
    text = json.dumps(rows, indent=1)
    try:
        with atomic_write(folder / FILE) as aside:
            aside.write_text(f"{text}\n")
    except OSError as error:
        raise TrainingError(
            f"the best tree cannot be written to {folder}: {error}"
        ) from None


def _read(folder: Path) -> list[BestTree]:
    """All searches of a drafter."""
    file = folder / FILE
    try:
        return msgspec.json.decode(read_bytes(file), type=list[BestTree])
    except FileNotFoundError:
        return []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a list of trees ({error}): remove it") from None
