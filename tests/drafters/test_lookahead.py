"""Lookahead: its window and tree are the paper's, and n-grams that it has seen are proposed.

Shapes: N nodes of a tree, L levels and W columns of the window, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.drafters.lookahead import Lookahead, Window
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError

SIZE = 50
NEXT = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
"""What a target says that looks at the last token alone."""


def window(prompt: range | list[int] = range(10, 20), **settings: Any) -> Window:
    made = Window(Lookahead.Config(**settings), torch.tensor(list(prompt)))
    say(made, 7)
    return made


def say(made: Window, *ids: int) -> None:
    made.commit(torch.tensor(ids), torch.zeros(len(ids), 0))


def observe(made: Window) -> DraftTree:
    """One call of the target."""
    nodes = made.grow(Tree())
    made.observe(torch.nn.functional.one_hot(NEXT[nodes.ids_N], SIZE).float())
    return nodes


def guesses(nodes: DraftTree, level: int, width: int) -> list[list[int]]:
    """The n-grams after the window, without the token that they begin with."""
    rest = nodes.ids_N[(level - 1) * width :]
    return [list(one) for one in rest.view(-1, level - 1).tolist()]


@pytest.mark.parametrize(("level", "columns"), [(5, 7), (2, 3), (3, 1)])
def test_a_token_of_the_window_sees_the_first_level_up_to_it_and_its_own_column(
    level: int, columns: int
) -> None:
    made = window(
        level=level,
        window=columns,
        pool_from_prompt=True,
        prompt=[7, 1, 2, 3, 4, 7, 5, 6, 8, 9],
    )
    nodes = made.grow(Tree())
    place = {
        (row, column): row * columns + column
        for row in range(level - 1)
        for column in range(columns)
    }
    for (row, column), node in place.items():
        # The last certain token is (0, 0), at depth 1; (l, w) stands w + l places after it.
        assert int(nodes.depth_N[node]) == 1 + row + column
        seen = {place[0, before] for before in range(column + 1)} | {
            place[above, column] for above in range(row + 1)
        }
        assert set(nodes.visible_NN[node].nonzero()[:, 0].tolist()) == seen
    assert int(nodes.ids_N[0]) == 7
    found = guesses(nodes, level, columns)
    assert len(found) == 2
    for number in range(len(found)):  # chains of their own after the last certain token
        for deep in range(level - 1):
            node = len(place) + number * (level - 1) + deep
            assert int(nodes.depth_N[node]) == 2 + deep
            first = len(place) + number * (level - 1)
            assert nodes.visible_NN[node].nonzero()[:, 0].tolist() == [
                0,
                *range(first, node + 1),
            ]


def test_the_tree_asked_for_changes_nothing() -> None:
    one, other = (
        window().grow(Tree.parse("chain-2")),
        window().grow(Tree.parse("60-5-10")),
    )
    assert torch.equal(one.ids_N, other.ids_N)
    assert torch.equal(one.visible_NN, other.visible_NN)


def test_the_window_moves_on_by_a_place_and_takes_in_what_was_said() -> None:
    made = window(level=4, window=5)
    before_LW = torch.tensor(made.rows)
    observe(made)
    after_LW = torch.tensor(made.rows)
    assert torch.equal(after_LW[:-1], before_LW[1:])
    assert torch.equal(after_LW[-1], NEXT[before_LW[-1]])
    say(made, 30, 31)
    assert made.rows[0][0] == 31


def test_n_grams_are_what_the_target_says_once_it_has_made_the_whole_window() -> None:
    made, level, width = window(level=4, window=5, guesses=50), 4, 5
    for _ in range(level - 1):
        observe(made)
    made.pool.clear()
    for _ in range(6):
        observe(made)  # the first column is left as it is, too: nothing is committed
    assert len(made.pool) > width
    for first, rest in (
        (first, rest) for first, known in made.pool.items() for rest in known
    ):
        assert torch.equal(torch.tensor(rest), NEXT[torch.tensor([first, *rest[:-1]])])


def test_of_each_first_token_the_latest_n_grams_are_kept_and_guessed_latest_first() -> (
    None
):
    prompt = [7, 1, 7, 2, 7, 3, 7, 1, 7, 4]
    made = window(prompt, level=2, window=1, guesses=3, pool_from_prompt=True)
    assert guesses(made.grow(Tree()), 2, 1) == [
        [4],
        [1],
        [3],
    ]  # 2 fell out, 1 was said again
    say(made, 2)
    assert guesses(made.grow(Tree()), 2, 1) == [[7]]
    assert (
        guesses(window(prompt, level=2, window=1, guesses=3).grow(Tree()), 2, 1) == []
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_target_that_repeats_a_phrase_is_foreseen(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    target = load(str(checkpoint(family)))
    with (
        torch.no_grad()
    ):  # each token follows from the last one alone: sooner or later it goes in circles
        for layer in target.model.model.language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    prompt = target.encode(tiny.message("tell", tiny.picture(56, 84)))
    expected = [
        token
        for cycle in plain(target, prompt, max_new_tokens=60)
        for token in cycle.ids
    ]
    drafter = Lookahead(Lookahead.Config(), target.info, target.head)
    cycles = list(speculate(target, drafter, prompt, tree=Tree(), max_new_tokens=60))
    assert [token for cycle in cycles for token in cycle.ids] == expected
    assert len(expected) / len(cycles) > 1.5
    assert [len(cycle.ids) for cycle in cycles[-6:-1]] == [
        5
    ] * 5  # an n-gram and the bonus, every time


def test_sizes_that_leave_nothing_to_do_are_refused() -> None:
    for setting in ("level=1", "window=0", "guesses=0"):
        with pytest.raises(DataError, match=setting):
            override(catalogue.config("lookahead"), [setting])
