"""Finds the draft tree that decodes fastest with a drafter on this hardware, and keeps it with the drafter.

A larger tree gains more tokens in a cycle, and each of its nodes costs time on a CPU that a GPU has to spare.
The search halves the candidates in rounds (successive halving): all decode the same prompts in turn, and the
faster half goes on to twice as many.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import Target
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.decoding.clock import timed
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.input_files import read_bytes

FILE = "trees.json"  # in the folder of a drafter
FIRST_ROUND = 2  # prompts
THREADS = re.compile(r", threads: \d+")  # in the conditions of a search
CANDIDATES = tuple(
    Tree.parse(shape)
    for shape in (
        *(f"chain-{length}" for length in (1, 2, 3, 4, 5, 6, 8)),
        *("chain-8-0.2", "chain-8-0.5"),
        *("6-2-2", "8-3-2", "12-4-3", "16-4-4", "30-3-8", "30-5-8", "60-5-10"),
    )
)


class BestTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a search under some conditions."""

    conditions: str
    tree: str
    tokens_per_second: dict[
        str, float
    ]  # after the prefill, of each candidate in its last round
    measured: str


def conditions(target: Target, compiled: bool = False, temperature: float = 0.0) -> str:
    """What the speed of a tree depends on, besides the drafter and its target."""
    embed_VD = target.head.embed_VD
    threads = "" if embed_VD.is_cuda else f", threads: {torch.get_num_threads()}"
    how = (", compiled" if compiled else "") + (
        f", temperature {temperature:g}" if temperature else ""
    )
    return f"{hardware.of(embed_VD.device).name}, {str(embed_VD.dtype).removeprefix('torch.')}{threads}{how}"


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
    device, deepest = (
        target.head.embed_VD.device,
        drafter.config.max_hops or CANDIDATES[-1].total,
    )
    trees = [tree for tree in CANDIDATES if tree.depth < deepest]
    left = list(dict.fromkeys([drafter.tree, *trees]))
    seconds, tokens = dict.fromkeys(left, 0.0), dict.fromkeys(left, 0)
    endless, count, number = cycle(prompts), FIRST_ROUND, 0

    def decode(tree: Tree, prompt: Any, limit: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        response = timed(
            lambda: speculate(
                target,
                drafter,
                prompt,
                tree=tree,
                max_new_tokens=limit,
                temperature=temperature,
                generator=generator,
            ),
            device,
        )
        seconds[tree] += response.seconds - response.prefill_seconds
        tokens[tree] += max(0, len(response.ids) - 1)

    def pace(tree: Tree) -> float:
        return tokens[tree] / seconds[tree] if seconds[tree] else 0.0

    for tree in left:  # a warm-up: the first tree of a shape allocates and compiles
        decode(tree, prompts[0], min(8, max_new_tokens))
        seconds[tree], tokens[tree] = 0.0, 0
    while len(left) > 1:
        on_round(len(left), count)
        for prompt in islice(endless, count):
            turn = number % len(left)
            for tree in [*left[turn:], *left[:turn]]:
                decode(tree, prompt, max_new_tokens)
            number += 1
        left = sorted(left, key=pace, reverse=True)[: (len(left) + 1) // 2]
        count *= 2
    return BestTree(
        conditions(target, compiled, temperature),
        str(left[0]),
        {str(tree): round(pace(tree), 2) for tree in seconds},
        time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def kept(folder: Path, under: str, *, any_threads: bool = False) -> BestTree | None:
    """The best tree of the drafter in `folder` under these conditions; None if none was searched for.

    With `any_threads`, one that was found with another number of threads will do.
    """
    searched = {one.conditions: one for one in _read(folder)}
    if any_threads and under not in searched:
        searched = {
            THREADS.sub("", conditions): one for conditions, one in searched.items()
        }
        under = THREADS.sub("", under)
    return searched.get(under)


def keep(folder: Path, best: BestTree) -> None:
    """Write a search into the folder of the drafter, in place of one under the same conditions."""
    others = [kept for kept in _read(folder) if kept.conditions != best.conditions]
    text = json.dumps(msgspec.to_builtins([*others, best]), indent=1)
    try:
        with atomic_write(folder / FILE) as aside:
            aside.write_text(f"{text}\n")
    except OSError as error:
        raise TrainingError(
            f"the best tree cannot be kept in {folder}: {error}"
        ) from None


def _read(folder: Path) -> list[BestTree]:
    try:
        return msgspec.json.decode(read_bytes(folder / FILE), type=list[BestTree])
    except FileNotFoundError:
        return []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{folder / FILE} is not a list of trees ({error}): remove it"
        ) from None
