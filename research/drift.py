"""Traffic that shifts twice, and drafters that follow it or not: `docs/measurements/drift.md`.

    python -m research.drift [--model MODEL] [--drafter wren] [--seeds 3] [--only drift|settings] [--runs DIR]

The target answers requests, whose log is harvested round by round. A drafter is trained on the round before
the first shift. Then it stays as it is, is adapted once, is adapted after each round, or another one is
trained from nothing after the first shift, for a tenth of the steps more. Each drafter meets a round before
it is trained on it, as a served one does. `settings` compares settings of an adaptation: which rows of the
samples it trains, at which rate, in which steps. Tau is counted on held-out requests without decoding
(`research.trial`). What is finished is not repeated, and both models and both parts are on one page.
"""

import argparse
import json
import random
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
from vlmdistill.drafters.training import trainer
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.demo import chats, scenes, wording
from vlmdistill.pipelines.targets.encode import EncodedPrompt, EncodedResponse
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.traffic.harvest import dataset_of, harvest
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

LONGEST, BATCH, HELD_OUT = 160, 32, 0.25
SECONDS_2026 = 1.77e9  # when the first request came
STEPS, FEW = 600, 60  # of the first training, and of an adaptation: a tenth
NOTHING = "retrained from nothing"


@dataclass(frozen=True)
class Setting:
    """How a drafter is adapted, otherwise as it was trained."""

    steps: int
    settings: tuple[str, ...] = ()

    @property
    def options(self) -> str:
        """Those of `vlmdistill adapt`."""
        return " ".join(
            [f"--steps {self.steps}", *(f"--set {one}" for one in self.settings)]
        )


SETTINGS = {
    "all rows": Setting(FEW),
    "all rows, fewer steps": Setting(40),
    "all rows, batches of a half": Setting(80, ("batch_tokens=1024",)),
    "all rows, batches of a quarter": Setting(160, ("batch_tokens=512",)),
    "32 rows of a sample": Setting(FEW, ("stages.*.anchors=32",)),
}
CHOSEN = "all rows, batches of a half"
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
    "b": Phase(
        ("count", "story"), ("tale",), ("maroon",), " Please write as much as you can."
    ),
    "c": Phase(("rows", "sizes"), ("draw", "colour"), ("olive",), " Be precise."),
}
ROUNDS = {
    "a0": 420,
    "b1": 160,
    "b2": 160,
    "c1": 160,
    "c2": 160,
}  # requests; the phase is the first letter
LATER = [*ROUNDS][1:]


def requests(name: str) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """The messages of a round and the picture of each, if it has one."""
    phase, rng = PHASES[name[0]], random.Random(f"drift {name}")
    for _ in range(ROUNDS[name]):
        picture = None
        if rng.random() < 0.8:
            scene = scenes.random_scene(rng, "drafter")
            scene = replace(scene, background=rng.choice(phase.grounds))
            question, picture = (
                wording.ask(scene, rng.choice(phase.tasks), rng)[0],
                scenes.draw(scene),
            )
        else:
            question = chats._KINDS[rng.choice(phase.talks)](rng)[0]
        content: list[dict[str, Any]] = [
            {"type": "text", "text": question + phase.suffix}
        ]
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
            said = target.generate(
                encoded, max_new_tokens=LONGEST, temperature=0.0, top_p=1.0, seed=0
            )
            for at, ((messages, picture), prompt, response) in enumerate(
                zip(some, encoded, said, strict=True)
            ):
                (turn,) = messages
                parts = [part for part in turn["content"] if part["type"] == "text"]
                if picture is not None:
                    picture.save(log.with_name(f"{start + at}.png"))
                    parts.insert(
                        0,
                        {
                            "type": "image_url",
                            "image_url": {"url": f"{start + at}.png"},
                        },
                    )
                when = SECONDS_2026 + 86400 * number + start + at
                asked_parts = [{"role": "user", "content": parts}]
                lines.append(exchange(asked_parts, prompt, response, when))
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        say(f"served {name}: {len(lines)} requests")


