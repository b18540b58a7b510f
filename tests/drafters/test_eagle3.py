"""EAGLE-3: three depths fused once, a draft vocabulary, and a state that recurs before its norm."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS, batch, begun, built, head, stopped
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.config import Stage, depths
from vlmdistill.drafters.core.kv_cache import GrowingKVCache
from vlmdistill.drafters.core.losses import TargetRows, score
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.vocabulary import columns_of, coverage
from vlmdistill.drafters.eagle3 import Eagle3
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store

LAST = torch.zeros(1).long()  # a token that its scores do not depend on
SPOKEN = [3, 4, 8, 11, 19]  # a draft vocabulary
COUNTS = torch.zeros(INFO.vocab_size).index_fill(0, torch.tensor(SPOKEN), 7.0)


def build(**settings: object) -> Eagle3:
    drafter = built(Eagle3, **settings)
    drafter.choose_vocabulary(COUNTS)
    return drafter


def sample(drafter: Eagle3, *layouts: str) -> Batch:
    return batch(layouts, drafter.config.needs(INFO))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (28, (2, 14, 25)),
        (32, (2, 16, 29)),
        (10, (2, 5, 7)),
        (7, (2, 3, 4)),
        (6, (2, 3, 4)),
        (4, (1, 2, 3)),
    ],
)
def test_the_depths_are_those_of_the_code_and_stay_apart(
    layers: int, expected: tuple[int, ...]
) -> None:
    assert depths(layers) == tuple(f"layer{layer}" for layer in expected)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_depth_exists_on_the_shallowest_target(layers: int) -> None:
    assert all(int(name.removeprefix("layer")) < layers for name in depths(layers))


def test_without_visual_entries_no_visual_row_is_needed_but_the_last_of_a_span() -> (
    None
):
    taps = ("layer1", "layer2", "layer3")
    everywhere = {Feature(tap, where) for tap in taps for where in ("text", "visual")}
    on_text = {Feature(tap, where) for tap in taps for where in ("text", "span")}
    hidden, embed = Feature("hidden", "text"), Feature("embed", "visual")
    whole, text = Eagle3.Config(), Eagle3.Config(visual="none")
    assert whole.needs(INFO) == {*everywhere, embed, hidden}
    assert whole.needs(INFO, decoding=True) == {*everywhere, embed}
    assert text.needs(INFO) == {*on_text, hidden}
    assert text.needs(INFO, decoding=True) == on_text


def test_three_states_are_fused_at_hop_0_and_never_again() -> None:
    drafter = build()
    fused: list[int] = []
    drafter.fc.register_forward_hook(lambda fc, given, made: fused.append(len(made)))
    one = sample(drafter, LAYOUTS["no image"])
    unroll(drafter, one, Stage(name="test", hops=4, losses={"cross_entropy": 1.0}))
    assert fused == [
        0,
        len(one.ids_T) - 1,
    ]  # of visual tokens, there being none, and of the entries


def test_the_state_is_carried_unnormed_and_the_norm_is_of_the_logits_alone() -> None:
    drafter = build()
    with torch.no_grad():
        drafter.layer.o_proj.weight.zero_()
        drafter.layer.down_proj.weight.zero_()
    hidden_1D = torch.full((1, INFO.hidden_size), 3.0)
    place = TokenIndex(
        torch.zeros(1).long(), torch.ones(1).long(), torch.zeros(1).long()
    )
    entry = Entries(torch.tensor([5]), hidden_1D, torch.zeros(1).long(), place, hop=1)
    state_1D = drafter.step(entry, GrowingKVCache())
    assert torch.equal(state_1D, hidden_1D)  # the residual is what came in
    torch.testing.assert_close(
        drafter.logits(state_1D, LAST), drafter.lm_head(drafter.norm(state_1D))
    )
    torch.testing.assert_close(
        drafter.logits(state_1D, LAST), drafter.logits(state_1D * 2, LAST)
    )


def test_the_draft_vocabulary_is_the_most_frequent_tokens_then_the_first_ids() -> None:
    drafter = build(draft_vocab=5)
    assert drafter.vocabulary_K is not None
    assert drafter.vocabulary_K.tolist() == SPOKEN
    assert (drafter.d2t + torch.arange(5)).tolist() == SPOKEN
    more = build(draft_vocab=7).vocabulary_K
    assert more is not None
    assert more.tolist() == sorted([0, 1, *SPOKEN])
    assert build().vocabulary_K is None
    assert columns_of(build()) is None


@pytest.mark.parametrize("tree", ["chain-4", "8-2-2", "40-3-8"])
def test_what_is_drafted_is_a_target_id_and_is_fed_back_as_one(tree: str) -> None:
    drafter = build(draft_vocab=5)
    one = sample(drafter, LAYOUTS["one image"])
    draft = begun(drafter, one, 9)
    fed: list[Tensor] = []
    step = drafter.step

    def record(entries: Entries, cache: GrowingKVCache) -> Tensor:
        fed.append(entries.ids_N)
        return step(entries, cache)

    drafter.step = record  # type: ignore[method-assign, assignment]
    nodes = draft.grow(Tree.parse(tree))
    assert set(nodes.ids_N[1:].tolist()) <= set(SPOKEN)
    assert all(set(ids_N.tolist()) <= set(SPOKEN) for ids_N in fed)
    assert draft.state_1D is not None
    best = int(drafter.logits(draft.state_1D, LAST).argmax())
    chain = nodes.ids_N[nodes.greedy_N]
    assert chain[1] == SPOKEN[best]


def test_the_loss_is_over_the_draft_vocabulary_and_spares_what_it_cannot_say() -> None:
    drafter = build(draft_vocab=5)
    generator = torch.Generator().manual_seed(1)
    state, target = torch.randn(2, 40, INFO.hidden_size, generator=generator)
    rows = TargetRows(
        target, torch.arange(40), torch.arange(40), torch.ones(1, 40).bool()
    )
    scores = drafter.loss(
        [state.requires_grad_()],
        rows,
        Stage(name="test", losses={"cross_entropy": 1.0}),
    )
    made = scores.hops[0]

    logits_RV = target @ drafter.lm_head_VD.T
    best_R = logits_RV.argmax(-1)
    said_R = torch.isin(best_R, torch.tensor(SPOKEN))
    assert 0 < said_R.sum() < 40
    target_RK = logits_RV[:, SPOKEN].softmax(-1)
    each_R = torch.nn.functional.cross_entropy(
        drafter.logits(state, LAST), target_RK, reduction="none"
    )
    torch.testing.assert_close(made.loss_R, each_R.detach() * said_R)
    torch.testing.assert_close(scores.total, (each_R * said_R).sum())
    assert (
        made.count_R.all()
    )  # the mean is over all rows, and those it cannot say are misses
    guess_R = torch.tensor(SPOKEN)[drafter.logits(state, LAST).argmax(-1)]
    assert torch.equal(made.agree_R, guess_R == best_R)
    (grad,) = torch.autograd.grad(scores.total, state)
    assert grad[~said_R].eq(0).all()
    assert (grad[said_R].abs().sum(-1) > 0).all()


def test_a_vocabulary_of_all_tokens_is_no_vocabulary() -> None:
    drafter = build()
    state, target = torch.randn(2, 9, INFO.hidden_size)
    rows = TargetRows(target, torch.arange(9), torch.arange(9), torch.ones(1, 9).bool())
    weights = {"cross_entropy": 1.0, "top_k": 1.0}
    parts = drafter.lm_logits, drafter.lm_head_VD, weights
    plain = score([state], rows, *parts, keep_top=3)
    every = torch.arange(INFO.vocab_size)
    named = score([state], rows, *parts, keep_top=3, vocabulary_K=every)
    torch.testing.assert_close(named.total, plain.total)
    assert torch.equal(named.hops[0].count_R, plain.hops[0].count_R)
    assert torch.equal(named.hops[0].agree_R, plain.hops[0].agree_R)


# Training chooses the vocabulary


def plan(store: Path, out: Path, **more: object) -> Run:
    settings = [
        "draft_vocab=9",
        "stages.*.epochs=2",
        "stages.*.hops=3",
        "stages.*.learning_rate=0.01",
        "batch_tokens=200",
    ]
    config = override(catalogue.config("eagle3"), settings)
    return Run(
        drafter="eagle3",
        config=config,
        store=store,  # type: ignore[arg-type]
        out=out,
        save_every=2,
        held_out=0.0,
        **more,  # type: ignore[arg-type]
    )


def test_the_share_of_the_responses_that_a_vocabulary_covers_is_told() -> None:
    count_V = torch.tensor([0.0, 90.0, 1.0, 8.0, 1.0])
    assert coverage(count_V, 1) == (
        "draft_vocab=1: these tokens are 90.0% of the responses; 2 tokens are 98%"
    )
    assert "draft_vocab=3: these tokens are 99.0%" in coverage(count_V, 3)


def test_training_counts_its_responses_and_a_checkpoint_keeps_what_it_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    synthetic.store(tmp_path / "store", 12)
    caplog.set_level("INFO")
    train(plan(tmp_path / "store", tmp_path / "out"))
    assert "draft_vocab=9: these tokens are" in caplog.text
    count_V = torch.zeros(INFO.vocab_size)
    opened = Store.open(tmp_path / "store")
    for key in opened.index["key"].to_list():
        one = opened.read(key, ())
        count_V += torch.bincount(
            torch.from_numpy(one.ids_T[one.response_T]).long(),
            minlength=INFO.vocab_size,
        )
    chosen = sorted(
        sorted(range(INFO.vocab_size), key=lambda token: (-count_V[token], token))[:9]
    )
    drafter = checkpoint.load(tmp_path / "out", head(), INFO)
    assert isinstance(drafter, Eagle3)
    assert drafter.vocabulary_K is not None
    assert drafter.vocabulary_K.tolist() == chosen
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"].dtype == torch.long


def test_a_resumed_run_keeps_its_vocabulary_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic.store(tmp_path / "store", 12)
    train(plan(tmp_path / "store", tmp_path / "whole"))
    stopped(plan(tmp_path / "store", tmp_path / "again"), 3)

    def never(self: Eagle3, count_V: Tensor) -> None:
        raise AssertionError("a resumed run counts again")

    monkeypatch.setattr(Eagle3, "choose_vocabulary", never)
    train(plan(tmp_path / "store", tmp_path / "again"))
    files = [
        (tmp_path / run / "model.safetensors").read_bytes()
        for run in ("whole", "again")
    ]
    assert files[0] == files[1]
