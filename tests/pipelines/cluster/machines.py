"""Machines of a Ray cluster, all on this one: raylets in mount and process namespaces of their own.

What a machine does not share is mounted over; to switch it off is to kill its namespace, workers and all.
"""

import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

SECONDS = 240  # for machines to come up where this one is busy
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_initial_delay_ms": "1000",  # a machine that is off is missed soon
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",  # not one that is slow
    "RAY_health_check_failure_threshold": "4",
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# As `ray start` does, without what is not needed here.
START = """
import json, sys, threading
from ray._private.node import Node
from ray._private.parameter import RayParams
head, settings = json.loads(sys.argv[1])
small = dict(num_gpus=0, object_store_memory=80000000, min_worker_port=0, max_worker_port=0)
node = Node(RayParams(include_log_monitor=False, no_monitor=True, **small, **settings), head=head)
print("it is up", flush=True)
threading.Event().wait()
"""


@functools.cache
def namespaces() -> list[str]:
    """The command that gives a process namespaces of its own; empty where that is not allowed."""
    for command in (UNSHARE, [*UNSHARE, "--user", "--map-root-user"]):
        try:
            tried = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
            if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
                return command
        except OSError:
            return []
    return []


@dataclass
class Cluster:
    """A head without CPUs, and machines of one CPU each; use as a context manager."""

    folder: Path  # for Ray's own files: a short path, as sockets want it
    environment: dict[str, str] = field(default_factory=dict)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("", 0))
            self._port = free.getsockname()[1]
        settings = {
            "gcs_server_port": self._port,
            "include_dashboard": False,
            "temp_dir": str(self.folder),
        }
        self._start("head", "true", True, {**settings, "num_cpus": 0})
        self._wait_for("head")
        return self

    def __exit__(self, *error: object) -> None:
        for name in reversed(list(self._running)):
            self.off(name)

    @property
    def drivers(self) -> dict[str, str]:
        """The environment of drivers."""
        address = f"127.0.0.1:{self._port}"
        return {**os.environ, **SETTINGS, **self.environment, "RAY_ADDRESS": address}

    def on(self, **machines: str) -> None:
        """Switch machines on that are off; each first runs a shell command, its mounts."""
        for name in machines.keys() - self._running.keys():
            where = {
                "gcs_address": f"127.0.0.1:{self._port}",
                "node_ip_address": f"127.0.0.{ord(name)}",
            }
            own = f"mount -t tmpfs none {self.folder} && {machines[name]}"  # else they share files of Ray
            self._start(name, own, False, {**where, "node_name": name, "num_cpus": 1})
        for name in machines:
            self._wait_for(name)

    def off(self, name: str) -> None:
        """Switch a machine off, as if its plug were pulled."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def _start(
        self, name: str, mounts: str, head: bool, settings: dict[str, Any]
    ) -> None:
        command = shlex.join(
            [sys.executable, "-c", START, json.dumps([head, settings])]
        )
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [*namespaces(), "sh", "-c", f"{mounts} && exec {command}"],
                env={**os.environ, **SETTINGS, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _wait_for(self, name: str) -> None:
        end = time.monotonic() + SECONDS
        while "it is up" not in (said := self._log(name).read_text()):
            if self._running[name].poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise RuntimeError(f"{name} did not come up: {said}")
            time.sleep(0.1)