def exchange(
    messages: Sequence[Any],
    prompt: EncodedPrompt,
    response: EncodedResponse,
    when: float,
) -> dict[str, Any]:
    """The line of a server's log for a greedy response; `when` in Unix seconds."""
    choice = {
        "message": {"role": "assistant", "content": response.text},
        "finish_reason": response.finish,
        "token_ids": [int(token) for token in response.ids],
    }
    return {
        "time": when,
        "request": {"messages": messages, "temperature": 0},
        "response": {
            "choices": [choice],
            "usage": {"prompt_tokens": prompt.length},
        },
    }


def prepare(
    workspace: Workspace, drafter: str, rounds: Sequence[str]
) -> tuple[Store, Store]:
    """Serve, harvest and capture rounds: the store to train on, and that of the held-out requests."""
    logs = workspace.root / "logs"
    serve(workspace.model, logs, rounds)
    for name in rounds:
        made = harvest(
            workspace,
            [str(logs / name / "log.jsonl")],
            round_name=name,
            eval_share=HELD_OUT,
        )
        say(
            f"harvested {name}: {made.kept} of {made.exchanges}, dropped {made.dropped}"
        )
    stores = []
    for split, folder, dtype in (
        ("train", "features", None),
        ("eval", "held-out", "float32"),
    ):
        job = CaptureJob.of(
            workspace,
            split=split,  # type: ignore[arg-type]
            store=workspace.root / folder,
            settings=CaptureSettings(drafters=[drafter], dtype=dtype),  # type: ignore[arg-type]
            workers=WorkerOptions(workers=1),
        )
        flow.capture_features(job)
        stores.append(job.store.open())
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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a training cost."""

    cpu_seconds: float = 0.0
    guesses: int = 0
    """Rows that it trained, hop by hop; it does not depend on the machine."""

    def __add__(self, other: "Cost") -> "Cost":
        """Both together."""
        return Cost(
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            guesses=self.guesses + other.guesses,
        )


@dataclass(frozen=True)
class Lab:
    """Trains and counts in one workspace, and keeps what it has found there."""

    workspace: Workspace
    drafter: str
    store: Store
    held_out: Store

    def train(self, one: Training) -> Cost:
        """Train it unless that is done; what it cost."""
        file = self._file(one.name)
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Cost)
        guesses = 0

        def note(progress: TrainingProgress) -> None:
            nonlocal guesses
            guesses += int(progress.sums_H3[:, 2].sum())

        start, keys = time.process_time(), self._keys(one)
        filter_store(
            self.store,
            one.name,
            filters=[Filter("other", lambda rows: rows["key"].is_in(keys))],
        )
        init = self.workspace.drafter(one.init).absolute() if one.init else None
        settings = [f"steps={one.steps}", *one.settings]
        plan = train.planned(
            self.workspace, self.drafter, "demo", settings, name=one.name, seed=one.seed
        )
        trainer.train(
            replace(plan, view=one.name, init=init, save_every=10**6), note, force=True
        )
        cost = Cost(cpu_seconds=time.process_time() - start, guesses=guesses)
        file.write_bytes(msgspec.json.encode(cost))
        say(
            f"trained {one.name}: {cost.cpu_seconds:.0f} CPU seconds, {guesses} guesses"
        )
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
        new = [
            key
            for key, where in rows
            if where in {dataset_of(name) for name in one.rounds}
        ]
        old = [
            key
            for key, where in rows
            if where in {dataset_of(name) for name in one.old}
        ]
        return (
            new
            + sorted(old, key=lambda key: content_hash([one.rounds, one.seed, key]))[
                : len(new)
            ]
        )

    def _file(self, name: str) -> Path:
        folder = self.workspace.root / "found"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a strategy served a round with, and what it had cost by then."""

    round: str
    strategy: str
    cost: Cost  # after the first training
    on: Measurement  # the round's held-out requests
    old: Measurement  # those of before the first shift


