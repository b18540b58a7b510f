"""Several writers, pushes and merges at once: what one of them reports is there, and nothing is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stores.pushes import pushed_at_once
from tests.stores.samples import forget, make, same, sample, write
from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.schema import Feature, Sample
from vlmdistill.stores.sharing.merge import Copied, merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

pytestmark = pytest.mark.slow


def first_call(
    patch: pytest.MonkeyPatch,
    kind: type[Backend],
    method: str,
    where: Callable[..., bool],
    act: Callable[[], Any],
) -> None:
    """Let something happen just before the first call of a method of a store's folder."""
    whole, met = getattr(kind, method), list[bool]()

    def call(backend: Backend, *given: Any) -> Any:
        if not met and where(backend, *given):
            met.append(True)
            act()
        return whole(backend, *given)

    patch.setattr(kind, method, call)


@pytest.mark.parametrize(
    ("url", "kind"), [("{tmp}/there", Local), ("memory://{name}", Remote)]
)
@pytest.mark.parametrize("method", ["publish", "create"])
def test_a_name_taken_while_a_shard_is_copied_costs_no_sample(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    kind: type[Backend],
    method: str,
) -> None:
    there = url.format(tmp=tmp_path, name=f"{tmp_path.name}{method}")
    make(tmp_path / "one", [range(4), range(4, 6)])
    make(tmp_path / "two", [range(10, 14), range(4, 9)])
    make(there)
    others = list[Copied]()

    def wanted(backend: Backend, *given: Any) -> bool:
        return backend.url == there and "u0" in str(
            given[-1 if method == "publish" else 0]
        )

    first_call(
        monkeypatch,
        kind,
        method,
        wanted,
        lambda: others.append(send(tmp_path / "two", there)),
    )
    facts = [send(tmp_path / "one", there), *others]
    assert [(one.copied + one.present, one.conflicts) for one in facts] == [
        (6, ()),
        (9, ()),
    ]
    held = Store.open(there)
    assert held.keys() == {f"k{number:04}" for number in (*range(9), *range(10, 14))}
    assert all(same(held.read(key), sample(int(key[1:]))) for key in held.keys())  # noqa: SIM118
    assert not verify(there).findings


def test_a_key_that_another_brings_meanwhile_with_other_content_is_a_conflict_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "one", [range(4)])
    other = make(tmp_path / "two")
    write(other, "a", [changed(2)])
    make(tmp_path / "there")
    first_call(
        monkeypatch,
        Local,
        "publish",
        lambda backend, folder, name: (
            backend.url == str(tmp_path / "there") and name.startswith("shards/u0")
        ),
        lambda: merge(tmp_path / "there", [other.path]),
    )
    facts = merge(tmp_path / "there", [tmp_path / "one"])[0]
    assert (facts.copied, facts.conflicts) == (3, ("k0002",))
    assert same(Store.open(tmp_path / "there").read("k0002"), changed(2))


def test_samples_that_do_not_stay_are_not_reported_as_copied(tmp_path: Path) -> None:
    make(tmp_path / "here", [range(2), range(2, 4)])
    target = make(tmp_path / "there")
    removed = list[int]()

    def remove(done: int, total: int, remark: str = "") -> None:
        forget(target, "commits/u0.json")
        removed.append(done)

    with pytest.raises(StoreError, match=r"\b2\b.*\b4\b.*there.*k0000"):
        send(tmp_path / "here", tmp_path / "there", progress=remove)
    assert len(removed) > 2
    assert send(tmp_path / "here", tmp_path / "there").copied == 2


def test_a_writer_does_not_rely_on_a_shard_that_is_removed_while_it_compares(
    tmp_path: Path,
) -> None:
    store = make(tmp_path, [range(3)])
    late = store.writer("u0")
    late.__enter__()
    for number in range(3):
        late.add(sample(number))
    forget(store, "commits/u0.json")
    with pytest.raises(StoreError, match="u0"):
        late.__exit__(None, None, None)


def test_a_view_and_a_run_that_two_teams_replace_at_once_speak_of_the_samples_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, numbers in (("one", range(3)), ("two", range(3, 6))):
        store = make(tmp_path / name)
        write(store, f"u-{name}", numbers)
        filter_store(store, "long", expressions=["words > 0"])
        store.write_stats("run", {"key": list(store.index["key"]), "loss": [1.0] * 3})
    there = str(make(tmp_path / "there").path)
    for table in ("views/long-", "stats/run-"):
        first_call(
            monkeypatch,
            Local,
            "replace",
            lambda backend, name, data, table=table: (
                backend.url == there and name.startswith(table)
            ),
            lambda: send(tmp_path / "two", there),
        )
    facts = send(tmp_path / "one", there)
    both = Store.open(there)
    assert facts.left == ()
    assert both.view("long")["words"].to_list() == [1, 2, 3, 4, 5]
    assert both.index["run.loss"].to_list() == [1.0] * 6


def test_teams_that_push_at_the_same_time_are_told_what_is_there(
    tmp_path: Path,
) -> None:
    shards = 8
    for team in range(3):
        own = [
            [100 * team + 100 + at, at] for at in range(shards)
        ]  # one is the team's own, one is all teams'
        make(tmp_path / str(team), own)
    there = tmp_path / "there"
    facts = pushed_at_once(
        [tmp_path / str(team) for team in range(3)], str(there), tmp_path / "go"
    )
    held = Store.open(there)
    numbers = {first + at for first in (0, 100, 200, 300) for at in range(shards)}
    assert held.keys() == {f"k{number:04}" for number in numbers}
    assert all(same(held.read(f"k{number:04}"), sample(number)) for number in numbers)
    assert [copied + present for copied, present, _ in facts] == [2 * shards] * 3
    assert [conflicts for _, _, conflicts in facts] == [[], [], []]
    assert not verify(there).damage


def changed(number: int) -> Sample:
    """A sample with other tensors than those of its number."""
    other = sample(number)
    other.features[Feature.parse("hidden.text")][0, 0] ^= 1
    return other
