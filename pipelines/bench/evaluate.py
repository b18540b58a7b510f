"""Evaluates drafters: decodes held-out prompts with and without them, and writes the numbers of every prompt.

For each prompt, plain decoding and all drafters run in alternation in one process, so that a machine whose
speed drifts affects all alike (`side_by_side.py`).
"""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import polars as pl
import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import describe, weights_hash
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import hardware, tree_search
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.pipelines.bench import deleted, records
from vlmdistill.pipelines.bench.again import Conditions, Repeated, decode_again
from vlmdistill.pipelines.bench.audit import last_baseline
from vlmdistill.pipelines.bench.calibration import calibrate
from vlmdistill.pipelines.bench.leaks import leaks
from vlmdistill.pipelines.bench.records import (
    Evaluation,
    TargetId,
    TrainedSettings,
    Training,
)
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished, measurements
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, Prompts
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.software import (
    PACKAGES,
    Software,
    of_this_process,
    versions,
)
from vlmdistill.pipelines.workspace.workspace import NAME, Workspace
from vlmdistill.stores.errors import DataError, TrainingError, one_line
from vlmdistill.stores.progress import Progress, silent

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


PROMPTS, SEARCH_TOKENS = (
    32,
    128,
)  # of a search for the fastest tree: at most, and in each response


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode, the same for all drafters of one evaluation."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512
    limit: int = 100
    trees: tuple[
        Tree | Literal["auto"], ...
    ] = ()  # none: each drafter's own; several: each in turn
    seed: int = 0
    threads: int = 0  # 0: one or all, whichever is faster for plain decoding
    how: Options = field(default_factory=Options)  # of loading the target
    concurrencies: tuple[int, ...] = (1,)  # requests at a time; a server only

    @property
    def attention(self) -> str:
        """The kernel of the target's prefill."""
        return self.how.get("attention", "sdpa")

    @property
    def thinking(self) -> Thinking:
        """Whether the target reasons before it answers."""
        return self.how.get("thinking", "")

    @property
    def compiled(self) -> bool:
        """Whether the target's decoding steps are compiled."""
        return self.how.get("compiled", False)

    def trained_as(self, described: "Mapping[str, _Description]") -> "Settings":
        """With the reasoning that the drafters were trained with, unless `how` names another.

        DataError when they were not all trained with the same.
        """
        if "thinking" in self.how:
            return self
        modes: dict[str, Thinking] = {
            name: one.provenance.thinking
            for name, one in described.items()
            if one.provenance
        }
        if len({*modes.values()}) > 1:
            trained = ", ".join(
                f"{name}: {mode or 'as the template'}" for name, mode in modes.items()
            )
            raise DataError(
                f"the drafters were trained with different reasoning ({trained}): give --thinking"
            )
        return replace(
            self, how={**self.how, "thinking": next(iter(modes.values()), "")}
        )

    def check(self) -> None:
        """DataError on an invalid value."""
        if self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if self.max_new_tokens < 1:
            raise DataError(
                f"--max-new-tokens {self.max_new_tokens}: give a number above 0"
            )
        if odd := [one for one in self.temperatures if not 0 <= one < float("inf")]:
            raise DataError(
                f"--temperature {odd[0]}: give 0 for greedy decoding, or a number above it"
            )
        if self.threads < 0:
            raise DataError(
                f"--threads {self.threads}: give a number above 0, or 0 to choose by measuring"
            )


def trees_of(shapes: Iterable[str]) -> tuple[Tree | Literal["auto"], ...]:
    """Draft trees by their shapes, such as `chain-5` or `auto`, each once."""
    return tuple(
        "auto" if one == "auto" else Tree.parse(one) for one in dict.fromkeys(shapes)
    )


def oversized_trees(
    workspace: Workspace, names: Sequence[str], settings: Settings
) -> list[str]:
    """A warning for each tree that drafts more tokens in a row than a response can have after its first."""
    room = settings.max_new_tokens - 1
    trees: dict[str, Tree] = {}
    for name in names:
        described = _describe(workspace.drafter(name))
        if catalogue.load(described.drafter).shaped:
            for tree in settings.trees or trees_of([described.config.tree]):
                if isinstance(tree, Tree):
                    trees[str(tree)] = tree
    return [
        f"tree {shape} drafts {tree.depth + 1} tokens in a row, and a response of --max-new-tokens "
        f"{settings.max_new_tokens} has {room} after its first: the rest is drafted in vain"
        for shape, tree in trees.items()
        if tree.depth + 1 > room
    ]


