"""Whatever command was killed at whatever publication, `forget` leaves no byte of old traffic."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.pipelines.traffic.killing import (
    EXCHANGES,
    Bucket,
    Disk,
    found,
    marked_log,
    marks,
)
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
    }
    WORST |= {"annex": "annexes/", "resplit": "prompts.parquet"}
DEATHS, DEATHS_AT_URL = count(1, 100), 12  # of each command, besides the worst one
pytestmark = pytest.mark.timeout(count(600, 7200))
LATE = ("features", "adapt", "forget")  # are worst after the publication


@pytest.fixture(scope="module")
def sought() -> list[bytes]:
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


def calm(
    disk: Disk, flow: dict[str, tuple[str, ...]], sought: list[bytes]
) -> dict[str, State]:
    """What commands find that nobody kills, and that all marks are somewhere after them."""
    disk.folder.mkdir()
    made = dict[str, State]()
    for name, command in flow.items():
        before = disk.copy(f"before-{name}")
        assert disk.run(*command) == 0
        made[name] = State(before, disk.publications())
    for mark in sought:
        assert found(disk.folder, [mark])
    return made


@pytest.fixture(scope="module")
def states(
    tmp_path_factory: pytest.TempPathFactory, sought: list[bytes]
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
        made[name] = State(disk, last.publications())
    return made


@pytest.mark.parametrize("name", [*FLOW, *AFTER])
def test_no_byte_of_old_traffic_stays_of_a_killed_command(
    states: dict[str, State], sought: list[bytes], name: str
) -> None:
    command = {**FLOW, **AFTER}[name]
    for number, after in states[name].deaths(name):
        disk = states[name].disk.copy(f"{name}-{number}-{after}")
        disk.run(*command, die=number, after=after)
        assert disk.run(*FORGET) == 0
        assert not found(disk.folder, sought), states[name].publications[number - 1]


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
    tmp_path_factory: pytest.TempPathFactory, sought: list[bytes]
) -> Iterator[dict[str, State]]:
    """A disk and a bucket as each command finds them."""
    folder = tmp_path_factory.mktemp("disks")
    with s3_server() as server:
        bucket = Bucket(server)
        bucket.put_log(marked_log(folder / "log"))
        disk = Disk(folder / "calm", bucket)
        made = calm(disk, AT_URL, sought)
        last = disk.copy("after-forget")
        assert last.run(*FORGET) == 0
        yield {**made, "forget": State(disk, last.publications())}


@pytest.mark.skipif(not THOROUGH, reason="the server of objects takes most of the time")
@pytest.mark.parametrize("name", [*AT_URL, "forget"])
def test_no_byte_of_it_stays_at_a_url(
    states_at_url: dict[str, State], sought: list[bytes], name: str
) -> None:
    state, command = states_at_url[name], {**AT_URL, "forget": FORGET}[name]
    numbers = range(1, len(state.publications) + 1)
    for number in random.Random(name).sample(numbers, min(DEATHS_AT_URL, len(numbers))):
        disk = state.disk.copy(f"{name}-{number}")
        disk.run(*command, die=number, after=number % 2 == 0)
        assert disk.run(*FORGET) == 0
        assert not found(disk.folder, sought), state.publications[number - 1]
