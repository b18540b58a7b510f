"""A Slurm of two nodes on this host, as root: its own munge, controller and two slurmd, without cgroups.

`apt-get install slurm-wlm munge` has all of it.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NODES = 2
SECONDS = 1800.0  # for a job to come to a state, where this machine is busy
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
KillWait=60
MessageTimeout=100
SlurmdTimeout=600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd runs as root"


@dataclass(frozen=True)
class Slurm:
    """The running scheduler."""

    folder: Path

    def __call__(self, *command: str) -> str:
        """The output of a Slurm command."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """The id of a job whose output goes to ID.log."""
        exported = "ALL," + ",".join(
            f"{name}={value}" for name, value in variables.items()
        )
        out = self.folder / "%j.log"
        given = (
            f"--export={exported}",
            f"--output={out}",
            f"--chdir={self.folder}",
            *options,
        )
        return self("sbatch", "--parsable", *given, str(script)).strip()

    def state(self, job: str) -> str:
        """Such as RUNNING or COMPLETED."""
        facts = self("scontrol", "--oneliner", "show", "job", job).split()
        return next(
            fact.partition("=")[2] for fact in facts if fact.startswith("JobState=")
        )

    def log(self, job: str) -> str:
        """What the job has printed."""
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, *states: str) -> str:
        """Wait until the job is in one of these states; RuntimeError if it ends in another."""
        end, ended = (
            time.monotonic() + SECONDS,
            {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"},
        )
        while (state := self.state(job)) not in states:
            if state in ended or time.monotonic() > end:
                raise RuntimeError(f"job {job} is {state}: {self.log(job)}")
            time.sleep(1)
        return state


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm with all its files in a folder, and stop it with its jobs."""
    host, daemons = socket.gethostname(), list[subprocess.Popen[bytes]]()
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, ports=_free_ports(3), folder=folder)
    )
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    scheduler = Slurm(folder)

    def start(*command: str) -> None:
        with (folder / f"{command[0]}-{len(daemons)}.log").open("wb") as log:
            daemons.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )

    try:
        files = [f"--{what}-file={folder}/munged.{what}" for what in ("pid", "seed")]
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            *files,
        )
        _until((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        _until(lambda: _idle(scheduler) == NODES)
        yield scheduler
    finally:
        if len(daemons) > 1:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)
            _until(lambda: not scheduler("squeue", "--noheader").strip())
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def _idle(scheduler: Slurm) -> int:
    try:
        return (
            scheduler("sinfo", "--noheader", "--Node", "--format=%t")
            .split()
            .count("idle")
        )
    except subprocess.CalledProcessError:  # the controller does not listen yet
        return 0


def _until(true: object) -> None:
    assert callable(true)
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            raise RuntimeError(
                "Slurm did not come up, or did not end its jobs, within 120 s"
            )
        time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
