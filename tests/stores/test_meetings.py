"""Writers and collectors that meet: in any order, whoever is killed, no record is of files that are gone.

Actors run in threads that take turns at the object store; hypothesis draws where they pause.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.samples import head, info, make, provenance, sample
from vlmdistill.stores import commits
from vlmdistill.stores.collect import collect
from vlmdistill.stores.commits import commit, mend, remove
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.filters import filter_store
from vlmdistill.stores.manifest import DEAD, SHARDS, Record
from vlmdistill.stores.remote import Remote
from vlmdistill.stores.store import Store
from vlmdistill.stores.verify import verify

CALLS = frozenset({"cat_file", "pipe_file", "put_file", "find", "ls", "info", "rm_file", "exists"})
FEATURE = ("hidden.text",)
DONE, MET, KILLED = "done", "met a collector", "killed"
number = itertools.count()


class Killed(BaseException):
    """The process is no more: nothing of it reaches the object store."""


class Actor:
    """A thread that waits for its turn before each call to the object store."""

    def __init__(self, url: str, work: Callable[[Remote], object]) -> None:
        self.place = Remote(url)
        self.place._fs = Stepped(self.place._fs, self)
        self.end = ""
        self._alive = True
        self._turn, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._one = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()
        self._over.acquire()

    def _run(self, work: Callable[[Remote], object]) -> None:
        try:
            self._wait()
            work(self.place)
            self.end = DONE
        except StoreError as error:
            self.end = MET if "store gc" in str(error) else str(error)
        except OSError as error:
            self.end = repr(error)
        except Killed:
            self.end = KILLED
        finally:
            self._over.release()

    def call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Called in the thread, or one that it started: let others go on, and do this when told to."""
        with self._one:
            self._wait()
            return call(*arguments, **options)

    def _wait(self) -> None:
        if self._alive:
            self._over.release()
            self._turn.acquire()
        if not self._alive:
            raise Killed

    def step(self, kill: bool = False) -> None:
        """Called by the test: one more call, or none ever again."""
        self._alive = not kill
        self._turn.release()
        self._over.acquire()
        if self.end:
            self._thread.join()


class Stepped:
    """A file system whose calls wait for their turn."""

    def __init__(self, files: Any, actor: Actor) -> None:
        self._files, self._actor = files, actor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        return functools.partial(self._actor.call, found) if name in CALLS else found


def laid_out(template: Path) -> str:
    """A copy of a store in memory."""
    url = f"memory://meet{next(number)}"
    place = Remote(url)
    for path in template.rglob("*"):
        if path.is_file():
            place.replace(path.relative_to(template).as_posix(), path.read_bytes())
    return url


def small(path: Path) -> Store:
    """A store whose shards have few files: fewer turns to take."""
    return Store.create(path, provenance(features=FEATURE), info(), head())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without a sample."""
    return Path(small(tmp_path_factory.mktemp("bare")).path)


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a view, and the table of an earlier one of that name."""
    store = make(tmp_path_factory.mktemp("viewed"), [range(4)])
    filter_store(store, "v", expressions=["words > 0"])
    filter_store(store, "v", expressions=["words > 1"])
    return Path(store.path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Record]]:
    """The shards of two writers of the same unit: equal keys, other contents."""
    stores = [small(tmp_path_factory.mktemp("store")) for _ in range(2)]
    for store, words in zip(stores, (1, 2), strict=True):
        with store.writer("u") as writer:
            writer.add(sample(1, FEATURE, words=words))
    return [(Path(store.path), store.commit("u")) for store in stores]


def writer(built: tuple[Path, Record]) -> Callable[[Remote], object]:
    root, record = built

    def work(place: Remote) -> None:
        shard = f"{SHARDS}/{record['shard']}"
        Remote(place.url).publish(root / shard, shard)  # at once: what matters comes after it
        commit(place, record)

    return work


def cast(bare: Path, built: tuple[Path, Record], count: int) -> tuple[str, list[Actor], Actor]:
    """A store without a sample, so many writers of one shard, and one who removes it."""
    url = laid_out(bare)
    shard = f"{SHARDS}/{built[1]['shard']}"
    writers = [Actor(url, writer(built)) for _ in range(count)]
    return url, writers, Actor(url, lambda place: remove(place, shard))


def collector(place: Remote) -> None:
    collect(Store(place, Store.open(place.url).record), grace=0)


@dataclass(frozen=True)
class Schedule:
    """Two actors pause after some calls each, or die there; others pass by; then the two go on.

    Mistakes need an actor that pauses at the wrong place while others do their work: few turns and long
    ones find more than many short ones.
    """

    writer: int  # calls before the first writer pauses
    collector: int  # calls before the first collector pauses
    between: tuple[int, ...]  # who passes by: 1 another writer, 3 another collector
    dies: int | None  # 0 or 2 never goes on
    last: tuple[int, ...]  # in which order they end

    def play(self, actors: Sequence[Actor]) -> None:
        """All actors to their end."""
        for at, calls in ((0, self.writer), (2, self.collector)):
            run(actors[at], calls)
            if at == self.dies and not actors[at].end:
                actors[at].step(kill=True)
        for at in (*self.between, *self.last):
            run(actors[at], 10**9)


def run(actor: Actor, calls: int) -> None:
    """So many calls, or fewer if it ends before."""
    for _ in range(calls):
        if actor.end:
            break
        actor.step()


SCHEDULES = st.builds(
    Schedule,
    writer=st.integers(0, 12),
    collector=st.integers(0, 28),
    between=st.sampled_from([(), (1,), (3,), (3, 1), (1, 3)]),
    dies=st.sampled_from([None, 0, 2]),
    last=st.permutations(range(4)).map(tuple),
)


