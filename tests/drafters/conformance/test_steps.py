"""What the trainer computes is what the decoder computes, and no row sees what it must not."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import CASES, INFO, LAYOUTS, batch, begun, build
from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature

HOPS = 4
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    (
        "dflash",
        {"layers": 2, "context": "all", "positions": "expanded", "attention_window": 5},
    ),
    ("dream", {"attention_window": 5}),
    ("eagle2", {"attention_window": 1}),
    ("msd", {"attention_window": 6}),
    ("vispec", {"num_q": 4, "attention_window": 4}),
    ("wren", {"attention_window": 3}),
]


def needs(drafter: Drafter, *, decoding: bool = False) -> frozenset[Feature]:
    return drafter.config.needs(INFO, decoding=decoding)


def training_states(drafter: Drafter, packed: Batch, chosen: Tensor) -> list[Tensor]:
    """States of every hop at the chosen text tokens, as the trainer computes them."""
    cache = PackedKVCache(drafter.config.attention_window)
    drafter.condition(packed, cache)
    entries, token_E = drafter.entries(packed)
    rows = torch.stack([(token_E == token).nonzero()[0, 0] for token in chosen])
    tokens = entries.tokens.with_rows(rows)
    entries, start = (
        Entries(entries.ids_N, entries.hidden_ND, entries.rotary_N, tokens),
        entries,
    )
    states = []
    for hop in range(HOPS):
        states.append(drafter.step(entries, cache))
        ids = packed.ids_T[(chosen + hop + 1).clamp(max=len(packed.ids_T) - 1)]
        rotary = start.rotary_N[rows] + hop + 1
        entries = Entries(ids, states[-1], rotary, tokens.at_rows(), hop + 1)
    return states


@pytest.mark.parametrize(("name", "settings"), [*CASES, *WINDOWED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_train_step_is_the_decode_step_at_every_hop(
    name: str, settings: dict[str, Any], layout: str
) -> None:
    drafter = build(name, **settings).eval()
    sample = batch([LAYOUTS[layout]], needs(drafter))
    last = len(sample.ids_T) - 1
    for token in (last - HOPS - 1, last - HOPS):
        expected = training_states(drafter, sample, torch.tensor([token]))
        draft = begun(drafter, sample, token)
        assert draft.state_1D is not None
        got = [draft.state_1D]
        for hop in range(1, HOPS):
            position = torch.full((1,), draft.position + hop)
            seen = torch.ones(1, hop).bool()
            tokens = TokenIndex(torch.zeros(1).long(), position, draft.span, None, seen)
            ids = sample.ids_T[token + hop : token + hop + 1]
            rotary = torch.tensor([draft.rotary + hop - 1])
            got.append(
                drafter.step(Entries(ids, got[-1], rotary, tokens, hop), draft.cache)
            )
        for hop in range(HOPS):
            torch.testing.assert_close(got[hop], expected[hop], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_packing_samples_side_by_side_changes_nothing(
    name: str, settings: dict[str, Any]
) -> None:
    drafter = build(name, **settings).train()
    packed = batch(LAYOUTS.values(), needs(drafter))
    start = 0
    for number, layout in enumerate(LAYOUTS.values()):
        text = sum(kind != "v" for kind in layout)
        chosen = torch.arange(start + text - HOPS - 2, start + text - HOPS)
        together = training_states(drafter, packed, chosen)
        alone = training_states(drafter, one(packed, number), chosen - start)
        for hop in range(HOPS):
            torch.testing.assert_close(together[hop], alone[hop], rtol=1e-4, atol=1e-5)
        start += text


def one(packed: Batch, number: int) -> Batch:
    """Sample `number` of a packed batch, alone."""
    text, spans = packed.segment_T == number, packed.segment_M == number
    chosen = {
        "text": text,
        "span": spans,
        "visual": packed.visual_tokens.segment_N == number,
    }
    zero = torch.zeros_like
    return Batch(
        packed.ids_T[text],
        packed.response_T[text],
        packed.position_T[text],
        packed.rope_T[text],
        zero(packed.segment_T[text]),
        packed.start_M[spans],
        packed.length_M[spans],
        zero(packed.segment_M[spans]),
        {
            feature: state[chosen[feature.where]]
            for feature, state in packed.features.items()
        },
    )


def test_a_tree_of_one_branch_is_a_chain() -> None:
    drafter = build("eagle2").eval()
    sample = batch([LAYOUTS["one image"]], needs(drafter))
    tree = begun(drafter, sample, 10).grow(Tree.parse("chain-4"))
    assert tree.parent_N.tolist() == [0, 0, 1, 2, 3]
    assert tree.depth_N.tolist() == [1, 2, 3, 4, 5]
    assert tree.greedy_N.all()
    assert tree.visible_NN.tolist() == torch.ones(5, 5).tril().bool().tolist()


@pytest.mark.parametrize("confidence", [0.9999, 0.02, 1e-9])
def test_a_chain_ends_where_the_drafter_is_not_confident(confidence: float) -> None:
    drafter = build("eagle2").eval()
    sample = batch([LAYOUTS["one image"]], needs(drafter))

    @torch.no_grad()
    def grown(tree: Tree) -> DraftTree:
        return begun(drafter, sample, 10).grow(tree)

    chances = list[float]()
    logits = drafter.logits

    @torch.no_grad()
    def told(*args: Any) -> Tensor:
        found = logits(*args)
        chances.append(float(found.softmax(-1).max()))
        return found

    drafter.logits = told  # type: ignore[method-assign, assignment]
    whole = grown(Tree.parse("chain-6"))
    together = [math.prod(chances[: length + 1]) for length in range(6)]
    kept = sum(
        1 for _ in itertools.takewhile(lambda chance: chance >= confidence, together)
    )
    tree = grown(replace(Tree.parse("chain-6"), confidence=confidence))
    assert tree.ids_N.tolist() == whole.ids_N[: kept + 1].tolist()
    assert tree.visible_NN.tolist() == whole.visible_NN[: kept + 1, : kept + 1].tolist()
    assert len(chances) == 6 + min(6, kept + 1)  # nothing is drafted after that
    assert whole.chance_N is None
    assert tree.chance_N is not None
    assert tree.chance_N.tolist() == pytest.approx([1, *chances[:kept]], rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["9-2-3", "60-2-3"])  # pruned, and whole
def test_a_tree_tells_the_chance_of_each_node_after_its_parent(shape: str) -> None:
    drafter = build("dflash", layers=2, block=5, markov=3).eval()
    sample = batch([LAYOUTS["one image"]], needs(drafter))
    draft = begun(drafter, sample, 10)
    tree = draft.grow(Tree.parse(shape))
    assert tree.chance_N is not None
    assert tree.chance_N[0] == 1
    assert draft.state_1D is not None
    for node, parent in list(enumerate(tree.parent_N.tolist()))[1:]:
        hop = int(tree.depth_N[parent]) - 1
        softmax_1V = drafter.logits(
            draft.state_1D, tree.ids_N[parent : parent + 1], hop
        ).softmax(-1)
        torch.testing.assert_close(
            tree.chance_N[node], softmax_1V[0, tree.ids_N[node]], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    "shape", ["chain-8-0.3", "chain-8-0.0001", "chain-8-0.9999", "chain-1", "30-3-8"]
)
def test_a_shape_is_read_as_it_is_written(shape: str) -> None:
    assert str(Tree.parse(shape)) == shape
    assert Tree.parse(str(Tree.parse(shape))) == Tree.parse(shape)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "chain-0",
            "chain-8-1.5",
            "chain-8-0.",
            "chain-8-0.0",
            "chain-8-0.00001",
            "chain-8-0.1234567",
        ),
        *("chain-8--0.3", "1-3-8", "30-3", "auto"),
    ],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        Tree.parse(text)
