"""`doctor`: each machine that differs is named with what it lacks; one that hangs is not waited for."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.pipelines.cluster.machines import Cluster, namespaces
from tests.pipelines.cluster.test_cluster import ROOT, SECONDS, bucket, cluster, world
from vlmdistill.cli.main import main

pytestmark = pytest.mark.slow
__all__ = ["bucket", "cluster", "world"]  # fixtures

on_machines = pytest.mark.skipif(
    not namespaces(), reason="mount and process namespaces are not allowed here"
)


def doctor(
    cluster: Cluster, world: Path, *more: str
) -> tuple[int, dict[str, Any], list[str]]:
    """The exit status, the reports and the lines on stderr."""
    command = [
        "doctor",
        "-m",
        str(world / "model"),
        "--media",
        str(world / "responses"),
        "--json",
        *more,
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "vlmdistill", *command],
        env=cluster.drivers,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return ran.returncode, json.loads(ran.stdout), ran.stderr.splitlines()


def test_this_machine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.picture(28, 28).save(tmp_path / "a.png")
    where = [
        "--media",
        str(tmp_path),
        "--runs",
        str(tmp_path / "runs"),
        "--address",
        "",
    ]
    assert main(["doctor", *where]) == 0
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (2, "")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.png").symlink_to("nowhere")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "linked").symlink_to(tmp_path / "elsewhere")
    assert main(["doctor", "--media", str(tmp_path / "media"), *where[2:]]) == 1
    assert "b.png" in capsys.readouterr().err
    assert (
        main(["doctor", "--runs", "http://example.org/runs"]) == 1
    )  # no folder of that name is made
    assert "http://example.org/runs" in capsys.readouterr().err
    (tmp_path / "runs").write_text("a file")
    assert main(["doctor", *where]) == 1
    out, err = capsys.readouterr()
    assert "failed" in out
    assert str(tmp_path / "runs") in err


@on_machines
def test_a_machine_is_named_with_all_that_it_lacks(
    cluster: Cluster, world: Path
) -> None:
    facts = metadata.distribution("transformers").locate_file(
        f"transformers-{metadata.version('transformers')}.dist-info/METADATA"
    )
    other = "printf 'Metadata-Version: 2.1\\nName: transformers\\nVersion: 0.1\\n' > /mnt/METADATA"
    model = (world / "model").resolve()
    mounts = ["mount -t tmpfs none /mnt", other, f"mount --bind /mnt/METADATA {facts}"]
    hidden = [f"mount -t tmpfs none {model}"]
    cluster.on(B="true", C=" && ".join([*mounts, *hidden]))
    status, reports, lines = doctor(
        cluster, world, "--store", "s3://bucket/new", "--wait", "300"
    )
    assert status == 1
    failures = {name: sorted(report["failures"]) for name, report in reports.items()}
    assert failures.pop("C (127.0.0.67)") == ["model", "versions"]
    assert len(failures) == 2  # the head, which is the driver's machine, and B
    assert set(map(tuple, failures.values())) == {()}
    assert reports["C (127.0.0.67)"]["versions"]["transformers"] == "0.1"
    assert reports["B (127.0.0.66)"]["checked"] == ["model", "media", "store"]
    assert len(lines) == 2
    assert all(line.startswith("C (127.0.0.67): ") for line in lines)
    cluster.off("C")


@on_machines
def test_a_machine_that_hangs_or_does_not_come_is_named(
    cluster: Cluster, world: Path
) -> None:
    slow = r"printf '#!/bin/sh\nexec sleep 600\n' > /mnt/nvidia-smi && chmod +x /mnt/nvidia-smi"
    cluster.on(
        B="true", D=f"mount -t tmpfs none /mnt && {slow} && export PATH=/mnt:$PATH"
    )
    status, reports, lines = doctor(
        cluster, world, "--store", "s3://bucket/new", "--machines", "5", "--wait", "5"
    )  # three are there, and Ray may still count C
    assert status == 1
    assert list(reports["D (127.0.0.68)"]["failures"]) == ["reply"]
    assert list(reports["driver"]["failures"]) == ["machines"]
    assert any(line.startswith("D (127.0.0.68): ") for line in lines)
    cluster.off("D")
