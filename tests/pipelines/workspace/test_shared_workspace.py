"""Machines without a shared disk work on one workspace in an object store, and are lost in between."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.s3 import s3_server
from vlmdistill.cli.main import main

pytestmark = pytest.mark.slow

RUNS = "s3://bucket/runs"
STEPS = 50
HERE = ("--workers", "0")
SHORT = ("--set", f"steps={STEPS}", "--set", "batch_tokens=512", "--save-every", "10")


class Machines:
    """Each has a disk of its own."""

    def __init__(self, server: str, disks: Path) -> None:
        self.disks = disks
        self.s3 = S3FileSystem(
            key="x", secret="x", endpoint_url=server, use_listings_cache=False
        )
        self.s3.mkdir("bucket")
        self.common = {
            "AWS_ENDPOINT_URL": server,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "VLMDISTILL_RUNS": RUNS,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, machine: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "vlmdistill", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                **self.common,
                "VLMDISTILL_CACHE": str(self.disks / machine),
            },
        )

    def run(self, machine: str, *words: str) -> Any:
        """What a command prints that runs to its end. In this process: imports would take most of it."""
        here = {**self.common, "VLMDISTILL_CACHE": str(self.disks / machine)}
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(io.StringIO()) as out,
        ):
            for (
                name,
                value,
            ) in (
                here.items()
            ):  # DeepSpeed sets others, once in a process: they must stay
                patch.setenv(name, value)
            assert main([*words, "--json"]) == 0
        return json.loads(out.getvalue())

    def lose(self, machine: str) -> None:
        shutil.rmtree(self.disks / machine)

    def files(self, folder: str) -> list[str]:
        base = f"{RUNS.removeprefix('s3://')}/demo-small/"
        return [name.removeprefix(base) for name in self.s3.find(f"{base}{folder}")]

    def named(self, folder: str, file: str) -> bool:
        """Some version names a file that ends so: until then it does not count."""
        versions = [name for name in self.files(folder) if "/versions/" in name]
        return any(
            file in self.s3.cat_file(f"{RUNS}/demo-small/{name}").decode()
            for name in versions
        )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with s3_server() as server:
        found = Machines(server, tmp_path_factory.mktemp("disks"))
        found.run("a", "prompts", "demo", "--limit", "8")
        yield found


def test_each_step_goes_on_with_what_lost_machines_have_done(
    machines: Machines,
) -> None:
    made = machines.run(
        "b", "responses", "--max-new-tokens", "24", "--min-words", "0", *HERE
    )
    assert (made["generated"], made["failed"]) == (8, 0)
    machines.lose("b")
    again = machines.run(
        "a", "responses", "--max-new-tokens", "24", "--min-words", "0", *HERE
    )
    assert again["generated"] == 0
    assert machines.run("b", "features", "--for", "hivis", *HERE)["captured"] == 8

    with machines.start("a", "train", "hivis", *SHORT) as lost:
        while lost.poll() is None and not machines.named(
            "drafters", "-checkpoint.json"
        ):
            time.sleep(0.05)
        os.killpg(lost.pid, signal.SIGKILL)
        lost.communicate()
    assert lost.returncode == -signal.SIGKILL
    machines.lose("a")
    begun = sorted(
        name for name in machines.files("drafters") if name.endswith("-metrics.jsonl")
    )
    before = (
        machines.s3.cat_file(f"{RUNS}/demo-small/{begun[-1]}").decode().splitlines()
    )
    assert machines.run("b", "train", "hivis", *SHORT)["steps"] == STEPS
    run = machines.disks / "b/s3/bucket/runs/demo-small/drafters/hivis.training"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert {*before} & {*lines}  # it went on from there
    steps = [found["step"] for found in map(json.loads, lines) if "train/loss" in found]
    assert steps == list(range(1, STEPS + 1))
    machines.run("c", "eval", "hivis", "--limit", "1", "--max-new-tokens", "8")
    machines.run("a", "report")
    page = (
        machines.disks / "a/s3/bucket/runs/demo-small/reports/index.html"
    ).read_text()
    assert "data:image/" in page  # the images of the prompts, fetched
    assert not [name for name in machines.files("") if "/lock." in name]
