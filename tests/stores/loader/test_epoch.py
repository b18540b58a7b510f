"""An epoch gives each sample exactly once, on any ranks, however often it is interrupted."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.samples import head, info, make, provenance, same, sample, write
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index import merged
from vlmdistill.stores.loader.epoch import LOCAL_DEPTH, Epoch, level, plan
from vlmdistill.stores.loader.tensors import as_numpy
from vlmdistill.stores.schema import Feature, PackedSamples, Sample, Span
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

TEXT = [Feature.parse("hidden.text")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(
        tmp_path_factory.mktemp("store"),
        [range(3), range(3, 4), range(4, 15), range(15, 23)],
    )


made_before = itertools.count()


def made(shards: list[range]) -> Store:
    """A store in memory: many a one is needed, and no disk."""
    return make(f"memory://epochs{next(made_before)}", shards)


def take(
    store: Store, steps: int, world: int, **options: object
) -> tuple[list[str], object]:
    """What all ranks get in some steps, and the state after them, equal on all."""
    keys: list[str] = []
    states = []
    for rank in range(world):
        batches = Epoch(store, TEXT, rank=rank, world=world, **options)  # type: ignore[arg-type]
        for _ in range(min(steps, len(batches))):
            keys += next(batches).keys
        states.append(batches.state)
        batches.close()
    assert all(state == states[0] for state in states)
    return keys, states[0]


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.integers(1, 12), max_size=5),
    seed=st.integers(0, 5),
    number=st.integers(0, 3),
    legs=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 200)), max_size=4
    ),
    last=st.tuples(st.integers(1, 6), st.just(10_000), st.integers(1, 200)),
)
@pytest.mark.slow
def test_every_sample_comes_once_across_any_shards_interruptions_ranks_and_budgets(
    shards: list[int],
    seed: int,
    number: int,
    legs: list[tuple[int, int, int]],
    last: tuple[int, int, int],
) -> None:
    ends = [*itertools.accumulate(shards, initial=0)]
    store = made([range(start, end) for start, end in itertools.pairwise(ends)])
    seen: list[str] = []
    state: object = None
    for world, steps, budget in [*legs, last]:
        options = {"token_budget": budget, "seed": seed, "epoch": number}
        keys, state = take(store, steps, world, start_state=state, **options)
        seen += keys
    assert sorted(seen) == [f"k{at:04}" for at in range(ends[-1])]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), max_size=80),
    budget=st.integers(1, 300),
    seed=st.integers(0, 3),
    world=st.integers(1, 9),
)
def test_ranks_get_equally_many_batches_within_the_budget(
    lengths: list[int], budget: int, seed: int, world: int
) -> None:
    tokens = np.array(lengths, np.int64)
    batches = level(plan(tokens, budget, seed, 0), world)
    assert len(batches) % world == 0
    assert sorted(int(at) for batch in batches for at in batch) == list(
        range(len(lengths))
    )
    assert all(tokens[batch].sum() <= budget or len(batch) == 1 for batch in batches)
    empty = sum(len(batch) == 0 for batch in batches)
    assert empty < world
    assert not empty or all(len(batch) <= 1 for batch in batches)


def test_batches_have_samples_of_like_length(store: Store) -> None:
    tokens = np.random.default_rng(0).integers(1, 1000, 3000)
    batches = plan(tokens, 8000, 0, 0)
    padded = sum(len(batch) * tokens[batch].max() for batch in batches)
    assert padded < 1.05 * tokens.sum()
    assert len(batches) < 1.15 * tokens.sum() / 8000


def test_the_order_is_the_seeds_and_another_each_epoch(store: Store) -> None:
    def order(seed: int, number: int) -> list[list[str]]:
        batches = Epoch(store, TEXT, token_budget=60, seed=seed, epoch=number)
        return [list(samples.keys) for samples in batches]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def unpacked(samples: PackedSamples) -> list[Sample]:
    """The samples of a batch, cut apart again, without their meta."""
    ends = dict.fromkeys(("text", "visual", "span"), 0)
    found = []
    for at, key in enumerate(samples.keys):
        spans = tuple(
            Span(int(start), int(length))
            for of, start, length in samples.span_M3
            if of == at
        )
        counts = {
            "text": samples.text_tokens_B[at],
            "visual": sum(s.length for s in spans),
            "span": len(spans),
        }
        rows = {
            where: slice(ends[where], ends[where] + int(count))
            for where, count in counts.items()
        }
        ends = {where: part.stop for where, part in rows.items()}
        ids_T, position_T, rope_T, response_T = samples.tokens_T4[rows["text"]].T
        features = {
            feature: held[rows[feature.where]].copy()
            for feature, held in samples.features.items()
        }
        found.append(
            Sample(
                key, ids_T, response_T.astype(bool), position_T, rope_T, spans, features
            )
        )
    assert all(
        len(held) == ends[feature.where] for feature, held in samples.features.items()
    )
    return found


def test_samples_arrive_whole(store: Store) -> None:
    for samples in Epoch(store, token_budget=100):
        for one in unpacked(samples):
            assert same(one, dataclasses.replace(sample(int(one.key[1:])), meta={}))


def test_a_batch_becomes_tensors_without_a_copy_of_its_features(tmp_path: Path) -> None:
    store = make(tmp_path, [range(9)], encoding={"embed.span": "int8"})
    for samples in Epoch(store, token_budget=150):
        batch = as_batch(samples, "bfloat16")
        cut = unpacked(samples)
        assert batch.ids_T.tolist() == [number for one in cut for number in one.ids_T]
        assert batch.response_T.tolist() == [
            flag for one in cut for flag in one.response_T
        ]
        assert batch.segment_T.tolist() == [
            at for at, one in enumerate(cut) for _ in one.ids_T
        ]
        assert batch.start_M.tolist() == [
            span.start for one in cut for span in one.spans
        ]
        for feature, rows in samples.features.items():
            assert np.array_equal(as_numpy(batch.features[feature]), rows)
            assert (
                not len(rows) or batch.features[feature].data_ptr() == rows.ctypes.data
            )


@pytest.mark.parametrize("keep", [1, 3])
def test_a_batch_keeps_its_arrays_until_so_many_further_ones_were_taken(
    store: Store, keep: int
) -> None:
    held: list[tuple[PackedSamples, list[Sample]]] = []
    addresses = set()
    for samples in Epoch(store, TEXT, token_budget=40, keep=keep):
        held = [*held, (samples, unpacked(samples))][-keep:]
        for earlier, cut in held:
            assert all(map(same, unpacked(earlier), cut))
        addresses.add(samples.features[TEXT[0]].ctypes.data)
    assert len(addresses) <= 3 * (LOCAL_DEPTH + keep)


def test_an_epoch_follows_a_view_or_keys(store: Store) -> None:
    filter_store(store, "even", expressions=["words % 2 = 0"])

    def words(batches: Epoch) -> list[int]:
        return sorted(int(key[1:]) for samples in batches for key in samples.keys)

    assert words(Epoch(store, TEXT, view="even", token_budget=50)) == list(
        range(0, 23, 2)
    )
    assert words(Epoch(store, TEXT, keys=["k0003", "k0007"], token_budget=50)) == [3, 7]
    with pytest.raises(StoreError, match="'nobody'"):
        Epoch(store, TEXT, keys=["nobody"], token_budget=50)


def test_an_epoch_is_as_long_on_the_same_ranks_and_scaled_on_others(
    store: Store,
) -> None:
    start = Epoch(store, TEXT, token_budget=20, world=2)
    whole = start.epoch_batches
    assert whole == len(start)
    for _ in range(2):
        next(start)
    again = Epoch(store, TEXT, token_budget=20, world=2, start_state=start.state)
    assert (again.epoch_batches, len(again)) == (whole, whole - 2)
    other = Epoch(store, TEXT, token_budget=40, start_state=start.state)
    assert len(other) / other.epoch_batches == pytest.approx(1 - 2 / whole)
    start.close()


def test_a_state_of_other_samples_is_refused(store: Store, tmp_path: Path) -> None:
    growing = make(tmp_path, [range(5)])
    state = Epoch(growing, TEXT, token_budget=50).state
    write(growing, "later", [9])
    with pytest.raises(StoreError):
        Epoch(growing, TEXT, token_budget=50, start_state=state)
    with pytest.raises(StoreError, match="rank=2: the ranks of world=2"):
        Epoch(store, TEXT, token_budget=50, rank=2, world=2)


def test_damage_stops_the_epoch_and_is_named(tmp_path: Path) -> None:
    store = make(tmp_path, [range(5)])
    path = next(tmp_path.glob("shards/*/hidden.text/c/0/0"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)

    with pytest.raises(StoreError, match=r"hidden\.text.*k0000"):
        next(Epoch(store, TEXT, token_budget=1000))


READ_ALL = """
import resource, sys
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.store import Store
batches = Epoch(Store.open(sys.argv[1]), token_budget=2000)
next(batches)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for batch in batches: pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_stays_flat_with_the_size_of_the_store(tmp_path: Path) -> None:
    """A reader that kept what it read, or what it mapped, would hold 80 MB more."""
    features, width = ("hidden.text",), 512
    origin = provenance(features=features)
    store = Store.create(tmp_path, origin, info(hidden_size=width), head())
    write(
        store,
        "u",
        (sample(number, features, width, tokens=500) for number in range(160)),
    )
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    grown = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert grown < 30_000  # KiB


def test_an_epoch_has_all_records_before_its_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "memory://an-epoch"
    make(path, [range(2), range(2, 4)])
    monkeypatch.setattr(merged, "WORTH", 2)
    len(Store.open(path))
    store, read = Store.open(path), Remote.read
    epoch = Epoch(store, TEXT, token_budget=64)  # the index came from the cache

    def records(backend: Remote, name: str, most: int | None = None) -> bytes:
        assert not name.startswith("commits/")
        return read(backend, name, most)

    monkeypatch.setattr(Remote, "read", records)
    assert sum(len(samples.keys) for samples in epoch) == 4
