"""Measures drafters on longer and longer videos: `docs/measurements/video.md`.

    python -m research.video [--case wren ...] [--once eagle3 ...] [--length 500 ...] [--seeds 2] [--runs DIR]

Held-out clips of the embedded video target, each sampled at higher and higher rates: the content of a clip
does not change with the number of its visual tokens. Drafters are trained alike, on half images and videos
and half text, `--once` with one seed. Tau is counted without decoding (`trial.py`), for all seeds; times are
of decoding with the first seed, all drafters in turn. Finished work is not repeated, and the times of a
length are one measurement of some minutes: `--length` makes them one at a time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from research import say
from research.blocks import CASES
from research.claimed import MIXED, Setting
from research.methods import spread
from research.trial import LONGEST, Run, Trial, cost
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import DraftSession
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.decoding.clock import Timed, timed
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.targets.describe import SampleSize, feature_cost
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.store import Store

DEFAULT = (
    "wren",
    "hivis",
    "dflash-text",
    "dflash-all",
    "dspark-text",
    "dspark-all",
    "eagle3",
)
LENGTHS = (500, 1500, 6000, 12000, 25000)
TREE = "chain-7"
MIB, MB = 2**20, 10**6


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What decoding with one drafter took, in CPU milliseconds; three numbers are the quartiles of cycles."""

    draft: tuple[float, float, float]  # of a cycle
    cycle: tuple[float, float, float]  # drafting and verification
    verify: float  # the median
    step: float  # of plain decoding, the median
    drafter_prefill: float  # the median over clips
    target_prefill: float  # the same
    kept: int  # bytes that the drafter keeps at the end of a clip, the most
    cpu_share: (
        float  # of the elapsed time, in which this program had the CPU; the least
    )
    identical: int  # responses equal to those of plain decoding
    clips: int


@dataclass(frozen=True, kw_only=True)
class Timings:
    """All drafters on the clips of one length."""

    hardware: str
    threads: int
    visual: int  # tokens of a clip
    text: int  # tokens of the prompt and the response, the mean
    of: dict[str, Timing]


