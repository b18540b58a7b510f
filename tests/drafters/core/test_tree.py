"""The notation of draft trees: what is written is read, and what could never be verified is refused."""

import pytest

from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError


@pytest.mark.parametrize(
    "text", ["30-3-8", "60-5-10", "2-0-1", "3-0-2", "chain-1", "chain-5", "chain-8-0.3"]
)
def test_a_tree_is_written_as_it_was_read(text: str) -> None:
    assert Tree.parse(str(Tree.parse(text))) == Tree.parse(text)


@pytest.mark.parametrize(
    "text", ["3-30-8", "8-30-3", "8-3-30", "3-8-30", "4-3-1", "9-3-0", "1-0-1"]
)
def test_a_tree_whose_numbers_are_in_another_order_is_refused_in_one_line(
    text: str,
) -> None:
    with pytest.raises(DataError, match=text) as refused:
        Tree.parse(text)
    assert all(word in str(refused.value) for word in ("total", "depth", "k "))
