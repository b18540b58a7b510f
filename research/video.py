"""Measures drafters on long videos: the same clips, sampled at higher and higher rates.

    python -m research.video [--drafter eagle2 ...] [--length 500 ...] [--clips 3] [--runs DIR] [--out FILE]

The embedded video target describes held-out clips at about the given numbers of visual tokens, with plain
decoding and with each drafter. Missing drafters are trained first, on short videos, images and text. The
content of a clip and the question do not change with the length. So if tau falls with the length while the
target's response stays correct, the drafter is the cause. Decoders alternate; times are medians over clips,
those of drafting and verifying per call of the target; a speedup with the prefill has one prefill for all
decoders of a clip. Memory is what the drafter keeps of the sequence, and
the peak growth of the process during decoding, vision tower included. `--model` takes any other target with
trained drafters.
"""

import argparse
import contextlib
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.demo_target.scoring import score_clip
from research import say
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import DraftSession
from vlmdistill.drafters.decoding.clock import Timed, timed
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.demo import narration
from vlmdistill.pipelines.demo.clips import SECONDS, Clip, frames, patches_for, random_clip
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError

DRAFTERS = ("eagle2", "msd", "vispec", "hivis", "sparrow", "wren")
LENGTHS = (500, 1500, 6000, 17000, 25000)
MIB = 2**20


class Remembering:
    """A proxy of a drafter that keeps its last draft session, to measure its memory."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.last: DraftSession | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draft(self, prompt: Any, target: VisionLanguageTarget) -> DraftSession:
        """Start a draft session."""
        self.last = self._inner.draft(prompt, target)
        return self.last


def prepare(workspace: Workspace, names: Sequence[str], jobs: int) -> None:
    """Make the missing prompts, features and drafters of an embedded target."""
    flow.prepare(workspace, flow.Plan(drafters=names, recipe="demo"), say, flow.silent)
    missing = [train.Job(name, name) for name in names if not workspace.drafter(name).exists()]
    train.several(workspace, missing, jobs, recipe="demo", on_done=lambda job, _: say(f"trained {job.name}"))


def measure(
    workspace: Workspace, names: Sequence[str], lengths: Sequence[int], count: int, limit: int
) -> dict[str, Any]:
    """A row for each length and drafter, and why others are missing."""
    target = load(workspace.model)
    drafters: dict[str, Proposer] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            drafters[name] = target.drafter(workspace.drafter(name))
        except TrainingError as error:
            missing[name] = str(error)
    rng = random.Random("video benchmark")
    asked = [
        (clip, narration.ask(clip, "watch", rng)[0])
        for clip in (random_clip(rng, "evaluation") for _ in range(count))
    ]
    rows: list[dict[str, Any]] = []
    for length in lengths if drafters else ():
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        visual = 0
        for number, (clip, question) in enumerate(asked):
            try:
                prompt = target.encode(message(clip, question, length))
            except DataError as error:
                missing[f"{length} visual tokens"] = str(error)
                break
            visual = int(prompt.visual_L.sum())
            turn = number % (len(drafters) + 1)
            order: list[str] = ["", *drafters]  # "": plain
            order = order[turn:] + order[:turn]
            if not rows and not number:
                for name in order:  # a warm-up: the first call of each kind allocates
                    run(target, drafters.get(name), prompt, 8)
            runs_of = {name: run(target, drafters.get(name), prompt, limit) for name in order}
            prefill = statistics.median(one.prefill for one in runs_of.values())
            text = target.tokenizer.decode(runs_of[""].response.ids, skip_special_tokens=True)
            facts = score_clip(text, clip, "watch").values()
            correct, total = (sum(side) for side in zip(*facts, strict=True))
            for name in drafters:
                found[name].append(_facts(runs_of[""], runs_of[name], prefill) | {"facts": correct / total})
        rows += [{"visual tokens": visual, "drafter": name, **_middle(found[name])} for name in found]
        say(f"decoded {count} clips of {visual} visual tokens")
    return {
        "model": workspace.model,
        "clips": count,
        "trees": {name: str(drafter.tree) for name, drafter in drafters.items()},
        "threads": torch.get_num_threads(),
        "missing": missing,
        "rows": rows,
    }


def message(clip: Clip, question: str, length: int) -> list[dict[str, Any]]:
    """A question about a clip with about `length` visual tokens."""
    count = 2 * patches_for(length)
    frames_FHWC = np.stack([np.asarray(image) for image in frames(clip, count)])
    video = {"type": "video", "video": frames_FHWC, "fps": count / SECONDS}
    return [{"role": "user", "content": [video, {"type": "text", "text": question}]}]


@dataclass(frozen=True)
class Decoded:
    """One decoded prompt."""

    response: Timed
    kept: int  # bytes that the drafter keeps at the end
    peak: int  # bytes, the peak growth of the process

    @property
    def prefill(self) -> float:
        """Seconds of the target's prefill, vision tower included."""
        return self.response.phases["vision"] + self.response.phases["prefill"]


def run(target: VisionLanguageTarget, drafter: Proposer | None, prompt: EncodedPrompt, limit: int) -> Decoded:
    """Decode a prompt once; plain decoding without a drafter."""
    before = _forget_peak()
    if drafter is None:
        response = timed(lambda: plain(target, prompt, max_new_tokens=limit), target.device)
        return Decoded(response, 0, max(_peak() - before, 0))
    watched: Any = Remembering(drafter)
    tree = drafter.tree
    response = timed(
        lambda: speculate(target, watched, prompt, tree=tree, max_new_tokens=limit), target.device
    )
    kept = _held(watched.last, {buffer.data_ptr() for buffer in (*drafter.parameters(), *drafter.buffers())})
    return Decoded(response, kept, max(_peak() - before, 0))