def static(seed: int) -> Training:
    """The training before the first shift."""
    return Training(name=f"static-{seed}", rounds=("a0",), steps=STEPS, seed=seed)


def adaptation(number: int, how: Setting, init: str, seed: int) -> Training:
    """The adaptation of a drafter to a later round, and to as much of what was before."""
    *before, new = tuple(ROUNDS)[: number + 1]
    return Training(
        name=f"{content_hash(asdict(how))[:6]}-{new}-{seed}",
        rounds=(new,),
        old=tuple(before),
        steps=how.steps,
        init=init,
        settings=how.settings,
        seed=seed,
    )


def retrained(seed: int) -> Training:
    """The training from nothing on what was before the first shift and on the round after it."""
    rounds = tuple(ROUNDS)[:2]
    return Training(
        name=f"retrained-{rounds[-1]}-{seed}",
        rounds=rounds,
        steps=STEPS + FEW,
        seed=seed,
    )


def drift(lab: Lab, seed: int) -> list[Served]:
    """The strategies, round after round: each round is served, then trained on."""
    first = static(seed)
    lab.train(first)
    in_use, spent = (
        dict.fromkeys(STRATEGIES, first.name),
        dict.fromkeys(STRATEGIES, Cost()),
    )
    found = []
    for number, name in enumerate(LATER, 1):
        for strategy, drafter in in_use.items():
            on, old = (lab.measure(drafter, one) for one in (name, "a0"))
            found.append(
                Served(
                    round=name, strategy=strategy, cost=spent[strategy], on=on, old=old
                )
            )
        if name == LATER[-1]:
            break
        adapted = adaptation(number, SETTINGS[CHOSEN], in_use["each"], seed)
        spent["each"] += lab.train(adapted)
        in_use["each"] = adapted.name
        if number == 1:
            again = retrained(seed)
            spent |= {"once": spent["each"], "retrained": lab.train(again)}
            in_use |= {"once": adapted.name, "retrained": again.name}
    return found


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What an adaptation to the first shift came to, by its setting; or what it is compared with."""

    setting: str
    cost: Cost
    new: Measurement  # held-out requests of the next round of the same traffic
    old: Measurement


def compared(lab: Lab, seed: int) -> list[Adapted]:
    """Adaptations to the first shift, after no adaptation and before a training from nothing."""

    def found(setting: str, name: str, cost: Cost) -> Adapted:
        new, old = (lab.measure(name, one) for one in ("b2", "a0"))
        return Adapted(setting=setting, cost=cost, new=new, old=old)

    first, again = static(seed), retrained(seed)
    lab.train(first)
    all_of_them = [found("not adapted", first.name, Cost())]
    for setting, how in SETTINGS.items():
        one = adaptation(1, how, first.name, seed)
        all_of_them.append(found(setting, one.name, lab.train(one)))
    return [*all_of_them, found(NOTHING, again.name, lab.train(again))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, harvest, train and measure; the page has all that was found so far."""
    from research import drift_page as page  # it reads what is measured here

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-small")
    parser.add_argument("--drafter", default="wren")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("drift", "settings"), default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/drift"))
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/drift.md"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    workspace = Workspace.of(given.model, given.runs)
    rounds = ("a0", "b1", "b2") if given.only == "settings" else tuple(ROUNDS)
    lab = Lab(workspace, given.drafter, *prepare(workspace, given.drafter, rounds))
    served, settings = list[list[Served]](), list[list[Adapted]]()
    costs = list[Cost]()
    for seed in range(given.seeds):
        costs.append(lab.train(static(seed)))
        if given.only != "settings":
            served.append(drift(lab, seed))
        if given.only != "drift":
            settings.append(compared(lab, seed))
        page.keep(given.out, given.model, given.drafter, costs, served, settings)


if __name__ == "__main__":
    main()