class Clocked:
    """A proxy of an object that keeps what its calls take, in CPU milliseconds of this thread.

    A call of `begins` begins a number, and calls of `more` add to the last one, at first to that of the
    prefill. Other programs disturb CPU time far less than elapsed time.
    """

    def __init__(self, inner: Any, spent: list[float], begins: str, *more: str) -> None:
        self._inner, self._spent, self._begins, self._more = inner, spent, begins, more

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (
            partial(self._run, name, found)
            if name in (self._begins, *self._more)
            else found
        )

    def _run(
        self, name: str, call: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        if name == self._begins:
            self._spent.append(0.0)
        start = time.thread_time()
        result = call(*given, **named)
        self._spent[-1] += 1e3 * (time.thread_time() - start)
        return result


class Watched:
    """A proxy of a drafter that clocks its draft session, and keeps it to measure its memory."""

    def __init__(self, inner: Proposer, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent
        self.last: DraftSession | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draft(self, prompt: Any, target: VisionLanguageTarget) -> Clocked:
        """Start a draft session."""
        starting = Clocked(self._inner, self._spent, "", "draft")
        self.last = starting.draft(prompt, target)
        return Clocked(self.last, self._spent, "grow", "commit")


@dataclass(frozen=True)
class Decoded:
    """A decoded response; CPU milliseconds of the prefill, then of each cycle or plain step."""

    response: Timed
    of_target: list[float]
    of_drafter: list[float]
    kept: int = 0  # bytes that the drafter keeps at the end


def setting(case: str) -> Setting:
    """How a case is trained: one of `research.blocks`, or any drafter with its own settings."""
    drafter, settings = CASES.get(case, (case, ()))
    return Setting(drafter, (MIXED, f"tree={TREE}", *settings))


def measure(trial: Trial, cases: Sequence[str], length: int, clips: int) -> Timings:
    """Decode the clips of a length plainly and with each drafter in turn; kept in the workspace."""
    workspace = trial.at(length)
    file = workspace.root / "times.json"
    if file.exists():
        found = msgspec.json.decode(file.read_bytes(), type=Timings)
        if {*cases} <= {*found.of}:
            return found
    target = load(workspace.model)
    drafters = {
        case: target.drafter(workspace.drafter(trial.folders(setting(case))[0]))
        for case in cases
    }
    prompts = [
        target.encode(one.messages)
        for one in evaluate.held_out(workspace.prompts, clips)
    ]
    of_plain, of_case = race(target, drafters, prompts)
    made = Timings(
        hardware=hardware.of(target.device).name,
        threads=torch.get_num_threads(),
        visual=round(
            statistics.fmean(int(prompt.visual_L.sum()) for prompt in prompts)
        ),
        text=round(
            statistics.fmean(
                prompt.length - int(prompt.visual_L.sum()) + len(one.response.ids)
                for prompt, one in zip(prompts, of_plain, strict=True)
            )
        ),
        of={case: timing(of_plain, own) for case, own in of_case.items()},
    )
    with atomic_write(file) as aside:
        aside.write_bytes(msgspec.json.encode(made))
    say(f"decoded {clips} clips of {made.visual:,} visual tokens")
    return made


def race(
    target: VisionLanguageTarget,
    drafters: Mapping[str, Proposer],
    prompts: Sequence[EncodedPrompt],
) -> tuple[list[Decoded], dict[str, list[Decoded]]]:
    """Decode every prompt plainly and with each drafter, in turn."""
    of_plain: list[Decoded] = []
    of_case: dict[str, list[Decoded]] = {case: [] for case in drafters}
    warm = target.encode(
        [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    )
    for drafter in (None, *drafters.values()):  # the first call of each kind allocates
        decode(target, drafter, warm, 8)
    for turn, prompt in enumerate(prompts):
        order = ["", *drafters]
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            of_case.get(name, of_plain).append(
                decode(target, drafters.get(name), prompt, LONGEST)
            )
    return of_plain, of_case


def decode(
    target: VisionLanguageTarget,
    drafter: Proposer | None,
    prompt: EncodedPrompt,
    limit: int,
) -> Decoded:
    """Decode a prompt once, plainly without a drafter."""
    of_target, of_drafter = [0.0], [0.0]
    clocked: Any = Clocked(target, of_target, "extend", "prefill", "logits")
    if drafter is None:
        response = timed(
            lambda: plain(clocked, prompt, max_new_tokens=limit), target.device
        )
        return Decoded(response, of_target, of_drafter)
    watched: Any = Watched(drafter, of_drafter)
    response = timed(
        lambda: speculate(
            clocked, watched, prompt, tree=drafter.tree, max_new_tokens=limit
        ),
        target.device,
    )
    own = {buffer.data_ptr() for buffer in (*drafter.parameters(), *drafter.buffers())}
    return Decoded(response, of_target, of_drafter, _held(watched.last, own))


def timing(of_plain: Sequence[Decoded], own: Sequence[Decoded]) -> Timing:
    """The times of some responses, and of plain decoding of the same prompts."""

    def cycles(times: Iterable[list[float]]) -> list[float]:
        return [spent for one in times for spent in one[1:]]

    draft = cycles(one.of_drafter for one in own)
    verify = cycles(one.of_target for one in own)
    return Timing(
        draft=_quartiles(draft),
        cycle=_quartiles([sum(both) for both in zip(draft, verify, strict=True)]),
        verify=statistics.median(verify),
        step=statistics.median(cycles(one.of_target for one in of_plain)),
        drafter_prefill=statistics.median(one.of_drafter[0] for one in own),
        target_prefill=statistics.median(one.of_target[0] for one in own),
        kept=max(one.kept for one in own),
        cpu_share=min(
            one.response.spent.cpu_seconds / one.response.seconds
            for one in (*of_plain, *own)
        ),
        identical=sum(
            a.response.ids == b.response.ids for a, b in zip(of_plain, own, strict=True)
        ),
        clips=len(own),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _held(thing: Any, shared: set[int]) -> int:
    """Bytes of the tensors that an object refers to, each storage once, without those in `shared`."""
    seen: set[int] = set()
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if id(value) in seen or isinstance(value, torch.nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in shared:
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for one in value.values():
                visit(one)
        elif isinstance(value, list | tuple | set):
            for one in value:
                visit(one)
        elif hasattr(value, "__dict__"):
            visit(vars(value))

    visit(thing)
    return sum(storages.values())


@dataclass(frozen=True)
class Result:
    """A case: its seeds by length, and what a sample of a length stores in bytes."""

    runs: Mapping[int, Sequence[Run]]
    stored: Mapping[int, int]

    def tau(self, length: int) -> list[float]:
        """Of every seed."""
        return [figures(run.measured.measurement).tau for run in self.runs[length]]


def page(
    results: Mapping[str, Result], times: Mapping[int, Timings], steps: int
) -> str:
    """The results as Markdown: a table of each quantity, a row for each case, a column for each length."""
    any_of = next(iter(times.values()))

    def table(title: str, cell: Callable[[str, int], str]) -> str:
        lines = [
            f"| {title} | {' | '.join(f'{one.visual:,}' for one in times.values())} |"
        ]
        lines += ["|---" * (len(times) + 1) + "|"]
        for case in results:
            lines.append(
                f"| `{case}` | {' | '.join(cell(case, length) for length in times)} |"
            )
        return "\n".join(lines)

    def quartiles(values: tuple[float, float, float]) -> str:
        low, middle, high = values
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    def at(case: str, length: int) -> Timing:
        return times[length].of[case]

    def faster(case: str, length: int) -> str:
        one = at(case, length)
        return f"{statistics.fmean(results[case].tau(length)) * one.step / one.cycle[1]:.2f}"

    tables = "\n\n".join(
        [
            table("tau", lambda case, length: spread(results[case].tau(length))),
            table(
                "drafting, CPU ms of a cycle",
                lambda case, length: quartiles(at(case, length).draft),
            ),
            table(
                "cycle, in plain steps",
                lambda case, length: (
                    f"{at(case, length).cycle[1] / at(case, length).step:.2f}"
                ),
            ),
            table("speedup after the prefill", faster),
            table(
                "drafter's prefill, CPU ms",
                lambda case, length: f"{at(case, length).drafter_prefill:.1f}",
            ),
            table(
                "kept while decoding, MiB",
                lambda case, length: f"{at(case, length).kept / MIB:.2f}",
            ),
            table(
                "stored of a sample, MB",
                lambda case, length: f"{results[case].stored[length] / MB:.2f}",
            ),
        ]
    )
    target = [
        "| the target, CPU ms |"
        + "".join(f" {one.visual:,} |" for one in times.values())
    ]
    target += ["|---" * (len(times) + 1) + "|"]
    for title, key in (
        ("prefill", "target_prefill"),
        ("a plain step", "step"),
        ("verification", "verify"),
    ):
        cells = (
            statistics.median(getattr(one, key) for one in at.of.values())
            for at in times.values()
        )
        target.append(f"| {title} | {' | '.join(f'{value:.1f}' for value in cells)} |")
    spent = ", ".join(
        f"`{case}` {cost(next(iter(one.runs.values())))}"
        for case, one in results.items()
    )
    seeds = ", ".join(
        f"`{case}` {len(next(iter(one.runs.values())))}"
        for case, one in results.items()
    )
    timings = [one for at in times.values() for one in at.of.values()]
    machines = ", ".join(dict.fromkeys(one.hardware for one in times.values()))
    clips = ", ".join(str(next(iter(one.of.values())).clips) for one in times.values())
    return f"""# Long videos on the embedded target

`python -m research.video` writes this page; the raw numbers are in [video.json](video.json). Target
`demo-video`: the same held-out clips of eight seconds, sampled at higher and higher rates. Columns are visual
tokens of a clip.

- **Training** is alike: {steps} steps, half of the samples text, half images and videos of 72 visual
  tokens; tree
  `{TREE}`, T=0. `dflash` and `dspark` have two layers and train 32 positions of a sample in a step; `-text`
  reads the target's states at text positions only, `-all` at visual positions too.
- **Seeds**: {seeds}.
- **Tau** is counted on the target's greedy responses to three clips: the mean over seeds, with minimum and
  maximum.
- **Times** are of decoding ({clips} clips of each length) with the first seed, all in turn: CPU time,
  medians over cycles, with quartiles; {any_of.threads} thread, {machines}. This program had the CPU for at
  least
  {min(one.cpu_share for one in timings):.0%} of the time. The speedup after the prefill is tau over the
  cost of a cycle in plain steps.
- **Responses identical to plain decoding**: {sum(one.identical for one in timings)} of
  {sum(one.clips for one in timings)}.
- **CPU seconds of a training**: {spent}.

{tables}

{chr(10).join(target)}

The target has two million parameters and runs on a CPU: its vision tower and prefill take most of the time of
a long video, and its steps read a long KV cache in one thread. Bytes and the trends of tau and drafting carry
over to another target; milliseconds and speedups do not. A drafter's KV cache grows by doubling.

The target gets events, cells and shapes right at every length (its
[model card](../../pipelines/targets/embedded/demo-video/README.md)), so a falling tau is the drafter's.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure what is missing, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of all workspaces"
    )
    parser.add_argument("--case", action="append", help="may be repeated")
    parser.add_argument(
        "--once", action="append", help="a case with one seed, may be repeated"
    )
    parser.add_argument(
        "--length", action="append", type=int, help="visual tokens; may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--clips", type=int, default=1, help="clips that are decoded for times"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument(
        "--train", action="store_true", help="train and count, measure no times"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/video.md"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    cases, once = given.case or DEFAULT, given.once or ()
    settings = {case: setting(case) for case in cases}
    trial = Trial(
        base=Workspace.of("demo-video", given.runs),
        seeds=given.seeds,
        steps=given.steps,
        limit=50,
        jobs=given.jobs,
    )
    trial.prepare([*settings.values()])
    results: dict[str, Result] = {}
    times: dict[int, Timings] = {}
    lengths = given.length or LENGTHS
    of_case = {
        case: replace(trial, seeds=1) if case in once else trial for case in cases
    }
    for case, own in of_case.items():
        own.train([settings[case]])
        for length in lengths:
            own.measure(settings[case], length)
    if given.train:
        return
    for length in lengths:
        times[length] = measure(trial, cases, length, given.clips)
    info = Store.open(str(trial.base.features)).info
    for case, own in of_case.items():
        config = resolve(settings[case].drafter, "paper", settings[case].settings)
        wanted = config.model.needs(info)
        results[case] = Result(
            {length: own.read(settings[case], length) for length in lengths},
            {
                length: feature_cost(
                    wanted,
                    SampleSize(text=at.text, visual=at.visual),
                    info.hidden_size,
                ).bytes
                for length, at in times.items()
            },
        )
    facts = {
        "steps": given.steps,
        "tree": TREE,
        "times": {
            str(length): msgspec.to_builtins(one) for length, one in times.items()
        },
        "tau": {
            case: {str(length): one.tau(length) for length in lengths}
            for case, one in results.items()
        },
        "stored": {
            case: {str(length): one.stored[length] for length in lengths}
            for case, one in results.items()
        },
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    given.out.write_text(page(results, times, given.steps))
    say(f"wrote {given.out} and {given.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
