"""An epoch gives each sample exactly once, on any ranks, however often it is interrupted."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.samples import head, info, make, provenance, same, sample, write
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.filters import filter_store
from vlmdistill.stores.memory import Pool
from vlmdistill.stores.reader import Epoch, epoch, level, plan
from vlmdistill.stores.schema import Feature, Sample
from vlmdistill.stores.store import Store
from vlmdistill.stores.tensors import as_numpy, as_torch, packed

TEXT = [Feature.parse("hidden.text")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("store"), [range(3), range(3, 4), range(4, 15), range(15, 23)])


made_before = itertools.count()


def made(units: list[range]) -> Store:
    """A store in memory: many a one is needed, and no disk."""
    return make(f"memory://epochs{next(made_before)}", units)


def take(store: Store, steps: int, world: int, **options: object) -> tuple[list[str], object]:
    """What all ranks get in some steps, and the state after them, equal on all."""
    keys: list[str] = []
    states = []
    for rank in range(world):
        batches = epoch(store, TEXT, rank=rank, world=world, **options)  # type: ignore[arg-type]
        for _ in range(min(steps, len(batches))):
            keys += [item.key for item in next(batches)]
        states.append(batches.state)
        batches.close()
    assert all(state == states[0] for state in states)
    return keys, states[0]


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.integers(1, 12), max_size=5),
    budget=st.integers(1, 200),
    seed=st.integers(0, 5),
    number=st.integers(0, 3),
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=4),
    last=st.integers(1, 6),
)
def test_every_sample_comes_once_across_any_shards_interruptions_and_ranks(
    shards: list[int], budget: int, seed: int, number: int, legs: list[tuple[int, int]], last: int
) -> None:
    ends = [*itertools.accumulate(shards, initial=0)]
    store = made([range(start, end) for start, end in itertools.pairwise(ends)])
    options = {"token_budget": budget, "seed": seed, "epoch": number}
    seen: list[str] = []
    state: object = None
    for world, steps in [*legs, (last, 10_000)]:
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
    assert sorted(int(at) for batch in batches for at in batch) == list(range(len(lengths)))
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
        batches = epoch(store, TEXT, token_budget=60, seed=seed, epoch=number)
        return [[item.key for item in batch] for batch in batches]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_samples_arrive_whole(store: Store) -> None:
    for batch in epoch(store, token_budget=100):
        assert all(same(item, sample(int(item.key[1:]))) for item in batch)


def test_a_batch_becomes_one_tensor_without_a_copy(tmp_path: Path) -> None:
    store = make(tmp_path, [range(9)], encoding={"layer2.visual": "zstd", "embed.span": "int8"})
    for batch in epoch(store, token_budget=150):
        for feature in store.layout.features:
            parts = [item.features[feature] for item in batch]
            tensor = packed(parts, "bfloat16")
            assert np.array_equal(as_numpy(tensor), np.concatenate(parts))
            if tensor.numel():
                assert tensor.data_ptr() == next(part.ctypes.data for part in parts if len(part))
            backwards = packed(parts[::-1], "bfloat16")
            assert np.array_equal(as_numpy(backwards), np.concatenate(parts[::-1]))


def test_memory_is_used_again_only_once_nothing_refers_to_it() -> None:
    pool = Pool()
    block = pool.take(10, 4, "uint16")
    block[:] = 7
    address = block.ctypes.data
    part = as_torch(block[2:5], "bfloat16")
    del block
    other = pool.take(10, 4, "uint16")
    other[:] = 0
    assert other.ctypes.data != address
    assert (as_numpy(part) == 7).all()
    del part
    assert pool.take(10, 4, "uint16").ctypes.data == address


def test_an_epoch_follows_a_view_or_keys(store: Store) -> None:
    filter_store(store, "even", expressions=["words % 2 = 0"])

    def words(batches: Epoch) -> list[int]:
        return sorted(int(item.meta["words"] or 0) for batch in batches for item in batch)

    assert words(epoch(store, TEXT, view="even", token_budget=50)) == list(range(0, 23, 2))
    assert words(epoch(store, TEXT, keys=["k0003", "k0007"], token_budget=50)) == [3, 7]
    with pytest.raises(StoreError, match="no sample 'nobody'"):
        epoch(store, TEXT, keys=["nobody"], token_budget=50)


def test_a_state_of_other_samples_is_refused(store: Store, tmp_path: Path) -> None:
    growing = make(tmp_path, [range(5)])
    state = epoch(growing, TEXT, token_budget=50).state
    write(growing, "later", [9])
    with pytest.raises(StoreError, match="cannot be continued"):
        epoch(growing, TEXT, token_budget=50, start_state=state)
    with pytest.raises(StoreError, match="0 <= rank < world"):
        epoch(store, TEXT, token_budget=50, rank=2, world=2)


def test_damage_stops_the_epoch_and_is_named(tmp_path: Path) -> None:
    store = make(tmp_path, [range(5)])
    path = next(tmp_path.glob("shards/*/hidden.text/c/0/0"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)

    def consume(batches: Epoch) -> list[list[Sample]]:
        return list(batches)

    with pytest.raises(StoreError, match=r"hidden\.text of sample k0000 is damaged"):
        consume(epoch(store, TEXT, token_budget=1000))


READ_ALL = """
import resource, sys
from vlmdistill.stores.reader import epoch
from vlmdistill.stores.store import Store
batches = epoch(Store.open(sys.argv[1]), token_budget=2000)
next(batches)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for batch in batches: pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_flat_with_the_size_of_the_store(tmp_path: Path) -> None:
    """A reader that kept what it read, or what it mapped, would hold 80 MB more."""
    features, width = ("hidden.text",), 512
    origin = provenance(features=features)
    store = Store.create(tmp_path, origin, info(hidden_size=width), head())
    with store.writer("u") as writer:
        for number in range(160):
            writer.add(sample(number, features, width, tokens=500))
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    grown = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert grown < 30_000  # KiB
