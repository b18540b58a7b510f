"""Where a replay says that the target would have rejected, and that training takes those positions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, TRAINED, build, plan
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.drafters.training.replay import (
    Failures,
    chain_of,
    replay,
    right_guesses,
    table,
    walk,
)
from vlmdistill.drafters.training.run import RunData
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import rows_of, supervised, unroll
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.store import Store


def test_a_walk_begins_anew_after_each_rejection_and_knows_its_depth() -> None:
    found = walk([2, 4, 0, 1, 0, 3], [3, 4, 3, 2, 1, 3])
    assert (found.calls, found.accepted) == (
        3,
        6,
    )  # cycles at 0, 3 and 5, the last one all right
    assert (found.rejected, found.depths) == ((0, 3), (2, 1))
    assert found.tau == 3.0
    assert walk([], []).tau == 0.0


def test_a_walk_begins_each_response_of_a_sample_with_a_cycle() -> None:
    """The first response ends with guesses that are all right: the target's own token is beyond it."""
    found = walk([2, 1, 0, 1, 1], [2, 1, 3, 2, 1], token=[4, 5, 9, 10, 11])
    assert (found.calls, found.accepted, found.rejected, found.depths) == (
        3,
        3,
        (2, 3),
        (0, 1),
    )


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_replays_and_its_rejections_are_wrong_guesses(
    name: str, tmp_path: Path
) -> None:
    store, drafter = synthetic.store(tmp_path / "store", 6), build(name).eval()
    walks = dict(replay(drafter, store, list(store), batch_tokens=60))
    assert walks.keys() == store.keys()
    hops = chain_of(drafter)
    for key, found in walks.items():
        (samples,) = Epoch(
            store, drafter.config.needs(INFO), keys=[key], token_budget=1
        )
        batch = as_batch(samples, "float32")
        right_R, able_R = right_guesses(drafter, batch, hops)
        row_of = {
            int(token): row
            for row, token in enumerate(supervised(batch).nonzero()[:, 0])
        }
        for token, depth in zip(found.rejected, found.depths, strict=True):
            assert right_R[row_of[token]] == depth < able_R[row_of[token]]
        assert found.calls + found.accepted >= len(right_R)


def test_training_takes_the_failed_rows_and_as_many_others_as_are_mixed_in(
    tmp_path: Path,
) -> None:
    store, drafter = synthetic.store(tmp_path / "store", 6), build("eagle2")
    needs = drafter.config.needs(INFO)
    (samples,) = Epoch(store, needs, keys=["sample0", "sample1"], token_budget=10**6)
    batch = as_batch(samples, "float32")
    failed_T = torch.zeros(len(batch.ids_T), dtype=torch.bool)
    token_R = supervised(batch).nonzero()[:, 0]
    first = token_R[batch.segment_T[token_R] == 0]
    failed_T[first[:2]] = True  # two rows of the first sample, none of the second
    batch = replace(batch, failed_T=failed_T)
    for mixed, rows in ((0.0, [2, 1]), (1.0, [4, 1]), (99.0, [len(first), 1])):
        stage = Stage(name="s", hops=2, anchors="failed", mixed=mixed)
        out = unroll(drafter, batch, stage, torch.Generator().manual_seed(1))
        assert torch.bincount(out.segment_R).tolist() == rows
        assert rows_of(batch, stage) == sum(rows)
    plain = Stage(name="s", hops=2, anchors="failed")
    unmarked = replace(batch, failed_T=None)
    assert rows_of(unmarked, plain) == len(token_R)
    seen = unroll(drafter, batch, plain, torch.Generator().manual_seed(1)).scores[0]
    whole = unroll(drafter, unmarked, plain, torch.Generator().manual_seed(1)).scores[0]
    torch.testing.assert_close(
        seen.loss_R[:2], whole.loss_R[:2]
    )  # the rows that failed, as they stand


def test_a_rejection_deeper_than_the_hops_is_the_last_guess_of_a_later_row(
    tmp_path: Path,
) -> None:
    store = synthetic.store(tmp_path / "store", 2)
    store.write_stats("hawk.replay", table([("sample0", walk([0, 3, 0], [4, 4, 2]))]))
    failures = Failures(store, store.keys())
    (samples,) = Epoch(store, (), keys=["sample0", "sample1"], token_budget=10**6)
    at = samples.keys.index("sample0")
    first, length = (
        int(samples.text_tokens_B[:at].sum()),
        int(samples.text_tokens_B[at]),
    )
    for hops, rows in ((4, [0, 1]), (2, [0, 3]), (1, [0, 4])):
        marked_T = failures.mark(samples, hops)
        assert marked_T[first : first + length].nonzero()[:, 0].tolist() == rows
        assert (
            marked_T.sum() == len(rows) + len(marked_T) - length
        )  # all of the sample without a replay


def test_a_run_on_failed_rows_needs_a_replay_and_is_another_run_after_a_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    store = synthetic.store(path, 12)
    run = plan(
        path,
        tmp_path / "out",
        drafter="eagle2",
        settings=["stages.*.anchors=failed", "steps=4"],
    )
    with pytest.raises(TrainingError, match="vlmdistill replay"):
        train(run)
    drafter = build("eagle2").eval()
    store.write_stats("hawk.replay", table(replay(drafter, store, list(store))))
    before = RunData.of(run)
    assert train(run) == run.out
    walks = replay(drafter, store, list(store))
    none = [(key, replace(one, rejected=(), depths=())) for key, one in walks]
    store.write_stats("hawk.replay", table(none))
    after = RunData.of(run)
    assert before.signature != after.signature
    with pytest.raises(TrainingError, match="other settings or data"):
        train(run)
    assert len(Store.open(path).view(None)) == 12