def evaluate(
    workspace: Workspace,
    names: Sequence[str],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    title: str = "",
    on_prompt: Progress = silent,
) -> list[Evaluation]:
    """Evaluate drafters by name (folders of the workspace) and add a record to `reports/` for each.

    With several trees each is a result of its own, `<name>@<tree>`. `title` names the evaluation. An
    interrupted evaluation continues after its last prompt.

    DataError if there are no prompts, TrainingError if a drafter is missing or was trained for another
    target.
    """
    from vlmdistill.pipelines.targets.loading import load

    settings.check()
    check_title(title)
    software = of_this_process()  # before its files can change
    prompts = prompts_file or workspace.prompts
    chosen = held_out(prompts, settings.limit, workspace.model)
    listed = prompt_table.load(prompts, workspace.model, "eval").facts["key"].sort()
    asked = tuple(listed[: settings.limit].to_list())
    described = {
        name: _describe(workspace.drafter(name)) for name in names
    }  # fails before the target loads
    settings = settings.trained_as(described)
    leak_of = leaks(workspace, names, chosen)
    weights_of = {name: weights_hash(workspace.drafter(name)) for name in names}
    target = load(workspace.model, **settings.how)
    machine = hardware.of(target.device)
    drafters = {name: target.drafter(workspace.drafter(name)) for name in described}
    unfinished = Unfinished(
        workspace.reports,
        {
            "drafters": described,
            "weights": weights_of,
            "settings": [
                *map(str, settings.trees),
                settings.max_new_tokens,
                settings.seed,
                settings.threads,
            ],
            "prompts": [prompt.key for prompt in chosen],
            "target": [
                target.name,
                str(target.fingerprint),
                target.dtype_name,
                settings.how,
            ],
            "hardware": machine.name,
            "software": software.installed,
        },
    )
    decoded = unfinished.read()
    threads = settings.threads or next((one.threads for one in decoded.values()), 0)
    threads = _use_threads(threads, target, target.encode(chosen[0].messages))
    decoders: dict[str, tuple[Proposer, Tree]] = {}
    names_of: dict[str, str] = {}
    others = cache(partial(_others, chosen, prompts_file, workspace))
    for name, drafter in drafters.items():
        for tree in _trees(
            workspace.drafter(name), drafter, target, settings, others, on_prompt
        ):
            label = (
                name
                if len(settings.trees) < 2 or not drafter.shaped
                else f"{name}@{tree}"
            )
            decoders[label], names_of[label] = (drafter, tree), name
    decoded = {
        at: one for at, one in decoded.items() if one.results.keys() == decoders.keys()
    }
    keep = partial(deleted.add, workspace, unfinished)
    _decode(target, decoders, chosen, settings, decoded, keep, on_prompt)
    before = [
        one.calibration for one in decoded.values() if one.calibration is not None
    ]
    calibrations = (*before, calibrate(target, target.encode(chosen[0].messages)))
    measured, now = measurements(decoded), time.strftime("%Y-%m-%d %H:%M:%S")
    made = [
        Evaluation(
            format=records.FORMAT,
            name=label,
            drafter=described[names_of[label]].drafter,
            tree=str(tree),
            parameters=sum(weight.numel() for weight in drafter.parameters()),
            training=described[names_of[label]].training,
            config=described[names_of[label]].config,
            target=TargetId(
                name=target.name,
                family=target.info.family,
                fingerprint=str(target.fingerprint),
            ),
            hardware=machine.name,
            dtype=target.dtype_name,
            threads=threads,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            measured=now,
            temperatures=tuple(
                measured[label, temperature] for temperature in settings.temperatures
            ),
            software=software,
            attention=settings.attention,
            compiled=settings.compiled,
            thinking=settings.thinking,
            machine=machine,
            calibrations=calibrations,
            title=title,
            asked=asked,
            leak=leak_of[names_of[label]],
            weights=weights_of[names_of[label]],
        )
        for label, (drafter, tree) in decoders.items()
    ]
    earlier = last_baseline(workspace.reports, made[0])
    made = [replace(one, earlier=earlier) for one in made]
    del target, drafter, drafters, decoders  # another process needs their memory
    folders = {label: workspace.drafter(name) for label, name in names_of.items()}
    made = _decoded_again(made, folders, workspace.model, settings, prompts)
    return deleted.write(workspace, made, unfinished)