def _facts(base: Decoded, own: Decoded, prefill: float) -> dict[str, float]:
    """The metrics of a run, relative to plain decoding of the same prompt.

    The target's prefill is the same work for all and takes most of the time, so `prefill`, the median over
    all runs of the prompt, stands for each: else its noise would decide.
    """
    spent = own.response.phases
    tokens, base_tokens = len(own.response.ids), len(base.response.ids)
    calls = max(len(own.response.cycles) - 1, 1)
    seconds, base_seconds = (prefill + one.response.seconds - one.prefill for one in (own, base))
    return {
        "tau": (tokens - 1) / calls,
        "draft ms": 1e3 * spent["draft"] / calls,
        "verify ms": 1e3 * spent["verify"] / calls,
        "drafter prefill ms": 1e3 * spent["draft_prefill"],
        "target prefill ms": 1e3 * prefill,
        "drafter MiB": own.kept / MIB,
        "peak MiB": own.peak / MIB,
        "speedup": _pace(base_seconds, base_tokens) / _pace(seconds, tokens),
        "decode speedup": _pace(base.response.decode_seconds, base_tokens - 1)
        / _pace(own.response.decode_seconds, tokens - 1),
        "accounted": min(base.response.accounted, own.response.accounted),
        "as plain": float(base.response.ids == own.response.ids),
    }


def _middle(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over clips; for shares and `tau` the mean."""
    means = ("tau", "as plain", "facts", "accounted")
    return {
        name: (statistics.fmean if name in means else statistics.median)(one[name] for one in found)
        for name in found[0]
    }


def _pace(seconds: float, tokens: int) -> float:
    """Seconds per token, never 0."""
    return max(seconds, 1e-9) / max(tokens, 1)


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


def _forget_peak() -> int:
    """Reset the process's peak memory, if the system allows it; returns its current bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    """A memory figure of this process in bytes, 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def page(result: Mapping[str, Any]) -> str:
    """The rows as Markdown: a table of each metric by length."""
    rows = result["rows"]
    lengths = list(dict.fromkeys(row["visual tokens"] for row in rows))
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    at = {(row["drafter"], row["visual tokens"]): row for row in rows}

    def table(title: str, lines: Mapping[str, Sequence[float]], digits: int) -> str:
        cells = [[title, *(f"{length:,}" for length in lengths)], ["---"] * (len(lengths) + 1)]
        cells += [[name, *(f"{value:.{digits}f}" for value in values)] for name, values in lines.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def of_drafters(title: str, key: str, digits: int) -> str:
        return table(title, {f"`{name}`": [at[name, n][key] for n in lengths] for name in names}, digits)

    def of_target(key: str) -> list[float]:
        return [statistics.median(at[name, length][key] for name in names) for length in lengths]

    tables = [
        of_drafters("tau", "tau", 2),
        of_drafters("drafting, ms per cycle", "draft ms", 2),
        of_drafters("drafter's prefill, ms", "drafter prefill ms", 1),
        of_drafters("kept by the drafter, MiB", "drafter MiB", 2),
        of_drafters("speedup after the prefill", "decode speedup", 2),
        of_drafters("speedup, with one prefill for all", "speedup", 2),
        table("the target", {"correct facts": of_target("facts")}, 2),
        table(
            "the target",
            {
                "prefill, ms": of_target("target prefill ms"),
                "verification, ms": of_target("verify ms"),
                "peak growth of the process, MiB": of_target("peak MiB"),
            },
            1,
        ),
    ]
    text = "\n\n".join(tables)
    trees = ", ".join(sorted({f"`{tree}`" for tree in result["trees"].values()}))
    how = f"T=0, tree {trees}, {result['threads']} thread(s)"
    same = sum(round(row["as plain"] * result["clips"]) for row in rows)
    total = len(rows) * result["clips"]
    least = min(row["accounted"] for row in rows)
    return f"""# Long videos on the embedded target

`python -m research.video` writes this page; the raw numbers are in [video.json](video.json).
Target `{result["model"]}`, {result["clips"]} held-out clips of eight seconds, described at {how}.
Columns are visual tokens: the same clips, sampled at higher and higher rates. The drafters were trained on
images and on videos of 72 visual tokens, never on longer ones.
Responses identical to plain decoding: {same} of {total}. Times are from a clock outside the decoders; the
decoders' cycles account for at least {least:.2%} of them.

{text}

The times are from a CPU and a target of two million parameters. On a long video, its vision tower and prefill
take most of the time. Only the memory figures carry over to another target; for tau, at most the trend with
the length does (one training each, three clips, no interval). A drafter's KV cache grows by doubling. The
process grows only beyond its earlier peak. The share of correct facts hardly falls with the length (the
[model card](../pipelines/targets/embedded/demo-video/README.md) lists the errors), so a falling tau is due to
the drafter.
"""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-video")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all workspaces")
    parser.add_argument("--drafter", action="append", help="may be repeated")
    parser.add_argument("--length", action="append", type=int, help="visual tokens; may be repeated")
    parser.add_argument("--clips", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="drafters trained in parallel")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/video.md"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    names, lengths = given.drafter or DRAFTERS, given.length or LENGTHS
    workspace = Workspace.of(given.model, given.runs)
    if given.model in EMBEDDED:
        prepare(workspace, names, given.jobs)
    result = measure(workspace, names, lengths, given.clips, given.max_new_tokens)
    for name, why in result["missing"].items():
        say(f"{name} is left out: {why}")
    if not result["rows"]:
        raise SystemExit("nothing was measured")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    given.out.write_text(page(result))
    say(f"wrote {given.out} and {given.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
