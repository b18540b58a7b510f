"""Traffic that shifts twice, and drafters that follow it or not: `docs/measurements/traffic.md`.

    python -m research.drift [--drafter wren] [--runs DIR] [--out docs/measurements/traffic.md] [--seeds 1]

The target `demo` answers requests, whose log is harvested round by round. A drafter is trained on the rounds
before the first shift. Then it stays as it is, is adapted once, is adapted in each round, or is trained from
nothing on all traffic so far for as many CPU seconds as the other has had by then. Tau is counted on held-out
requests of each round without decoding (`research.trial`). What is finished is not repeated.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from research import say
from research.trial import count
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.bench.statistics import advantage, rates
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capturer import CaptureSettings
from vlmdistill.pipelines.data.features.store_part import StorePart
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.demo import chats, scenes, wording
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.traffic.harvest import dataset_of, harvest
from vlmdistill.pipelines.traffic.replay import replay
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

LONGEST, BATCH, HELD_OUT = 160, 32, 0.25
SECONDS_2026 = 1.77e9  # when the first request came
STEPS, FEW = 600, 60  # of the first training, and of an adaptation: a tenth
FAILED = ("stages.*.anchors=failed", "stages.*.mixed=1")
LOWER = "stages.*.learning_rate=1e-3"  # of an adaptation: half of the recipe's


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


def serve(folder: Path) -> None:
    """Answer all rounds as a server would, and log them: a folder for each."""
    target = None
    for number, name in enumerate(ROUNDS):
        log = folder / name / "log.jsonl"
        if log.exists():
            continue
        target = target or load("demo")
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


def prepare(workspace: Workspace, logs: Path, drafter: str) -> tuple[Store, Store]:
    """Harvest and capture all rounds: the store to train on, and that of the held-out requests."""
    for name in ROUNDS:
        made = harvest(workspace, [str(logs / name / "log.jsonl")], round_name=name, eval_share=HELD_OUT)
        say(f"harvested {name}: {made.kept} of {made.exchanges}, dropped {made.dropped}")
    stores = []
    for split, folder, dtype in (("train", "features", None), ("eval", "held-out", "float32")):
        part = StorePart(workspace.root / folder)
        flow.capture_features(
            "demo",
            prompt_table.load(workspace.prompts, "demo", split),
            workspace.responses,
            part,
            CaptureSettings(drafters=[drafter], dtype=dtype),  # type: ignore[arg-type]
            WorkerOptions(workers=1),
            generate=False,
        )
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


class Lab:
    """Trains and counts in one workspace."""

    def __init__(self, workspace: Workspace, drafter: str, store: Store, held_out: Store) -> None:
        self.workspace, self.drafter, self.store, self.held_out = workspace, drafter, store, held_out
        self.costs = workspace.root / "costs"
        self.costs.mkdir(exist_ok=True)

    def train(self, one: Training) -> float:
        """Train it unless that is done; its CPU seconds, replay included."""
        file = self.costs / f"{one.name}.json"
        if file.exists():
            return float(json.loads(file.read_text()))
        start = time.process_time()
        keys = self._keys(one)
        filter_store(self.store, one.name, filters=[Filter("other", lambda rows: rows["key"].is_in(keys))])
        init = self.workspace.drafter(one.init).absolute() if one.init else None
        if init and any("failed" in setting for setting in one.settings):
            replay(init, self.store, one.name)
        config = resolve(self.drafter, "demo", [f"steps={one.steps}", *one.settings])
        plan = train.planned(self.workspace, self.drafter, config, name=one.name, seed=one.seed)
        train.run(replace(plan, view=one.name, init=init, save_every=10**6), force=True)
        cost = time.process_time() - start
        file.write_text(json.dumps(cost))
        say(f"trained {one.name}: {cost:.0f} CPU seconds")
        return cost

    def _keys(self, one: Training) -> list[str]:
        rows = self.store.index.select("key", "dataset").rows()
        new = [key for key, where in rows if where in {dataset_of(name) for name in one.rounds}]
        old = [key for key, where in rows if where in {dataset_of(name) for name in one.old}]
        return new + sorted(old, key=lambda key: content_hash([one.name, key]))[: len(new)]

    def measure(self, name: str, round_name: str) -> Measurement:
        """Tau of a drafter on the held-out requests of a round, counted without decoding."""
        file = self.costs / f"{name}.on.{round_name}.json"
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Measurement)
        frozen = self.held_out.head()
        tables = (frozen.embed_VD, frozen.lm_head_VD)
        head = Head(*(as_torch(table, frozen.dtype).float() for table in tables))
        model = checkpoint.load(self.workspace.drafter(name), head, self.held_out.info)
        assert isinstance(model, Drafter)
        rows = self.held_out.index.select("key", "dataset").rows()
        found = count(model, self.held_out, [key for key, where in rows if where == dataset_of(round_name)])
        file.write_bytes(msgspec.json.encode(found))
        return found


def drift(lab: Lab) -> dict[str, Any]:
    """The strategies, round after round."""
    cost = {"static": lab.train(Training(name="static", rounds=("a0",), steps=STEPS))}
    costs: dict[str, list[float]] = {"static": [], "once": [], "each": [], "retrained": []}
    in_use = dict.fromkeys(costs, "static")
    spent = dict.fromkeys(costs, 0.0)
    rows = []
    for number, name in enumerate(LATER, 1):
        before = tuple(ROUNDS)[:number]
        each = Training(
            name=f"each-{name}",
            rounds=(name,),
            old=before,
            steps=FEW,
            init=in_use["each"],
            settings=(*FAILED, LOWER),
        )
        again = Training(name=f"retrained-{name}", rounds=(*before, name), steps=STEPS + FEW * number)
        spent["each"] += lab.train(each)
        spent["retrained"] += lab.train(again)
        if number == 1:
            spent["once"], in_use["once"] = spent["each"], each.name
        in_use |= {"each": each.name, "retrained": again.name}
        found = {strategy: lab.measure(one, name) for strategy, one in in_use.items()}
        for strategy in costs:
            costs[strategy].append(round(spent[strategy], 1))
        rows.append(
            {
                "round": name,
                "prompts": len(found["static"].prompts),
                "tau": {strategy: round(rates(one)["tau"], 3) for strategy, one in found.items()},
                "accepted": {strategy: round(rates(one)["accepted"], 3) for strategy, one in found.items()},
                "over_static": {
                    strategy: _interval(one, found["static"])
                    for strategy, one in found.items()
                    if strategy != "static"
                },
                "of_retrained": _interval(found["each"], found["retrained"]),
                "on_a0": {s: round(rates(lab.measure(one, "a0"))["tau"], 3) for s, one in in_use.items()},
            }
        )
        say(json.dumps(rows[-1]))
    return {"rounds": rows, "first_training": round(cost["static"], 1), "cpu_seconds": costs}


def _interval(one: Measurement, other: Measurement) -> list[float] | None:
    ratio = rates(one)["tau"] / rates(other)["tau"]
    found = advantage(one, other, "tau")
    return [round(value, 3) for value in (ratio, found.low, found.high)] if found else None


CASES = {
    "all rows": (LOWER,),
    "32 random rows": (LOWER, "stages.*.anchors=32"),
    "failed rows": ("stages.*.anchors=failed", LOWER),
    "failed rows and as many others": (*FAILED, LOWER),
}


def rows_compared(lab: Lab, seeds: int) -> dict[str, Any]:
    """Equal steps of adaptation to the first shift, on all rows or on those that failed."""
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        taus, old, cost = [], [], []
        for seed in range(seeds):
            one = Training(
                name=f"rows-{content_hash(case)[:6]}-{seed}",
                rounds=("b1",),
                old=("a0",),
                steps=FEW,
                init="static",
                settings=settings,
                seed=seed,
            )
            cost.append(round(lab.train(one), 1))
            taus.append(round(rates(lab.measure(one.name, "b1"))["tau"], 3))
            old.append(round(rates(lab.measure(one.name, "a0"))["tau"], 3))
        found[case] = {"tau": taus, "old": old, "cpu_seconds": cost}
        say(f"{case}: {found[case]}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, harvest, train, measure and write the page with its picture and numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="wren")
    parser.add_argument("--runs", type=Path, default=Path("runs/drift"))
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison of rows")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/traffic.md"))
    given = parser.parse_args(arguments)
    workspace = Workspace.of("demo", given.runs)
    torch.set_num_threads(1)
    serve(given.runs / "logs")
    lab = Lab(workspace, given.drafter, *prepare(workspace, given.runs / "logs", given.drafter))
    facts = {"drafter": given.drafter, "steps": [STEPS, FEW], **drift(lab)}
    facts["rows"] = rows_compared(lab, given.seeds)
    facts["phases"] = {name: asdict(one) for name, one in PHASES.items()}
    given.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    for case, one in facts["rows"].items():
        say(f"{case}: mean tau {statistics.fmean(one['tau']):.3f}")


if __name__ == "__main__":
    main()
