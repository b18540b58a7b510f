"""Pushes that start at the same time, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PUSH = """
import json, sys, time
from pathlib import Path
from vlmdistill.stores.sharing.merge import send
source, target, go = sys.argv[1:]
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.001)
facts = send(source, target)
print(json.dumps([facts.copied, facts.present, list(facts.conflicts)]))
"""


def pushed_at_once(sources: Iterable[Path], target: str, go: Path) -> list[Any]:
    """What a push of each source reports, each in a process of its own that starts when all are ready."""
    commands = [
        [sys.executable, "-c", PUSH, str(source), target, str(go)] for source in sources
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        for command in commands
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    go.touch()
    facts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(one) for one in facts]
