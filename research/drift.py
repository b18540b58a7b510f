"""Traffic that shifts twice, and drafters that follow it or not: `docs/measurements/drift.md`.

    python -m research.drift [--model demo] [--drafter wren] [--seeds 3] [--only drift|rows] [--runs DIR]

The target answers requests, whose log is harvested round by round. A drafter is trained on the round before
the first shift. Then it stays as it is, is adapted once, is adapted after each round, or another one is
trained from nothing on all traffic so far, for as many steps as training and adaptations had together. Each
drafter meets a round before it is trained on it, as a served one does. `rows` compares what an adaptation
trains: all rows of the samples, random ones or those where a replay failed. Tau is counted on held-out
requests without decoding (`research.trial`). What is finished is not repeated, and both models and both parts
are on one page.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from research import say
from research.trial import count
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.features.store_part import StorePart
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.demo import chats, scenes, wording
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.traffic.harvest import dataset_of, harvest
from vlmdistill.pipelines.traffic.replay import replay
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

LONGEST, BATCH, HELD_OUT = 160, 32, 0.25
SECONDS_2026 = 1.77e9  # when the first request came
STEPS, FEW = 600, 60  # of the first training, and of an adaptation: a tenth
LOWER = "stages.*.learning_rate=1e-3"  # of an adaptation: half of the recipe's
FAILED = ("stages.*.anchors=failed", "stages.*.mixed=1", LOWER)
CASES = {
    "all rows": (LOWER,),
    "all rows, at the full rate": (),
    "32 random rows of a sample": ("stages.*.anchors=32", LOWER),
    "32 random rows, at the full rate": ("stages.*.anchors=32",),
    "rows that failed": ("stages.*.anchors=failed", LOWER),
    "rows that failed, and as many others": FAILED,
}
STRATEGIES = ("static", "once", "each", "retrained")


@dataclass(frozen=True)
class Phase:
    """What users ask at one time."""

    tasks: tuple[str, ...]  # about scenes
    talks: tuple[str, ...]  # without one
    grounds: tuple[str, ...]
    suffix: str


PHASES = {
    "a": Phase(("describe", "list"), ("shape",), ("black", "navy"), ""),
    "b": Phase(("count", "story"), ("tale",), ("maroon",), " Please write as much as you can."),
    "c": Phase(("rows", "sizes"), ("draw", "colour"), ("olive",), " Be precise."),
}
ROUNDS = {"a0": 420, "b1": 160, "b2": 160, "c1": 160, "c2": 160}  # requests; the phase is the first letter
LATER = [*ROUNDS][1:]


def requests(name: str) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """The messages of a round and the picture of each, if it has one."""
    phase, rng = PHASES[name[0]], random.Random(f"drift {name}")
    for _ in range(ROUNDS[name]):
        picture = None
        if rng.random() < 0.8:
            scene = scenes.random_scene(rng, "drafter")
            scene = replace(scene, background=rng.choice(phase.grounds))
            question, picture = wording.ask(scene, rng.choice(phase.tasks), rng)[0], scenes.draw(scene)
        else:
            question = chats._KINDS[rng.choice(phase.talks)](rng)[0]
        content: list[dict[str, Any]] = [{"type": "text", "text": question + phase.suffix}]
        if picture is not None:
            content.insert(0, {"type": "image", "image": picture})
        yield [{"role": "user", "content": content}], picture


def serve(model: str, folder: Path, rounds: Sequence[str]) -> None:
    """Answer some rounds as a server would, and log them: a folder for each."""
    target = None
    for number, name in enumerate(rounds):
        log = folder / name / "log.jsonl"
        if log.exists():
            continue
        target = target or load(model)
        log.parent.mkdir(parents=True, exist_ok=True)
        lines, asked = [], list(requests(name))
        for start in range(0, len(asked), BATCH):
            some = asked[start : start + BATCH]
            encoded = [target.encode(messages) for messages, _ in some]
            said = target.generate(encoded, max_new_tokens=LONGEST, temperature=0.0, top_p=1.0, seed=0)
            for at, ((messages, picture), prompt, response) in enumerate(
                zip(some, encoded, said, strict=True)
            ):
                (turn,) = messages
                parts = [part for part in turn["content"] if part["type"] == "text"]
                if picture is not None:
                    picture.save(log.with_name(f"{start + at}.png"))
                    parts.insert(0, {"type": "image_url", "image_url": {"url": f"{start + at}.png"}})
                choice = {
                    "message": {"role": "assistant", "content": response.text},
                    "finish_reason": response.finish,
                    "token_ids": [int(one) for one in response.ids],
                }
                body = {"choices": [choice], "usage": {"prompt_tokens": prompt.length}}
                sent = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
                when = SECONDS_2026 + 86400 * number + start + at
                lines.append({"time": when, "request": sent, "response": body})
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        say(f"served {name}: {len(lines)} requests")


def prepare(workspace: Workspace, drafter: str, rounds: Sequence[str]) -> tuple[Store, Store]:
    """Serve, harvest and capture rounds: the store to train on, and that of the held-out requests."""
    logs = workspace.root / "logs"
    serve(workspace.model, logs, rounds)
    for name in rounds:
        made = harvest(workspace, [str(logs / name / "log.jsonl")], round_name=name, eval_share=HELD_OUT)
        say(f"harvested {name}: {made.kept} of {made.exchanges}, dropped {made.dropped}")
    stores = []
    for split, folder, dtype in (("train", "features", None), ("eval", "held-out", "float32")):
        part = StorePart(workspace.root / folder)
        job = CaptureJob(
            workspace=workspace,
            prompts=prompt_table.load(workspace.prompts, workspace.model, split),
            responses=workspace.responses,
            part=part,
            settings=CaptureSettings(drafters=[drafter], dtype=dtype),  # type: ignore[arg-type]
            workers=WorkerOptions(workers=1),
        )
        flow.capture_features(job)
        stores.append(part.made)
    return stores[0], stores[1]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: from which drafter, on which rounds, how long."""

    name: str
    rounds: tuple[str, ...]
    steps: int
    init: str | None = None
    old: tuple[str, ...] = ()  # rounds before, of which as many samples are mixed in
    settings: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Lab:
    """Trains and counts in one workspace, and keeps what it has found there."""

    workspace: Workspace
    drafter: str
    store: Store
    held_out: Store

    def train(self, one: Training) -> float:
        """Train it unless that is done; its CPU seconds, replay included."""
        file = self._file(one.name)
        if file.exists():
            return float(json.loads(file.read_text()))
        start, keys = time.process_time(), self._keys(one)
        filter_store(self.store, one.name, filters=[Filter("other", lambda rows: rows["key"].is_in(keys))])
        init = self.workspace.drafter(one.init).absolute() if one.init else None
        if init and "stages.*.anchors=failed" in one.settings:
            replay(init, self.store, one.name)
        settings = [f"steps={one.steps}", *one.settings]
        plan = train.planned(self.workspace, self.drafter, "demo", settings, name=one.name, seed=one.seed)
        train.run(replace(plan, view=one.name, init=init, save_every=10**6), force=True)
        cost = time.process_time() - start
        file.write_text(json.dumps(cost))
        say(f"trained {one.name}: {cost:.0f} CPU seconds")
        return cost

    def measure(self, name: str, round_name: str) -> Measurement:
        """Tau of a drafter on the held-out requests of a round, counted without decoding."""
        file = self._file(f"{name}.on.{round_name}")
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Measurement)
        head = Head.of(self.held_out.head())
        model = checkpoint.load(self.workspace.drafter(name), head, self.held_out.info)
        assert isinstance(model, Drafter)
        rows = self.held_out.index.select("key", "dataset").rows()
        keys = sorted(key for key, where in rows if where == dataset_of(round_name))
        found = count(model, self.held_out, keys)
        file.write_bytes(msgspec.json.encode(found))
        return found

    def _keys(self, one: Training) -> list[str]:
        rows = self.store.index.select("key", "dataset").rows()
        new = [key for key, where in rows if where in {dataset_of(name) for name in one.rounds}]
        old = [key for key, where in rows if where in {dataset_of(name) for name in one.old}]
        return new + sorted(old, key=lambda key: content_hash([one.name, key]))[: len(new)]

    def _file(self, name: str) -> Path:
        folder = self.workspace.root / "found"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a strategy served a round with, and what it had cost by then."""

    round: str
    strategy: str
    cpu_seconds: float  # after the first training
    on: Measurement  # the round's held-out requests
    old: Measurement  # those of before the first shift


def static(seed: int) -> Training:
    """The training before the first shift."""
    return Training(name=f"static-{seed}", rounds=("a0",), steps=STEPS, seed=seed)


def drift(lab: Lab, seed: int) -> list[Served]:
    """The strategies, round after round: each round is served, then trained on."""
    first = static(seed)
    lab.train(first)
    in_use, spent = dict.fromkeys(STRATEGIES, first.name), dict.fromkeys(STRATEGIES, 0.0)
    found = []
    for number, name in enumerate(LATER, 1):
        for strategy, drafter in in_use.items():
            on, old = (lab.measure(drafter, one) for one in (name, "a0"))
            found.append(Served(round=name, strategy=strategy, cpu_seconds=spent[strategy], on=on, old=old))
        if name == LATER[-1]:
            break
        before = tuple(ROUNDS)[:number]
        adapted = Training(
            name=f"each-{name}-{seed}",
            rounds=(name,),
            old=before,
            steps=FEW,
            init=in_use["each"],
            settings=FAILED,
            seed=seed,
        )
        again = Training(
            name=f"retrained-{name}-{seed}", rounds=(*before, name), steps=STEPS + FEW * number, seed=seed
        )
        spent["each"] += lab.train(adapted)
        spent["retrained"] += lab.train(again)
        in_use |= {"each": adapted.name, "retrained": again.name}
        if number == 1:
            spent["once"], in_use["once"] = spent["each"], adapted.name
    return found


@dataclass(frozen=True, kw_only=True)
class Rows:
    """An adaptation to the first shift that trained some rows."""

    case: str
    cpu_seconds: float
    new: Measurement  # held-out requests of the next round of the same traffic
    old: Measurement


def rows_compared(lab: Lab, seed: int) -> list[Rows]:
    """Equal steps of adaptation to the first shift, on all rows or on those that failed; first none."""
    first = static(seed)
    lab.train(first)
    found = [_adapted(lab, "not adapted", first.name, 0.0)]
    for case, settings in CASES.items():
        one = Training(
            name=f"rows-{content_hash(case)[:6]}-{seed}",
            rounds=("b1",),
            old=("a0",),
            steps=FEW,
            init=first.name,
            settings=settings,
            seed=seed,
        )
        found.append(_adapted(lab, case, one.name, lab.train(one)))
    return found


def _adapted(lab: Lab, case: str, name: str, cost: float) -> Rows:
    new, old = (lab.measure(name, one) for one in ("b2", "a0"))
    return Rows(case=case, cpu_seconds=cost, new=new, old=old)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, harvest, train and measure; the page has all that was found so far."""
    from research import drift_page as page  # it reads what is measured here

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="wren")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("drift", "rows"), default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/drift"))
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/drift.md"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    workspace = Workspace.of(given.model, given.runs)
    rounds = ("a0", "b1", "b2") if given.only == "rows" else tuple(ROUNDS)
    lab = Lab(workspace, given.drafter, *prepare(workspace, given.drafter, rounds))
    served, rows = list[list[Served]](), list[list[Rows]]()
    costs = list[float]()
    for seed in range(given.seeds):
        costs.append(lab.train(static(seed)))
        if given.only != "rows":
            served.append(drift(lab, seed))
        if given.only != "drift":
            rows.append(rows_compared(lab, seed))
        page.keep(given.out, given.model, given.drafter, costs, served, rows)


if __name__ == "__main__":
    main()
