"""Whatever command was killed at whatever publication, `forget` leaves no byte of old traffic."""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipelines.traffic.killing import Bucket, Disk
from tests.pipelines.traffic.marks import EXCHANGES, data, found, marked_log, marks
from tests.s3 import s3_server
from tests.thorough import THOROUGH, count

FEW = ("--workers", "0", "--limit", "14", "--max-new-tokens", "6")
HARVEST = ("harvest", "../log/day.jsonl", "--eval-share", "0.5")
FEATURES = ("features", "--for", "wren", "--workers", "0")
TRAIN = ("train", "wren", "--set", "steps=1")
EVAL = ("eval", "wren", "--threads", "1", "--limit", "4", "--max-new-tokens", "6")
REPORT = ("report",)
FORGET = ("forget", "--older-than", "30d")
FLOW = {
    "harvest": HARVEST,
    "features": FEATURES,
    "train": TRAIN,
    "eval": EVAL,
    "report": REPORT,
}
AT_URL = {
    "harvest": ("harvest", "s3://logs", "--eval-share", "0.5"),
    "features": FEATURES,
    "train": TRAIN,
    "eval": (
        "eval",
        "lookahead",
        "--threads",
        "1",
        "--limit",
        "4",
        "--max-new-tokens",
        "6",
    ),
    "report": REPORT,
}
AFTER = {
    "filter": (
        "store",
        "filter",
        "runs/demo-small/features",
        "--where",
        "words > 1",
        "--name",
        "few",
    ),
    "adapt": (
        "adapt",
        "wren",
        "--from",
        "../more",
        "--steps",
        "1",
        "--fewest",
        "1",
        *FEW,
    ),
    "forget": FORGET,
}
AFTER_AT_URL = {name: AFTER[name] for name in ("adapt", "forget")}
PLANTED = {
    "*prompts.parquet": ["question"],
    "*part-*.parquet": ["answer", "answer as tokens"],
    "features/shards/*/tokens/c/0/0": ["question as tokens", "answer as tokens"],
    "harvested/*": ["PNG", "JPEG"],
    "*.json": ["question"],
    "*index.html": ["question", "page"],
}
"""Marks that are in such files of the workspace after the commands of FLOW."""
PLANTED_AFTER = {
    "annex": "annexes/*/shards/*/tokens/c/0/0",
    "second": "of/second/shards/*/tokens/c/0/0",
    "greedy": "of/greedy/part-*.parquet",
}
"""Such a file of the workspace has the marked exchanges after a command of AFTER."""
WORST = {
    "harvest": "responses/part-",
    "features": "features/shards/",
    "train": "drafters/wren",
    "eval": "reports/wren",
    "report": "index.html",
    "filter": "views/few-",
    "adapt": "staging/#/prompts.parquet",
    "forget": "staging/removed-",
}
if THOROUGH:  # what publishes few files that have a text
    AFTER |= {
        "annex": ("features", "--for", "eagle3", "--workers", "0"),
        "resplit": ("prompts", "--resplit", "0.3"),
        "second": (*FEATURES, "--store", "runs/demo-small/of/second"),
        "greedy": ("responses", "--out", "runs/demo-small/of/greedy", *FEW),
    }
    WORST |= {
        "annex": "annexes/",
        "resplit": "prompts.parquet",
        "second": "second/shards/",
        "greedy": "greedy/part-",
    }
DEATHS = count(1, 100)  # of each command, besides the worst one
DEATHS_AT_URL = count(0, 12)
pytestmark = pytest.mark.timeout(count(600, 7200))
LATE = ("features", "adapt", "forget")  # are worst after the publication


@pytest.fixture(scope="module")
def sought() -> dict[str, bytes]:
    from vlmdistill.pipelines.targets.loading import load_encoder

    return marks(load_encoder("demo-small").tokenizer.encode)


@dataclass(frozen=True)
class State:
    """A disk as a command finds it."""

    disk: Disk
    publications: list[str]  # of the command, in order

    def deaths(self, name: str) -> list[tuple[int, bool]]:
        """At which publications the command is killed, and whether after them."""
        numbers = range(1, len(self.publications) + 1)
        every = [(number, after) for number in numbers for after in (False, True)]
        worst = next(
            number for number in numbers if WORST[name] in self.publications[number - 1]
        )
        others = random.Random(name).sample(every, min(DEATHS, len(every)))
        return [
            (worst, name in LATE),
            *(death for death in others if death != (worst, name in LATE)),
        ]


def left(folder: Path, sought: dict[str, bytes]) -> list[str]:
    """The files below a folder that are of a marked exchange."""
    return [*found(folder, sought.values()), *data(folder)]


def matches(names: Collection[str], pattern: str) -> bool:
    """Whether one of the names is of a pattern."""
    return any(Path(name).match(pattern) for name in names)


