"""A multi-actor write whose actors are killed again and again, run as a program of its own.

`python -m tests.stores.campaign FOLDER KILLS SEED` writes the same samples into FOLDER/0,
FOLDER/1, ... until KILLS actors were killed, and prints how many were. Each store is finished:
a killed actor is replaced. Actors are forked, so that a death costs milliseconds; nothing here
imports polars, whose threads would not survive a fork.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.stores.faults import CALLS, Kill, struck
from tests.stores.samples import head, info, provenance, sample
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.store import Store

NUMBERS = {f"u{at}": range(at * 3, at * 3 + 3) for at in range(8)}
ACTORS = 3


def act(path: Path, seed: int) -> None:
    """One actor: write whatever is missing, in an order of its own."""
    rng = random.Random(seed)
    store = Store.create(path, provenance(), info(), head())
    for shard in rng.sample(list(NUMBERS), len(NUMBERS)):
        if store.keys().issuperset(f"k{number:04}" for number in NUMBERS[shard]):
            continue
        with store.writer(shard) as writer:
            for number in NUMBERS[shard]:
                writer.add(sample(number))


def spawn(path: Path, rng: random.Random) -> int:
    """Fork an actor; two of three will kill themselves at a random call, the others live on."""
    at = rng.choice([None, rng.randrange(1, 80), rng.randrange(1, 600)])
    seed, before = rng.randrange(1 << 30), rng.random() < 0.5
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with struck(Kill(CALLS, at, before)):
            act(path, seed)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the actor ends here
        traceback.print_exc()
    finally:
        os._exit(code)


def campaign(folder: Path, kills: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    killed = stores = 0
    while killed < kills:
        path = folder / str(stores)
        stores += 1
        living = {spawn(path, rng) for _ in range(ACTORS)}
        while living:
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.02)
                os.kill(
                    rng.choice(sorted(living)), signal.SIGKILL
                )  # whenever: not only at calls
            if rng.random() < 0.2 and (path / "store.json").exists():
                collect(Store.open(path), grace=0)  # must leave the living alone
            child, status = os.wait()
            living.discard(child)
            killed += os.WIFSIGNALED(status)
            if os.WIFSIGNALED(status):
                living.add(spawn(path, rng))
            elif os.WEXITSTATUS(status):
                raise RuntimeError("an actor failed without being killed")
    return {"killed": killed, "stores": stores}


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    )