def clean(url: str, patch: pytest.MonkeyPatch) -> None:
    """What the next collector does once all marks are stale."""
    patch.setattr(commits, "STALE", 0)
    collect(Store.open(url), grace=0)
    patch.undo()


@pytest.mark.parametrize("dies", [False, True])
def test_a_writer_and_a_removal_that_meet_at_any_call(
    bare: Path, built: list[tuple[Path, Record]], dies: bool
) -> None:
    """All there is to two actors: each pause of either, and each death of the collector after it."""
    for before, pause in itertools.product((1,) if dies else range(1, 6), range(14)):
        for more in range(14 - pause) if dies else (10**9,):
            url, (one,), other = cast(bare, built[0], 1)
            run(one, before)
            run(other, pause)
            run(one, 10**9)
            run(other, more)
            if not other.end:
                other.step(kill=True)
            ends(url, [one], other)


def test_another_writer_that_passes_by_while_a_writer_and_a_removal_pause(
    bare: Path, built: list[tuple[Path, Record]]
) -> None:
    for before, pause, writer_first in itertools.product(range(1, 6), range(14), (True, False)):
        url, writers, other = cast(bare, built[0], 2)
        run(writers[0], before)
        run(other, pause)
        run(writers[1], 10**9)
        for actor in (writers[0], other) if writer_first else (other, writers[0]):
            run(actor, 10**9)
        ends(url, writers, other)


def test_files_that_a_dying_writer_brings_back_do_not_make_up_for_a_record(
    bare: Path, built: list[tuple[Path, Record]]
) -> None:
    for pause, more in itertools.product(range(14), range(1, 5)):
        url, (one, again), other = cast(bare, built[0], 2)
        run(one, 1)
        run(other, pause)
        run(one, more)
        run(other, 10**9)
        again.step()  # publishes
        again.step(kill=True)
        run(one, 10**9)
        ends(url, [one, again], other)


def test_a_record_is_withdrawn_only_where_others_can_see_it_coming(
    bare: Path, built: list[tuple[Path, Record]]
) -> None:
    """A writer finds its files gone and pauses; another brings them back and believes in the record."""
    for pause in range(12):
        url, (one, again), other = cast(bare, built[0], 2)
        run(one, 1)
        run(other, 10**9)
        run(one, pause)
        run(again, 10**9)
        run(one, 10**9)
        ends(url, [one, again], other)


def test_a_record_that_another_withdrew_is_not_believed_in_when_its_files_come_back(
    bare: Path, built: list[tuple[Path, Record]]
) -> None:
    for pause in range(12):
        url, (one, slow, again), other = cast(bare, built[0], 3)
        run(one, 1)
        run(slow, 1)
        run(other, 10**9)
        run(one, pause)
        run(slow, 10**9)  # finds the files gone, and withdraws the record if there is one
        again.step()  # publishes
        again.step(kill=True)
        run(one, 10**9)
        ends(url, [one, slow, again], other)


def test_two_collectors_may_finish_what_a_dead_one_began(
    bare: Path, built: list[tuple[Path, Record]]
) -> None:
    shard = f"{SHARDS}/{built[0][1]['shard']}"
    for pause in range(18):
        url, (one, again), dead = cast(bare, built[0], 2)
        menders = [Actor(url, lambda place: mend(place, 0)) for _ in range(2)]
        run(one, 1)
        run(dead, 3)  # has left its mark and found no record
        run(one, 10**9)
        while Remote(url).files(shard):
            dead.step()
        dead.step(kill=True)
        (mark,) = MemoryFileSystem().find(f"{url}/{DEAD}")
        MemoryFileSystem.store[mark].created -= timedelta(seconds=2 * commits.STALE)
        for actor, calls in ((menders[0], pause), (menders[1], 10**9), (again, 10**9), (menders[0], 10**9)):
            run(actor, calls)
        assert (one.end, dead.end) == (MET, KILLED)
        ends(url, [again], *menders)


def ends(url: str, writers: Sequence[Actor], *others: Actor) -> None:
    """All went as promised: what a writer believes is there, and a collector can tidy up the rest."""
    assert {actor.end for actor in (*writers, *others)} <= {DONE, MET, KILLED}
    with pytest.MonkeyPatch.context() as patch:
        clean(url, patch)
    assert not verify(url).findings
    if any(actor.end == DONE for actor in writers):
        assert Store.open(url).keys() == {"k0001"}


@settings(max_examples=100, deadline=None)
@given(second=st.integers(0, 1), schedule=SCHEDULES)
def test_two_writers_and_two_collectors_in_any_order(
    bare: Path, built: list[tuple[Path, Record]], second: int, schedule: Schedule
) -> None:
    url = laid_out(bare)
    writers = [Actor(url, writer(built[0])), Actor(url, writer(built[second]))]
    actors = [*writers, Actor(url, collector), Actor(url, collector)]
    schedule.play(actors)
    ends(url, writers, *actors[2:])


@settings(max_examples=40, deadline=None)
@given(schedule=SCHEDULES)
def test_a_view_that_is_made_while_collectors_work_is_whole(viewed: Path, schedule: Schedule) -> None:
    url = laid_out(viewed)

    def work(place: Remote) -> None:
        filter_store(Store(place, Store.open(url).record), "v", expressions=["words > 0"])

    actors = [Actor(url, actor) for actor in (work, work, collector, collector)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commits, "PAUSE", 0)
        schedule.play(actors)
    assert {actor.end for actor in actors} <= {DONE, MET, KILLED}
    with pytest.MonkeyPatch.context() as patch:
        clean(url, patch)
    assert not verify(url).findings
    if DONE in {actor.end for actor in actors[:2]}:
        assert Store.open(url).view("v")["words"].to_list() == [1, 2, 3]
