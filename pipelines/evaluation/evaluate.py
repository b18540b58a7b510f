"""Evaluates drafters: decodes held-out prompts with and without them, and writes the numbers of every prompt.

For each prompt, plain decoding and all drafters run in alternation in one process, so that a machine whose
speed drifts affects all alike (`side_by_side.py`).
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.pipelines.evaluation import records
from vlmdistill.pipelines.evaluation.records import (
    Evaluation,
    Measurement,
    TargetId,
    TrainedSettings,
    Training,
)
from vlmdistill.pipelines.prompts import importing
from vlmdistill.pipelines.prompts.importing import Prompt
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode, the same for all drafters of one evaluation."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512
    limit: int = 100
    tree: Tree | None = None  # None: each drafter's own
    seed: int = 0
    threads: int = 0  # 0: one or all, whichever is faster for plain decoding
    how: Options = field(default_factory=Options)  # of loading the target

    def check(self) -> None:
        """DataError on an invalid value."""
        if self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if self.max_new_tokens < 1:
            raise DataError(f"--max-new-tokens {self.max_new_tokens}: give a number above 0")
        if odd := [one for one in self.temperatures if not 0 <= one < float("inf")]:
            raise DataError(f"--temperature {odd[0]}: give 0 for greedy decoding, or a number above it")
        if self.threads < 0:
            raise DataError(f"--threads {self.threads}: give a number above 0, or 0 to choose by measuring")


def evaluate(
    workspace: Workspace,
    names: Sequence[str],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    on_prompt: Callable[[int, int, str], None] = lambda done, total, remark: None,
) -> list[Evaluation]:
    """Evaluate drafters by name (folders of the workspace) and write `reports/<name>.json` for each.

    DataError if there are no prompts, TrainingError if a drafter is missing or was trained for another
    target.
    """
    from vlmdistill.pipelines.evaluation.side_by_side import SideBySide
    from vlmdistill.pipelines.targets.checkpoints.loading import load

    settings.check()
    chosen = held_out(prompts_file or workspace.prompts, settings.limit, workspace.model)
    described = {name: _describe(workspace.drafter(name)) for name in names}  # fails before the target loads
    target = load(workspace.model, **settings.how)
    origin = target.provenance((), "float32")
    drafters = {
        name: checkpoint.load(workspace.drafter(name), target.head, target.info, provenance=origin)
        for name in described
    }
    threads = _use_threads(settings.threads, target, target.encode(chosen[0].messages))
    total, done = len(chosen) * len(settings.temperatures), 0
    measured: dict[str, list[Measurement]] = {name: [] for name in described}
    for temperature in settings.temperatures:
        bench = SideBySide(
            target,
            drafters,
            temperature=temperature,
            max_new_tokens=settings.max_new_tokens,
            tree=settings.tree,
            seed=settings.seed,
        )
        for number, prompt in enumerate(chosen):
            bench.decode(number, prompt)
            done += 1
            on_prompt(done, total, f"T={temperature:g}")
        for name in described:
            measured[name].append(bench.measurement(name))
    now, hardware = time.strftime("%Y-%m-%d %H:%M:%S"), _hardware(target)
    made = [
        Evaluation(
            format=records.FORMAT,
            name=name,
            drafter=described[name].drafter,
            tree=str(settings.tree or drafter.tree),
            parameters=sum(weight.numel() for weight in drafter.parameters()),
            training=described[name].training,
            config=described[name].config,
            target=TargetId(name=target.name, family=target.info.family, fingerprint=str(target.fingerprint)),
            hardware=hardware,
            dtype=target.dtype_name,
            threads=threads,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            measured=now,
            temperatures=tuple(measured[name]),
        )
        for name, drafter in drafters.items()
    ]
    for one in made:
        records.write(one, workspace.reports / f"{one.name}.json")
    return made


def kept(workspace: Workspace, names: Sequence[str], settings: Settings) -> list[Evaluation]:
    """The existing evaluations of these drafters; empty unless all can be reused.

    They can if the drafters have not changed since, the settings are the same, and one process measured them
    all: numbers of several processes are less comparable.
    """
    keys = [prompt.key for prompt in held_out(workspace.prompts, settings.limit)]
    found = []
    for name in names:
        try:
            one = records.read(workspace.reports / f"{name}.json")
            now = _describe(workspace.drafter(name))
        except (FileNotFoundError, DataError, TrainingError):
            return []
        if not (
            (one.drafter, one.config, one.training) == (now.drafter, now.config, now.training)
            and one.keys == keys
            and one.tree == str(settings.tree or now.config.tree)
            and (one.max_new_tokens, one.seed) == (settings.max_new_tokens, settings.seed)
            and {at.temperature for at in one.temperatures} >= set(settings.temperatures)
        ):
            return []
        found.append(one)
    return found if len({one.measured for one in found}) == 1 else []


def held_out(file: Path, limit: int, model: str = "M") -> list[Prompt]:
    """The first `limit` prompts of the eval split, by key; DataError if there are none."""
    chosen = sorted(
        (one for one in importing.read(file, model) if one.split == "eval"), key=lambda one: one.key
    )
    if not chosen:
        raise DataError(
            f"{file} has no prompts of the eval split: import some with "
            "`vlmdistill prompts --split eval FILE...`, or with --eval-share above 0"
        )
    return chosen[:limit]


@dataclass(frozen=True)
class _Description:
    """The parts of a drafter's `config.json` that its evaluation repeats."""

    drafter: str
    config: TrainedSettings
    training: Training = field(default_factory=Training)


def _describe(folder: Path) -> _Description:
    """Read a drafter's `config.json`; TrainingError if it is missing or invalid."""
    try:
        return msgspec.convert(checkpoint.describe(folder), _Description)
    except msgspec.ValidationError as error:
        raise TrainingError(f"{folder / 'config.json'} is not a drafter ({error}): train it again") from None


def _use_threads(asked: int, target: "VisionLanguageTarget", prompt: Any) -> int:
    """Set torch's CPU threads to `asked`, or to one or all, whichever decodes this target faster."""
    available = torch.get_num_threads()
    if target.head.embed_VD.device.type != "cpu":
        return available
    candidates = [asked] if asked else sorted({1, available})
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


def _hardware(target: "VisionLanguageTarget") -> str:
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
