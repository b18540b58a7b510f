"""DFlash and DSpark: the block against its definition, written out; heads; anchors."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS, batch, begun, head
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.layers import DecoderLayer, apply_rotary
from vlmdistill.drafters.core.losses import TargetRows, score
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.dflash import DFlash
from vlmdistill.drafters.training.unroll import RUN, rows_of, supervised, unroll
from vlmdistill.stores.errors import DataError


def build(**settings: object) -> DFlash:
    drafter = synthetic.build("dflash", **settings)
    assert isinstance(drafter, DFlash)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return drafter.eval()


def drafted(
    drafter: DFlash, sample: Batch, tree: str = "chain-3"
) -> tuple[Tensor, DraftTree]:
    """The states of the block after all tokens, and a tree; the root is the last token."""
    draft = begun(drafter, sample, len(sample.ids_T) - 1)
    assert draft.state_1D is not None
    return draft.state_1D, draft.grow(Tree.parse(tree))


def written_out(drafter: DFlash, sample: Batch) -> Tensor:
    """Section 4 of the paper for one block: [slots, D]. Position t of the context has the fused state h_t."""
    last = int(sample.position_T[-1])
    width = INFO.hidden_size
    state_PS = torch.zeros(last, width * len(drafter.sources))
    for column, source in enumerate(drafter.sources):
        rows = slice(column * width, (column + 1) * width)
        before = sample.position_T < last
        state_PS[sample.position_T[before], rows] = sample.feature(source, "text")[
            before
        ]
        if drafter.config.context == "all":
            state_PS[sample.visual_tokens.position_N, rows] = sample.feature(
                source, "visual"
            )
    context_PD = drafter.hidden_norm(drafter.fc(state_PS))
    slots = drafter.config.block
    x_JD = torch.cat(
        [drafter.embed_VD[sample.ids_T[-1:]], drafter.mask_D.expand(slots - 1, -1)]
    )
    place_P, place_J = torch.arange(last), last + torch.arange(slots)
    for layer, norm in zip(drafter.layers, drafter.input_norms, strict=True):
        assert isinstance(layer, DecoderLayer)
        heads = [
            count * layer.head_dim
            for count in (layer.heads, layer.kv_heads, layer.kv_heads)
        ]
        query, key, value = torch.split(layer.qkv_proj.weight, heads)
        normed_JD = norm(x_JD)
        both_SD = torch.cat([context_PD, normed_JD])
        q_JHd = (normed_JD @ query.T).view(slots, layer.heads, -1)
        k_SKd, v_SKd = (
            (both_SD @ part.T).view(len(both_SD), layer.kv_heads, -1)
            for part in (key, value)
        )
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q_JHd = apply_rotary(layer.q_norm(q_JHd), layer.rotary(place_J, x_JD.dtype))
        k_SKd = apply_rotary(
            layer.k_norm(k_SKd), layer.rotary(torch.cat([place_P, place_J]), x_JD.dtype)
        )
        group = layer.heads // layer.kv_heads
        k_SHd, v_SHd = (part.repeat_interleave(group, 1) for part in (k_SKd, v_SKd))
        score_HJS = torch.einsum("jhd,shd->hjs", q_JHd, k_SHd) * layer.head_dim**-0.5
        mixed_JHd = torch.einsum("hjs,shd->jhd", score_HJS.softmax(-1), v_SHd)
        x_JD = x_JD + layer.o_proj(mixed_JHd.flatten(1))
        gate, up = layer.gate_up_proj(layer.post_attention_norm(x_JD)).chunk(2, -1)
        x_JD = x_JD + layer.down_proj(F.silu(gate) * up)
    out_JD: Tensor = drafter.norm(x_JD)
    return out_JD


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("no image", {}),
        ("no image", {"from_anchor": True, "layers": 1, "kv_heads": "all"}),
        ("one image", {"context": "all", "positions": "expanded", "taps": (1, 2, 3)}),
        (
            "several images",
            {"context": "all", "positions": "expanded", "taps": (2,), "block": 4},
        ),
    ],
)
def test_a_block_is_what_its_definition_says(
    layout: str, settings: dict[str, object]
) -> None:
    drafter = build(**settings)
    sample = batch([LAYOUTS[layout]], drafter.config.needs(INFO))
    state_1X, _ = drafted(drafter, sample)
    expected_JD = written_out(drafter, sample)[
        drafter.config.block - drafter.config.max_hops :
    ]
    torch.testing.assert_close(
        state_1X.view(-1, INFO.hidden_size), expected_JD, rtol=1e-4, atol=1e-5
    )


def test_without_visual_context_a_longer_image_changes_nothing() -> None:
    drafter = build()
    short, long = (
        batch([f"tt{'v' * count}ttrrrr"], drafter.config.needs(INFO), seed=3)
        for count in (4, 40)
    )
    states = []
    for sample in (short, long):
        same = {
            name: short.features[name]
            for name in short.features
            if name.where == "text"
        }
        one = replace(sample, ids_T=short.ids_T).having(same)
        states.append(drafted(drafter, one)[0])
    torch.testing.assert_close(*states)


def test_a_markov_head_makes_the_children_of_siblings_differ() -> None:
    for markov in (0, 4):
        drafter = build(markov=markov)
        if markov:
            torch.nn.init.normal_(drafter.markov_out.weight, std=9)
        sample = batch([LAYOUTS["no image"]], drafter.config.needs(INFO))
        _, tree = drafted(drafter, sample, "30-2-4")
        children = {
            int(node): tree.ids_N[1:][tree.parent_N[1:] == node].tolist()
            for node in range(len(tree.ids_N))
            if tree.depth_N[node] == 2
        }
        whole = [ids for ids in children.values() if len(ids) == 4]
        assert len(whole) > 1
        assert (len({tuple(ids) for ids in whole}) > 1) == bool(markov)


def test_the_confidence_head_learns_the_chance_of_acceptance_and_ends_a_chain() -> None:
    drafter = build(tells=True, markov=3).train()
    sample = batch(LAYOUTS.values(), drafter.config.needs(INFO))
    stage = Stage(name="test", hops=3, losses={"confidence": 1.0})
    optimizer = torch.optim.Adam(drafter.tell.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        out = unroll(drafter, sample, stage)
        optimizer.zero_grad()
        out.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(out.total.detach()))
    assert losses[-1] < 0.9 * losses[0]
    drafter.eval()
    with torch.no_grad():
        for bias, length in ((20.0, 6), (-20.0, 0)):
            drafter.tell.weight.zero_()
            drafter.tell.bias.fill_(bias)
            one = batch([LAYOUTS["no image"]], drafter.config.needs(INFO))
            assert len(drafted(drafter, one, "chain-6-0.5")[1].ids_N) == 1 + length


def test_the_chance_of_acceptance_counts_tokens_that_the_draft_vocabulary_lacks() -> (
    None
):
    """A guess is accepted with the chance min(p, q), summed over the columns; the best may have none."""
    torch.manual_seed(0)
    hidden_TD, estimate_RD, last = (
        torch.randn(8, 16),
        torch.randn(6, 16),
        head().lm_head_VD,
    )
    columns_K, told_R = torch.tensor([4, 5, 9, 20]), torch.linspace(-2, 2, 6)
    rows = TargetRows(
        hidden_TD, torch.arange(8), torch.arange(6), torch.ones(1, 6, dtype=torch.bool)
    )
    scores = score(
        [estimate_RD],
        rows,
        lambda estimate_ND, last_N: estimate_ND @ last[columns_K].T,
        last,
        {"confidence": 1.0},
        confidence=lambda estimate_ND, last_N: told_R,
        vocabulary_K=columns_K,
    )
    target_RK = (hidden_TD[:6] @ last.T).softmax(-1)[:, columns_K]
    chance_R = torch.minimum(
        (estimate_RD @ last[columns_K].T).softmax(-1), target_RK
    ).sum(-1)
    expected_R = F.binary_cross_entropy_with_logits(told_R, chance_R, reduction="none")
    torch.testing.assert_close(scores.hops[0].loss_R, expected_R)
    assert scores.hops[0].count_R.all()


def test_a_loss_that_needs_a_head_is_refused_without_it() -> None:
    with pytest.raises(DataError, match="confidence"):
        override(catalogue.config("eagle2"), ['stages.*.losses={"confidence":1}'])
    assert catalogue.config("dspark").schedule[0].losses["confidence"] == 1.0


@pytest.mark.parametrize("settings", [{"taps": (9,)}, {"layers": 0}, {"block": 1}])
def test_a_shape_that_cannot_be_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(DataError):
        build(**settings)


# Anchors: they serve every method


def test_anchors_bound_the_rows_of_each_sample() -> None:
    drafter = synthetic.build("hass")
    long = "tt" + "r" * 100
    sample = batch([long, "ttrrrrrr", "tvv" + long], drafter.config.needs(INFO))
    stage = Stage(name="test", hops=2, anchors=40, losses={"cross_entropy": 1.0})
    out = unroll(drafter, sample, stage, torch.Generator().manual_seed(1))
    assert torch.bincount(out.segment_R).tolist() == [40, 5, 40]
    assert rows_of(sample, stage) == 85
    assert rows_of(sample, replace(stage, anchors=0)) == int(supervised(sample).sum())


def test_enough_anchors_are_all_rows_and_few_are_an_unbiased_part() -> None:
    drafter = synthetic.build("eagle2")
    sample = batch(["tt" + "r" * (6 * RUN + 1)], drafter.config.needs(INFO))
    stage = Stage(name="test", losses={"cross_entropy": 1.0})
    whole = unroll(drafter, sample, stage).scores[0].loss_R
    enough = unroll(drafter, sample, replace(stage, anchors=6 * RUN)).scores[0].loss_R
    torch.testing.assert_close(enough, whole)
    means = []
    for seed in range(60):
        some = unroll(
            drafter,
            sample,
            replace(stage, anchors=RUN),
            torch.Generator().manual_seed(seed),
        )
        means.append(float(some.scores[0].loss_R.mean()))
    assert len({round(mean, 6) for mean in means}) == 6  # every run is drawn
    spread = float(torch.tensor(means).std()) / 60**0.5
    assert abs(sum(means) / 60 - float(whole.mean())) < 4 * spread
