"""Ranks on machines that share no disk: rank 0 decides what is done, and all follow or stop together."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.errors import StoppedError, TrainingError
from vlmdistill.stores.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method:DeprecationWarning"
    ),  # what ZeRO imports
]

ROOT = Path(__file__).parents[3]
STEPS, SAVED, KILLED, STOPPED = 8, 3, 5, 6
ALONE = {f"alone{zero}": zero for zero in (0, 1, 2)}
"""Runs that one rank begins, two go on with, and one finishes, by their ZeRO stage."""
HOW: dict[str, Any] = {
    "settings": (f"steps={STEPS}", "batch_tokens=120", "validate_every=2"),
    "save_every": SAVED,
    "held_out": 0.2,
}
SCRIPT = """
import os
import sys
from pathlib import Path
from tests.drafters.training.test_ranks import work

work(Path(sys.argv[1]), Path(sys.argv[2]))
os._exit(0)  # gloo's threads may abort a process that ends the usual way; the work is done by then
"""


def work(store: Path, disk: Path) -> None:
    """What the one rank of each machine does; the first time, it comes as far as the middle of `parts`."""
    (disk / "pid").write_text(str(os.getpid()))
    rank = int(os.environ["RANK"])
    steps: dict[str, list[int]] = {}
    refused: dict[str, str] = {}

    def hear(name: str, progress: TrainingProgress) -> None:
        steps.setdefault(name, []).append(progress.step)
        if (
            name == "parts"
            and KILLED in steps[name]
            and SAVED + 1 not in steps[name][:1]
        ):
            (disk / "middle").touch()
            time.sleep(600)
        if name in ALONE and progress.step == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(name: str, **more: Any) -> None:
        train(
            plan(store, disk / name, **{**HOW, **more}),
            lambda progress: hear(name, progress),
        )

    for name in ("whole", "parts", "moved"):
        run(name)
    for name, zero in ALONE.items():
        with contextlib.suppress(StoppedError):
            run(name, zero=zero)
    stores = {"store": store if rank == 0 else disk / "nowhere"}
    wrong: dict[str, dict[str, Any]] = {
        "settings": {"seed": rank},
        "store": stores,
        "save_every": {},
    }
    for name, more in wrong.items():
        try:
            if name == "store":
                train(plan(more["store"], disk / "refused", **HOW))
            else:
                run("refused", **more, save_every=2 + rank * (name == "save_every"))
        except TrainingError as error:
            refused[name] = str(error)
    (disk / "heard.json").write_text(json.dumps({"steps": steps, "refused": refused}))


def unused_port() -> int:
    """A port below those that the system gives to the other test process while the agents start."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("localhost", port))
            return port


class Machines:
    """Two torchrun agents, each with a folder of its own."""

    def __init__(self, store: Path, disks: list[Path]) -> None:
        port = unused_port()
        script = disks[0] / "work.py"
        script.write_text(SCRIPT)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/src",
            "OMP_NUM_THREADS": "1",
        }
        self.disks = disks
        self.agents = [
            subprocess.Popen(
                [
                    *torchrun,
                    f"--node-rank={number}",
                    str(script),
                    str(store),
                    str(disk),
                ],
                cwd=ROOT,
                env=environment,
            )
            for number, disk in enumerate(disks)
        ]

    def kill(self) -> None:
        """Everything at once, as when the power fails."""
        for agent in self.agents:
            agent.kill()
        for disk in self.disks:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int((disk / "pid").read_text()), signal.SIGKILL)
        for agent in self.agents:
            agent.wait()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("ranks"), 21).path)


