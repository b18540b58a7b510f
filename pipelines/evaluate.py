"""Evaluation: decode held-out prompts plainly and with each drafter, prove losslessness, measure.

Per prompt, plain decoding and every drafter run one after the other in one process, in an order that
rotates from prompt to prompt, so that a machine whose speed drifts is fair to all. Metrics:

- `tau`: tokens gained per verification call of the target, bonus counted, pooled (MSD, Sparrow);
- `accepted`: drafted tokens accepted per call, the bonus not counted, pooled (ViSpec's printed tau);
- `alpha[n]`: share of cycles whose chain of best guesses had its n-th token accepted, of those whose
  earlier tokens were;
- `speedup`: plain seconds per token over speculative seconds per token, vision and prefill included;
- `decode_speedup`: the same without the prefill; `prefill_share`: of the speculative time.

The first token comes from the prefill; it belongs to no call and is left out of `tau` and `accepted`.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters import checkpoint
from vlmdistill.drafters.base import Proposer, Tree
from vlmdistill.drafters.decoding.generate import Cycle, plain, speculate
from vlmdistill.pipelines import prompts
from vlmdistill.pipelines.answer import pieces
from vlmdistill.pipelines.evaluations import FORMAT
from vlmdistill.pipelines.prompts import Prompt
from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.pipelines.workspace import Workspace, written_aside
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash

SHOWN = 6  # prompts whose answers are kept for the report
NEAR_TIE = 16  # in units of the dtype's rounding at the size of the best logit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode: the same for all drafters of one evaluation."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512
    limit: int = 100
    tree: Tree | None = None  # each drafter's own when None
    seed: int = 0
    threads: int = 0  # 0: whichever of one and all is faster for plain decoding
    how: Options = field(default_factory=Options)  # how the target is loaded

    def check(self) -> None:
        """DataError on a value that makes no sense."""
        if self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if self.max_new_tokens < 1:
            raise DataError(f"--max-new-tokens {self.max_new_tokens}: give a number above 0")
        if odd := [one for one in self.temperatures if not 0 <= one < float("inf")]:
            raise DataError(f"--temperature {odd[0]}: give 0 for greedy decoding, or a number above it")
        if self.threads < 0:
            raise DataError(f"--threads {self.threads}: give a number above 0, or 0 to let it be measured")


def evaluate(
    workspace: Workspace,
    names: Sequence[str],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    on_prompt: Callable[[int, int, str], None] = lambda done, total, remark: None,
) -> list[dict[str, Any]]:
    """Measure drafters by name (folders of the workspace) and write `reports/<name>.json` of each.

    DataError when there is nothing to decode, TrainingError when a drafter is missing or of another target.
    """
    settings.check()
    chosen = held_out(prompts_file or workspace.prompts, settings.limit)
    for name in names:
        checkpoint.describe(workspace.drafter(name))  # a missing one is told before the target is loaded
    target = load(workspace.model, **settings.how)
    origin = target.provenance((), "float32")
    drafters = {
        name: checkpoint.load(workspace.drafter(name), target.head, target.info, provenance=origin)
        for name in names
    }
    threads = _use_threads(settings.threads, target, target.encode(chosen[0].messages))
    total, done = len(chosen) * len(settings.temperatures), 0
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for temperature in settings.temperatures:
        bench = _Bench(target, drafters, settings, temperature)
        for number, prompt in enumerate(chosen):
            bench.decode(number, prompt, target.encode(prompt.messages))  # one at a time: videos are large
            done += 1
            on_prompt(done, total, f"T={temperature:g}")
        for name in names:
            results[name].append(bench.summary(name))
    facts = {
        "format": FORMAT,
        "target": {**target.info.to_dict(), "fingerprint": str(target.fingerprint)},
        "hardware": _hardware(target),
        "dtype": target.dtype_name,
        "threads": threads,
        "prompts": {"count": len(chosen), "hash": content_hash([prompt.key for prompt in chosen])},
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "measured": time.strftime("%Y-%m-%d %H:%M"),
    }
    reports = []
    for name, drafter in drafters.items():
        description = checkpoint.describe(workspace.drafter(name))
        report = {
            **facts,
            "name": name,
            "drafter": description["drafter"],
            "tree": str(settings.tree or drafter.config.tree),
            "parameters": sum(weight.numel() for weight in drafter.parameters()),
            "training": description["training"],
            "config": description["config"],
            "temperatures": results[name],
        }
        with written_aside(workspace.reports / f"{name}.json") as aside:
            aside.write_text(json.dumps(report, indent=1))
        reports.append(report)
    return reports


def held_out(file: Path, limit: int) -> list[Prompt]:
    """The first `limit` prompts of the eval split, by key; DataError when there are none."""
    chosen = sorted((one for one in prompts.read(file) if one.split == "eval"), key=lambda one: one.key)
    if not chosen:
        raise DataError(
            f"{file} holds no prompts of the eval split: import some with "
            "`vlmdistill prompts --split eval FILE...`, or with --eval-share above 0"
        )
    return chosen[:limit]


@dataclass
class _Answer:
    """One decoded prompt."""

    cycles: list[Cycle]

    @property
    def ids(self) -> list[int]:
        return [token for cycle in self.cycles for token in cycle.ids]

    @property
    def seconds(self) -> float:
        return sum(cycle.seconds for cycle in self.cycles)


class _Bench:
    """All decoders on all prompts at one temperature."""

    def __init__(
        self,
        target: VisionLanguageTarget,
        drafters: dict[str, Proposer],
        settings: Settings,
        temperature: float,
    ) -> None:
        self.target, self.drafters, self.settings = target, drafters, settings
        self.temperature = temperature
        self.answers: dict[str, list[_Answer]] = {name: [] for name in ("", *drafters)}  # "": plain
        self.verdicts: dict[str, list[str]] = {name: [] for name in ("", *drafters)}
        self.shown: dict[str, list[dict[str, Any]]] = {name: [] for name in drafters}

    def decode(self, number: int, prompt: Prompt, encoded: Any) -> None:
        """One prompt through every decoder, in an order that rotates with `number`."""
        names = list(self.answers)
        turn = number % len(names)
        fresh: dict[str, _Answer] = {}
        for name in [*names[turn:], *names[:turn]]:
            if number == 0:
                for _ in self._run(name, encoded, number):  # the first run pays for lazy set-up
                    pass
            fresh[name] = _Answer(list(self._run(name, encoded, number)))
            self.answers[name].append(fresh[name])
        if self.temperature == 0:
            reference = self.target.reference(encoded, max_new_tokens=self.settings.max_new_tokens)
            if reference is not None:
                for name in names:
                    self.verdicts[name].append(self._compare(encoded, list(reference.ids), fresh[name].ids))
        if number < SHOWN:
            for name in self.drafters:
                self.shown[name].append(self._show(prompt, fresh[name]))

    def _run(self, name: str, encoded: Any, number: int) -> Iterator[Cycle]:
        seed = self.settings.seed * 1_000_003 + number
        generator = torch.Generator(self.target.head.embed_VD.device).manual_seed(seed)
        limit, temperature = self.settings.max_new_tokens, self.temperature
        if not name:
            return plain(
                self.target,
                encoded,
                max_new_tokens=limit,
                temperature=temperature,
                generator=generator,
            )
        drafter = self.drafters[name]
        return speculate(
            self.target,
            drafter,
            encoded,
            tree=self.settings.tree or drafter.config.tree,
            max_new_tokens=limit,
            temperature=temperature,
            generator=generator,
        )

    def _compare(self, encoded: Any, reference: list[int], got: list[int]) -> str:
        """`identical`, `near_tie` (at the first divergence the two logits round alike) or `different`."""
        if got == reference:
            return "identical"
        pairs = zip(reference, got, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(got)))
        if first >= min(len(reference), len(got)):
            return "different"
        with torch.inference_mode():
            prefix = self.target.prefill(encoded, ())
            hidden_1D = prefix.feature("hidden", "text")[-1:]
            device = hidden_1D.device
            one = torch.ones(1, dtype=torch.long, device=device)
            for token in reference[:first]:
                hidden_1D = self.target.extend(one * token, one, None, ("hidden",))["hidden"]
                self.target.commit(one - 1)
            logits_V = self.target.logits(hidden_1D)[0]
        rounding = torch.finfo(hidden_1D.dtype).eps * float(logits_V.abs().max())
        gap = abs(float(logits_V[reference[first]] - logits_V[got[first]]))
        return "near_tie" if gap <= NEAR_TIE * rounding else "different"

    def _show(self, prompt: Prompt, answer: _Answer) -> dict[str, Any]:
        """An answer in pieces, each drafted and accepted or said by the target itself."""
        shown: list[dict[str, Any]] = []
        for piece in pieces(answer.cycles, self.target.tokenizer):
            if shown and shown[-1]["drafted"] and piece.drafted:
                shown[-1]["text"] += piece.text
            else:
                shown.append({"text": piece.text, "drafted": piece.drafted})
        asked = "\n".join(
            part["text"]
            for message in prompt.messages
            if message["role"] == "user"
            for part in message["content"]
            if part["type"] == "text"
        )
        return {
            "key": prompt.key,
            "prompt": asked,
            "files": prompt.files,
            "pieces": shown,
            "tau": _ratio(sum(len(cycle.ids) for cycle in answer.cycles[1:]), len(answer.cycles) - 1),
        }

    def summary(self, name: str) -> dict[str, Any]:
        """All metrics of one drafter at this temperature."""
        base, own = self.answers[""], self.answers[name]
        tokens, base_tokens = (sum(len(one.ids) for one in side) for side in (own, base))
        cycles = [cycle for answer in own for cycle in answer.cycles[1:]]
        seconds, base_seconds = (sum(one.seconds for one in side) for side in (own, base))
        first, base_first = (sum(one.cycles[0].seconds for one in side) for side in (own, base))
        gained, base_gained = tokens - len(own), base_tokens - len(base)
        longest = max((cycle.chain[1] for cycle in cycles), default=0)
        alpha = []
        for place in range(1, longest + 1):
            tried = [c.chain[0] >= place for c in cycles if c.chain[0] >= place - 1 and c.chain[1] >= place]
            alpha.append(_ratio(sum(tried), len(tried)))
        verdicts, base_verdicts = self.verdicts[name], self.verdicts[""]
        return {
            "temperature": self.temperature,
            "tau": _ratio(gained, len(cycles)),
            "accepted": _ratio(sum(cycle.accepted for cycle in cycles), len(cycles)),
            "alpha": alpha,
            "speedup": _ratio(base_seconds / max(1, base_tokens), seconds / max(1, tokens)),
            "decode_speedup": _ratio(
                (base_seconds - base_first) / max(1, base_gained), (seconds - first) / max(1, gained)
            ),
            "prefill_share": _ratio(first, seconds),
            "tokens": tokens,
            "plain_tokens": base_tokens,
            "calls": len(cycles),
            "seconds": seconds,
            "plain_seconds": base_seconds,
            "tokens_per_second": _ratio(tokens, seconds),
            "plain_tokens_per_second": _ratio(base_tokens, base_seconds),
            "lossless": {kind: verdicts.count(kind) for kind in ("identical", "near_tie", "different")},
            "plain_lossless": {
                kind: base_verdicts.count(kind) for kind in ("identical", "near_tie", "different")
            },
            "samples": self.shown[name],
        }


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _use_threads(asked: int, target: VisionLanguageTarget, prompt: Any) -> int:
    """Set torch's CPU threads: as asked, or the faster of one and all for plain decoding of this target."""
    everything = torch.get_num_threads()
    if target.head.embed_VD.device.type != "cpu":
        return everything
    candidates = [asked] if asked else sorted({1, everything})
    timed = []
    for threads in candidates:
        torch.set_num_threads(threads)
        list(plain(target, prompt, max_new_tokens=8))
        runs = [
            sum(cycle.seconds for cycle in list(plain(target, prompt, max_new_tokens=24))[1:])
            for _ in range(3)
        ]
        timed.append((min(runs), threads))
    best = min(timed)[1]
    torch.set_num_threads(best)
    return best


def _hardware(target: VisionLanguageTarget) -> str:
    device = target.head.embed_VD.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else ""
    return f"CPU {model or platform.machine()}"