def calm(
    disk: Disk, flow: dict[str, tuple[str, ...]], sought: dict[str, bytes]
) -> dict[str, State]:
    """What commands find that nobody kills; the search finds all marks after them."""
    disk.folder.mkdir()
    made = dict[str, State]()
    for name, command in flow.items():
        before = disk.copy(f"before-{name}")
        assert disk.run(*command) == 0
        made[name] = State(before, disk.publications())
    holder = disk.folder / ("bucket" if disk.bucket else "runs")
    for pattern, kinds in PLANTED.items():
        for kind in kinds:
            assert matches(found(holder, [sought[kind]]), pattern), (pattern, kind)
            if disk.bucket and "shards" not in pattern:
                copies = found(disk.folder / "cache", [sought[kind]])
                assert matches(copies, pattern), (pattern, kind)
    return made


@pytest.fixture(scope="module")
def states(
    tmp_path_factory: pytest.TempPathFactory, sought: dict[str, bytes]
) -> dict[str, State]:
    """A disk as each command finds it."""
    folder = tmp_path_factory.mktemp("disks")
    marked_log(folder / "log")
    marked_log(folder / "more", EXCHANGES)
    disk = Disk(folder / "calm")
    made = calm(disk, FLOW, sought)
    for name, command in AFTER.items():
        last = disk.copy(f"after-{name}")
        assert last.run(*command) == (3 if name == "adapt" else 0)
        if name in PLANTED_AFTER:
            assert matches(data(last.runs), PLANTED_AFTER[name])
        made[name] = State(disk, last.publications())
    return made


@pytest.mark.parametrize("name", [*FLOW, *AFTER])
def test_no_byte_of_old_traffic_stays_of_a_killed_command(
    states: dict[str, State], sought: dict[str, bytes], name: str
) -> None:
    command = {**FLOW, **AFTER}[name]
    for number, after in states[name].deaths(name):
        disk = states[name].disk.copy(f"{name}-{number}-{after}")
        disk.run(*command, die=number, after=after)
        assert disk.run(*FORGET) == 0
        assert not left(disk.folder, sought), states[name].publications[number - 1]


def test_a_round_whose_samples_are_deleted_begins_anew(
    states: dict[str, State],
) -> None:
    disk, publications = states["adapt"].disk.copy("anew"), states["adapt"].publications
    numbers = range(1, len(publications) + 1)
    steps = "wren.r1.training/metrics.jsonl"
    training = next(number for number in numbers if steps in publications[number - 1])
    disk.run(*AFTER["adapt"], die=training, after=True)
    assert disk.run(*FORGET) == 0
    assert disk.run(*AFTER["adapt"]) == 3
    assert "a round needs 1" in (disk.folder / "said.txt").read_text()


@pytest.fixture(scope="module")
def states_at_url(
    tmp_path_factory: pytest.TempPathFactory, sought: dict[str, bytes]
) -> Iterator[dict[str, State]]:
    """A disk and a bucket as each command finds them."""
    folder = tmp_path_factory.mktemp("disks")
    with s3_server() as server:
        bucket = Bucket(server)
        bucket.put_log(marked_log(folder / "log"))
        marked_log(folder / "more", EXCHANGES)
        disk = Disk(folder / "calm", bucket)
        made = calm(disk, AT_URL, sought)
        for name, command in AFTER_AT_URL.items():
            last = disk.copy(f"after-{name}")
            assert last.run(*command) == (3 if name == "adapt" else 0)
            made[name] = State(disk, last.publications())
        yield made


def killed_at_url(name: str, state: State, copies: str) -> Iterator[tuple[str, Disk]]:
    """Copies of a disk on which a command was killed, each at a publication, before or after it."""
    command = {**AT_URL, **AFTER_AT_URL}[name]
    numbers = range(1, len(state.publications) + 1)
    for number in random.Random(name).sample(numbers, min(DEATHS_AT_URL, len(numbers))):
        killed = state.disk.copy(f"{name}-{number}-{copies}")
        killed.run(*command, die=number, after=number % 2 == 0)
        yield state.publications[number - 1], killed


@pytest.mark.skipif(not THOROUGH, reason="the server of objects takes most of the time")
@pytest.mark.parametrize("name", [*AT_URL, *AFTER_AT_URL])
def test_no_byte_of_it_stays_at_a_url(
    states_at_url: dict[str, State], sought: dict[str, bytes], name: str
) -> None:
    for publication, disk in killed_at_url(name, states_at_url[name], "alone"):
        assert disk.run(*FORGET) == 0
        assert not left(disk.folder, sought), publication


@pytest.mark.skipif(not THOROUGH, reason="the server of objects takes most of the time")
@pytest.mark.parametrize("name", [*AT_URL, *AFTER_AT_URL])
def test_a_killed_machine_brings_nothing_back_that_another_has_deleted(
    states_at_url: dict[str, State], sought: dict[str, bytes], name: str
) -> None:
    for publication, killed in killed_at_url(name, states_at_url[name], "killed"):
        other = killed.elsewhere(f"{killed.folder.name}-other")
        assert other.run(*FORGET) == 0
        assert not left(other.folder, sought), publication
        killed.sees(other)
        for later in (FEATURES, EVAL, REPORT):  # which say that no prompts are there
            killed.run(*later)
            assert not left(killed.folder / "bucket", sought), (publication, later)
        assert killed.run(*FORGET) == 0
        assert not left(killed.folder, sought), publication