@pytest.fixture(scope="module")
def disks(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two machines that were killed in the middle of a run, and started again by the same commands."""
    disks = [tmp_path_factory.mktemp(f"machine{number}") for number in (0, 1)]
    machines = Machines(store, disks)
    try:
        while not (disks[0] / "middle").exists():
            assert all(agent.poll() is None for agent in machines.agents)
            time.sleep(0.05)
    finally:
        machines.kill()
    shutil.copytree(disks[0] / "parts.training", disks[1] / "moved.training")
    for name, zero in ALONE.items():
        with pytest.raises(StoppedError):
            train(
                plan(store, disks[0] / name, zero=zero, **HOW),
                lambda one: (
                    os.kill(os.getpid(), signal.SIGTERM) if one.step == 1 else None
                ),
            )
    machines = Machines(store, disks)
    try:
        assert [agent.wait(600) for agent in machines.agents] == [0, 0]
    finally:
        for agent in machines.agents:
            agent.kill()
    return disks


def heard(disks: list[Path]) -> list[Any]:
    return [json.loads((disk / "heard.json").read_text()) for disk in disks]


def test_machines_that_were_killed_go_on_bit_for_bit_from_the_disk_of_rank_0(
    disks: list[Path],
) -> None:
    first, second = heard(disks)
    assert first["steps"]["parts"] == [*range(SAVED + 1, STEPS + 1)]
    whole, parts = (disks[0] / run / "model.safetensors" for run in ("whole", "parts"))
    assert parts.read_bytes() == whole.read_bytes()
    assert second["steps"] == {}
    assert not list(disks[1].glob("parts*"))


def test_the_checkpoint_is_found_on_the_machine_that_was_rank_0_before(
    disks: list[Path],
) -> None:
    assert heard(disks)[0]["steps"]["moved"] == [*range(SAVED + 1, STEPS + 1)]
    whole, moved = (disks[0] / run / "model.safetensors" for run in ("whole", "moved"))
    assert moved.read_bytes() == whole.read_bytes()


def test_a_finished_run_is_done_for_the_machine_that_has_nothing_of_it(
    disks: list[Path],
) -> None:
    assert "whole" not in heard(disks)[0]["steps"]
    assert not (disks[1] / "whole").exists()


def test_any_number_of_ranks_goes_on_where_another_number_stopped(
    disks: list[Path], store: Path
) -> None:
    weights = []
    for name, zero in ALONE.items():
        assert heard(disks)[0]["steps"][name] == [*range(3, STOPPED + 1)]
        seen: list[int] = []
        train(
            plan(store, disks[0] / name, zero=zero, **HOW),
            lambda one, seen=seen: seen.append(one.step),  # type: ignore[misc]
        )
        assert seen == [*range(STOPPED + 1, STEPS + 1)]
        weights.append(load_file(disks[0] / name / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-3, atol=1e-4)


def test_the_statistics_are_of_the_samples_of_all_ranks(
    disks: list[Path], store: Path
) -> None:
    index = Store.open(store).index
    images = index.filter(
        index["visual_tokens"] > 0
    )  # all are in the last epoch, but for those held out
    assert (
        images["whole.kept"].null_count() < len(images) / 4
    )  # one rank alone has half of them


def test_ranks_that_differ_stop_with_the_machine_and_what_differs(
    disks: list[Path],
) -> None:
    first, second = (one["refused"] for one in heard(disks))
    assert first == second
    assert "(rank 1) has seed 1, not 0, as " in first["settings"]
    assert "(rank 1) has save_every 3, not 2, as " in first["save_every"]
    assert "(rank 1): there is no feature store at " in first["store"]
    assert all("\n" not in line for line in first.values())
    assert not list(disks[0].glob("refused*"))


def test_a_store_behind_a_url_trains_the_same_drafter(
    store: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    from vlmdistill.stores.sharing.merge import send

    url = f"memory://{tmp_path.name}/store"
    send(store, url)
    train(plan(store, tmp_path / "here", **HOW))
    there: Run = replace(plan(store, tmp_path / "there", **HOW), store=url)
    train(there)
    files = [
        (tmp_path / run / "model.safetensors").read_bytes() for run in ("here", "there")
    ]
    assert files[0] == files[1]


def test_a_run_goes_on_from_its_checkpoint_at_a_url_on_another_machine(
    store: Path, tmp_path: Path
) -> None:
    url = f"memory://{tmp_path.name}/runs/demo-small/sparrow"

    def run(machine: str, **more: Any) -> list[int]:
        seen: list[int] = []

        def hear(one: TrainingProgress) -> None:
            seen.append(one.step)
            if one.step == more.get("stop"):
                os.kill(os.getpid(), signal.SIGTERM)

        settings = {**HOW, "settings": (*HOW["settings"], *more.get("settings", ()))}
        with contextlib.suppress(StoppedError):
            train(
                plan(
                    store, tmp_path / machine / "sparrow", checkpoints=url, **settings
                ),
                hear,
            )
        return seen

    assert run("first", stop=3) == [1, 2, 3, 4]
    assert run("second", stop=5) == [5, 6]
    assert run("first", stop=4) == [7, 8]
    with pytest.raises(TrainingError, match=url):
        run("other", settings=("noise=0.1",))
    train(plan(store, tmp_path / "alone", **HOW))
    files = [
        (tmp_path / one / "model.safetensors").read_bytes()
        for one in ("alone", "first/sparrow")
    ]
    assert files[0] == files[1]
    fs = fsspec.filesystem("memory")
    tensors = max(
        fs.glob(f"{url}/files/*-step*"), key=lambda name: fs.info(name)["created"]
    )
    fs.pipe_file(tensors, fs.cat_file(tensors)[:-1] + b"x")
    with pytest.raises(TrainingError, match=url):
        run("third")


LEFT = """
from torch import distributed
from vlmdistill.drafters.training import ranks
from vlmdistill.stores.errors import TrainingError

try:
    with ranks.group():
        assert distributed.is_initialized()
        {end}
except TrainingError:
    pass
print(distributed.is_initialized())
"""


@pytest.mark.parametrize("end", ["pass", "raise TrainingError('no')"])
def test_the_group_of_a_launcher_is_left_while_python_is_whole(
    end: str, tmp_path: Path
) -> None:
    launched = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        ranks.RENDEZVOUS: str(tmp_path / "meet"),
    }
    done = subprocess.run(
        [sys.executable, "-c", LEFT.format(end=end)],
        env=launched,
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (0, b"False\n")
