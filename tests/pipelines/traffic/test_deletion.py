"""Whatever command was killed at whatever publication, `forget` leaves no byte of old traffic."""

import random
from dataclasses import dataclass

import pytest

from tests.pipelines.traffic.killing import EXCHANGES, Disk, found, marked_log, marks
from tests.thorough import THOROUGH

FEW = ("--workers", "0", "--limit", "14", "--max-new-tokens", "6")
HARVEST = ("harvest", "../log/day.jsonl", "--eval-share", "0.5")
FEATURES = ("features", "--for", "wren", "--workers", "0")
TRAIN = ("train", "wren", "--set", "steps=1")
EVAL = ("eval", "wren", "--threads", "1", "--limit", "4", "--max-new-tokens", "6")
REPORT = ("report",)
FORGET = ("forget", "--older-than", "30d")
FLOW = {"harvest": HARVEST, "features": FEATURES, "train": TRAIN, "eval": EVAL, "report": REPORT}
AFTER = {
    "replay": ("replay", "wren"),
    "filter": ("store", "filter", "runs/demo/features", "--where", "words > 1", "--name", "few"),
    "adapt": ("adapt", "wren", "--from", "../more", "--steps", "1", "--fewest", "1", *FEW),
    "forget": FORGET,
}
WORST = {
    "harvest": "responses/part-",
    "features": "features/shards/",
    "train": "drafters/wren",
    "eval": "reports/wren",
    "report": "index.html",
    "replay": "stats/wren.replay-",
    "filter": "views/few-",
    "adapt": "staging/#/prompts.parquet",
    "forget": "staging/removed-",
}
LATE = ("features", "adapt", "forget")  # are worst after the publication


@pytest.fixture(scope="module")
def sought() -> list[bytes]:
    from vlmdistill.pipelines.targets.loading import load_encoder

    return marks(load_encoder("demo").tokenizer.encode)


@dataclass(frozen=True)
class State:
    """A disk as a command finds it."""

    disk: Disk
    publications: list[str]  # of the command, in order

    def deaths(self, name: str) -> list[tuple[int, bool]]:
        """At which publications the command is killed, and whether after them."""
        numbers = range(1, len(self.publications) + 1)
        if THOROUGH:
            return [(number, after) for number in numbers for after in (False, True)]
        worst = next(number for number in numbers if WORST[name] in self.publications[number - 1])
        return [(worst, name in LATE), (random.Random(name).choice(numbers), name not in LATE)]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, sought: list[bytes]) -> dict[str, State]:
    """A disk as each command finds it."""
    folder = tmp_path_factory.mktemp("disks")
    marked_log(folder / "log")
    marked_log(folder / "more", EXCHANGES)
    disk = Disk(folder / "calm")
    disk.folder.mkdir()
    made = dict[str, State]()
    for name, command in FLOW.items():
        before = disk.copy(f"before-{name}")
        assert disk.run(*command) == 0
        made[name] = State(before, disk.publications())
    for mark in sought:
        assert found(disk.folder, [mark])
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