def _decoded_again(
    made: Sequence[Evaluation],
    folders: Mapping[str, Path],
    model: str,
    settings: Settings,
    prompts: Path,
) -> list[Evaluation]:
    """With the calls that a process needs which has seen no response, or why there are none."""
    if 0 not in settings.temperatures:
        return [*made]
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    repeated = [Repeated(one.name, folders[one.name], one.tree) for one in made]
    conditions = Conditions(
        model=model,
        how=dict(settings.how),
        prompts_file=prompts,
        keys=made[0].keys,
        max_new_tokens=settings.max_new_tokens,
        threads=made[0].threads,
    )
    try:
        calls = decode_again(repeated, conditions)
    except TrainingError as error:
        return [replace(one, not_again=one_line(error)) for one in made]
    return [replace(one, again=calls.get(one.name, ())) for one in made]


def _decode(
    target: "VisionLanguageTarget",
    decoders: Mapping[str, tuple[Proposer, Tree]],
    chosen: Sequence[Prompt],
    settings: Settings,
    decoded: dict[tuple[float, int], Decoded],
    keep: Callable[[Decoded], None],
    on_prompt: Progress,
) -> None:
    """Decode the prompts that `decoded` lacks with all decoders, and keep each at once."""
    from vlmdistill.pipelines.bench.side_by_side import SideBySide

    total = len(chosen) * len(settings.temperatures)
    began = (
        calibrate(target, target.encode(chosen[0].messages))
        if len(decoded) < total
        else None
    )
    for temperature in settings.temperatures:
        bench = SideBySide(
            target,
            decoders,
            temperature=temperature,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
        )
        for number, prompt in enumerate(chosen):
            if (temperature, number) not in decoded:
                decoded[temperature, number] = replace(
                    bench.decode(number, prompt), calibration=began, of=total
                )
                began = None
                keep(decoded[temperature, number])
            on_prompt(len(decoded), total, f"T={temperature:g}")


def kept(
    workspace: Workspace, names: Sequence[str], settings: Settings
) -> list[Evaluation]:
    """The latest existing evaluations of these drafters; empty unless all can be reused.

    They can if the drafters have not changed since, the settings are the same with at most one tree, on the
    same hardware and software, and one process measured them all: numbers of several processes are less
    comparable.
    """
    if len(settings.trees) > 1:
        return []
    keys = [prompt.key for prompt in held_out(workspace.prompts, settings.limit)]
    machine = hardware.of(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ).name
    dtype, installed = settings.how.get("dtype", "auto"), Software(**versions(PACKAGES))
    try:
        described = {name: _describe(workspace.drafter(name)) for name in names}
        settings = settings.trained_as(described)
    except (DataError, TrainingError):
        return []
    weights_of = {name: weights_hash(workspace.drafter(name)) for name in names}

    def same(one: Evaluation) -> bool:
        now = described.get(one.name)
        return (
            now is not None
            and (one.drafter, one.config, one.training)
            == (now.drafter, now.config, now.training)
            and one.weights in (None, weights_of[one.name])
            and one.keys == keys
            and one.tree
            == (str(settings.trees[0]) if settings.trees else now.config.tree)
            and (one.max_new_tokens, one.seed)
            == (settings.max_new_tokens, settings.seed)
            and one.hardware == machine
            and settings.threads in (0, one.threads)
            and dtype in ("auto", one.dtype)
            and one.software is not None
            and one.software.installed == installed
            and one.attention in (None, settings.attention)
            and one.compiled in (None, settings.compiled)
            and one.thinking == settings.thinking
            and {at.temperature for at in one.temperatures}
            >= set(settings.temperatures)
        )

    runs: dict[
        str, dict[str, Evaluation]
    ] = {}  # by when they were measured, the latest first
    for file in records.files_in(workspace.reports):
        with suppress(DataError):  # what cannot be read is not reused
            if same(one := records.read(file)):
                runs.setdefault(one.measured, {})[one.name] = one
    whole = [
        run
        for _, run in sorted(runs.items(), reverse=True)
        if run.keys() == described.keys()
    ]
    return [whole[0][name] for name in names] if whole else []


def check_title(title: str) -> None:
    """DataError on what cannot name an evaluation."""
    if title and not NAME.fullmatch(title):
        raise DataError(f"--name {title}: use letters, digits, '_', '.' and '-'")


def held_out(file: Path, limit: int, model: str = "M") -> list[Prompt]:
    """The first `limit` prompts of the eval split, by key; DataError if there are none."""
    return _first(prompt_table.load(file, model, "eval"), limit)


def _first(prompts: Prompts, count: int) -> list[Prompt]:
    """The first prompts by key."""
    return [prompts[int(at)] for at in prompts.facts["key"].arg_sort()[:count]]


@dataclass(frozen=True)
class _Trained:
    """What its evaluation reads of the provenance of its features."""

    thinking: Thinking = ""


@dataclass(frozen=True)
class _Description:
    """The parts of a drafter's `config.json` that its evaluation repeats."""

    drafter: str
    config: TrainedSettings
    training: Training = field(default_factory=Training)
    provenance: _Trained | None = None


def _describe(folder: Path) -> _Description:
    """Read a drafter's `config.json`; TrainingError if it is missing or invalid."""
    try:
        return msgspec.convert(describe(folder), _Description)
    except msgspec.ValidationError as error:
        raise TrainingError(
            f"{folder / 'config.json'} is not a drafter ({error}): train it again"
        ) from None


def _others(
    evaluated: Sequence[Prompt], file: Path | None, workspace: Workspace
) -> list[Prompt]:
    """Some prompts that are not evaluated, held-out ones first; DataError if there are none."""
    keys = pl.Series([prompt.key for prompt in evaluated])
    for source in dict.fromkeys((file or workspace.prompts, workspace.prompts)):
        for split in ("eval", "all"):
            with suppress(DataError):  # it has none of this split
                rest = prompt_table.load(source, workspace.model, split).without(keys)
                if len(rest):
                    return _first(rest, PROMPTS)
    raise DataError(
        f"--tree auto needs prompts that are not evaluated, and all {len(evaluated)} are: give a lower "
        "--limit, or import more"
    )


def _trees(
    folder: Path,
    drafter: Proposer,
    target: "VisionLanguageTarget",
    settings: Settings,
    prompts: Callable[[], Sequence[Prompt]],
    on_prompt: Progress,
) -> list[Tree]:
    """The trees to decode with. `auto` is kept with the drafter in `folder`, or searched for on `prompts`."""
    wanted = settings.trees or (drafter.tree,)
    if not drafter.shaped:  # once is enough
        wanted = tuple(tree for tree in wanted[:1] if tree != "auto") or (drafter.tree,)
    auto = "auto" in wanted
    under = tree_search.conditions(target, settings.compiled, settings.temperatures[0])
    best = tree_search.kept(folder, under) if auto else None
    if auto and best is None:
        best = tree_search.search(
            target,
            drafter,
            [target.encode(prompt.messages) for prompt in prompts()],
            max_new_tokens=min(settings.max_new_tokens, SEARCH_TOKENS),
            temperature=settings.temperatures[0],
            seed=settings.seed,
            compiled=settings.compiled,
            on_round=lambda left, of: on_prompt(
                0, 1, f"{folder.name}: {left} trees on {of} prompts"
            ),
        )
        if folder.is_dir():
            tree_search.keep(folder, best)
    trees = (
        Tree.parse(best.tree) if best and tree == "auto" else tree for tree in wanted
    )
    return list(dict.fromkeys(tree for tree in trees if isinstance(tree, Tree)))


def _use_threads(asked: int, target: "VisionLanguageTarget", prompt: Any) -> int:
    """Set torch's CPU threads to `asked`, or to one or all, whichever decodes this target faster."""
    available = torch.get_num_threads()
    if target.head.embed_VD.device.type != "cpu":
        return available

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        list(plain(target, prompt, max_new_tokens=8))
        return min(
            sum(
                cycle.seconds
                for cycle in list(plain(target, prompt, max_new_tokens=24))[1:]
            )
            for _ in range(3)
        )

    best = asked or (min((1, available), key=seconds) if available > 1 else 1)
    torch.set_num_threads(best)
    return best
