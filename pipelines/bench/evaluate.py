"""Evaluates drafters: decodes held-out prompts with and without them, and writes the numbers of every prompt.

For each prompt, plain decoding and all drafters run in alternation in one process, so that a machine whose
speed drifts affects all alike (`side_by_side.py`).
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vlmdistill.drafters.checkpoints.description import weights_hash
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.decoding.hardware import Hardware
from vlmdistill.pipelines.bench import deleted, records
from vlmdistill.pipelines.bench.again import (
    Conditions,
    Repeated,
    decode_again,
    repeated_prompts,
)
from vlmdistill.pipelines.bench.audit import first_baseline
from vlmdistill.pipelines.bench.calibration import calibrate
from vlmdistill.pipelines.bench.plan import (
    Description,
    EvaluationPlan,
    held_out,
    oversized_trees,
    require_same_weights,
    settings_hash,
    trained_thinking,
)
from vlmdistill.pipelines.bench.records import (
    Calibration,
    Evaluation,
    Measurement,
    TargetId,
)
from vlmdistill.pipelines.bench.settings import Settings, check_title, trees_of
from vlmdistill.pipelines.bench.tuning import choose_trees, use_threads
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished, measurements
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.software import PACKAGES, Software, versions
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import (
    DataError,
    TargetError,
    TrainingError,
    one_line,
)
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import agree

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

__all__ = [
    "Settings",
    "check_title",
    "evaluate",
    "held_out",
    "kept",
    "oversized_trees",
    "trees_of",
]


def evaluate(
    workspace: Workspace,
    drafters: Sequence[Trained],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    title: str = "",
    on_prompt: Progress = silent,
) -> list[Evaluation]:
    """Evaluate drafters and add a record to `reports/` for each.

    With several trees, a drafter has a record for each tree, `<name>@<tree>`. `title` names the evaluation.
    An interrupted evaluation continues after its last prompt.

    DataError if there are no prompts, TrainingError if a drafter is missing or was trained for another
    target.
    """
    settings.check()
    check_title(title)
    plan = EvaluationPlan.of(workspace, drafters, settings, prompts_file, title)
    run = _EvaluationRun.start(plan, on_prompt)
    run.decode_missing(on_prompt)
    evaluations = run.records()
    unfinished = run.unfinished
    del run  # another process needs the memory of the target and the drafters
    evaluations = _decoded_again(plan, evaluations)
    return deleted.write_undeleted(workspace, evaluations, unfinished)


@dataclass(frozen=True)
class _Decoder:
    """A drafter with one of its trees."""

    label: str  # of the record
    trained: Trained
    drafter: Proposer
    tree: Tree


@dataclass
class _EvaluationRun:
    """The process that decodes a plan: the target, the decoders, and what was decoded so far."""

    plan: EvaluationPlan
    target: "VisionLanguageTarget"
    machine: Hardware
    threads: int
    decoders: Sequence[_Decoder]
    unfinished: Unfinished
    decoded: dict[tuple[float, int], Decoded]  # by `Decoded.place`

    @classmethod
    def start(cls, plan: EvaluationPlan, on_prompt: Progress) -> "_EvaluationRun":
        """Load target and drafters, and read what an interrupted evaluation has decoded."""
        from vlmdistill.pipelines.targets.loading import load

        target = load(plan.workspace.model, **plan.settings.how)
        loaded = [target.drafter(trained.folder) for trained in plan.drafters]
        require_same_weights(plan.drafters)
        machine = hardware.of(target.device)
        unfinished = Unfinished(
            plan.workspace.reports, _conditions(plan, target, machine)
        )
        decoded = unfinished.read()
        threads_before = 0
        if decoded:
            threads_before = next(iter(decoded.values())).threads
        with _naming(plan.prompts[0]):
            first = target.encode(plan.prompts[0].messages)
        threads = use_threads(plan.settings.threads or threads_before, target, first)
        decoders: list[_Decoder] = []
        for trained, drafter in zip(plan.drafters, loaded, strict=True):
            decoders += _decoders(plan, trained, drafter, target, on_prompt)
        trees = {decoder.label: str(decoder.tree) for decoder in decoders}
        # The search of `--tree auto` may have chosen other trees then.
        by_same_decoders = {
            place: prompt for place, prompt in decoded.items() if prompt.trees == trees
        }
        return cls(
            plan, target, machine, threads, decoders, unfinished, by_same_decoders
        )

    def decode_missing(self, on_prompt: Progress) -> None:
        """Decode each prompt that was not decoded yet with all decoders, and keep it once it is done."""
        from vlmdistill.pipelines.bench.side_by_side import SideBySide

        plan = self.plan
        settings = plan.settings
        total = len(plan.prompts) * len(settings.temperatures)
        missing = len(self.decoded) < total
        calibration = self._calibrate() if missing else None
        decoder_by_label = {
            decoder.label: (decoder.drafter, decoder.tree) for decoder in self.decoders
        }
        for temperature in settings.temperatures:
            bench = SideBySide(
                self.target,
                decoder_by_label,
                temperature=temperature,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
            )
            for number, prompt in enumerate(plan.prompts):
                if (temperature, number) not in self.decoded:
                    with _naming(prompt):
                        decoded = bench.decode(number, prompt)
                    self._keep(replace(decoded, calibration=calibration, of=total))
                    calibration = None  # it belongs to the first prompt of a process
                on_prompt(len(self.decoded), total, f"T={temperature:g}")

    def _keep(self, decoded: Decoded) -> None:
        self.decoded[decoded.place] = decoded
        deleted.add_unless_deleted(self.plan.workspace, self.unfinished, decoded)

    def _calibrate(self) -> Calibration:
        first = self.plan.prompts[0]
        return calibrate(self.target, self.target.encode(first.messages))

    def records(self) -> list[Evaluation]:
        """A record for each decoder, with the baseline of the first evaluation under the same conditions."""
        calibrations = [
            prompt.calibration for prompt in self.decoded.values() if prompt.calibration
        ]
        calibrations.append(self._calibrate())
        measured = records.now()
        measurement_of = measurements(self.decoded)
        evaluations = []
        for decoder in self.decoders:
            temperatures = [
                measurement_of[decoder.label, temperature]
                for temperature in self.plan.settings.temperatures
            ]
            record = self._record(decoder, measured, calibrations, temperatures)
            evaluations.append(record)
        earlier = first_baseline(self.plan.workspace.reports, evaluations[0])
        return [replace(evaluation, earlier=earlier) for evaluation in evaluations]

    def _record(
        self,
        decoder: _Decoder,
        measured: str,
        calibrations: Sequence[Calibration],
        temperatures: Sequence[Measurement],
    ) -> Evaluation:
        plan, target, settings = self.plan, self.target, self.plan.settings
        description = plan.described[decoder.trained.name]
        return Evaluation(
            format=records.FORMAT,
            name=decoder.label,
            drafter=description.drafter,
            tree=str(decoder.tree),
            parameters=sum(weight.numel() for weight in decoder.drafter.parameters()),
            training=description.training,
            config=description.config,
            weights=plan.weights_of[decoder.trained.name],
            leak=plan.leak_of[decoder.trained.name],
            target=TargetId(
                name=target.name,
                family=target.info.family,
                fingerprint=str(target.fingerprint),
            ),
            hardware=self.machine.name,
            machine=self.machine,
            software=plan.software,
            dtype=target.dtype_name,
            threads=self.threads,
            attention=settings.attention,
            compiled=settings.compiled,
            thinking=settings.thinking,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            measured=measured,
            asked=plan.asked,
            settings=settings_hash(decoder.trained),
            calibrations=tuple(calibrations),
            temperatures=tuple(temperatures),
            title=plan.title,
        )


@contextmanager
def _naming(prompt: Prompt) -> Iterator[None]:
    """Name the prompt in an error about it, such as that it is too long."""
    try:
        yield
    except (DataError, TargetError) as error:
        where = f"row {prompt.row} of {prompt.source}: leave it out, or give other --prompts"
        error.args = (f"{error} ({where})", *error.args[1:])
        raise


def _conditions(
    plan: EvaluationPlan, target: "VisionLanguageTarget", machine: Hardware
) -> dict[str, object]:
    """The facts that identify an evaluation: one that was interrupted is continued if all are unchanged."""
    settings = plan.settings
    numbers = [settings.max_new_tokens, settings.seed, settings.threads]
    fingerprint = str(target.fingerprint)
    return {
        "drafters": plan.described,
        "weights": plan.weights_of,
        "settings": [*map(str, settings.trees), *numbers],
        "prompts": [prompt.key for prompt in plan.prompts],
        "target": [target.name, fingerprint, target.dtype_name, settings.how],
        "eos": sorted(target.info.eos_ids),
        "hardware": machine.name,
        # Of a changed repository, prompts of both would be one evaluation.
        "software": [plan.software.installed, plan.software.commit],
    }


def _decoders(
    plan: EvaluationPlan,
    trained: Trained,
    drafter: Proposer,
    target: "VisionLanguageTarget",
    on_prompt: Progress,
) -> list[_Decoder]:
    """A drafter with each of its trees; the label names the tree if several were asked for."""
    trees = choose_trees(
        trained,
        drafter,
        target,
        plan.settings,
        lambda: plan.search_prompts,
        on_prompt,
    )
    name_tree = len(plan.settings.trees) > 1 and drafter.shaped
    decoders = []
    for tree in trees:
        label = f"{trained.name}@{tree}" if name_tree else trained.name
        decoders.append(_Decoder(label, trained, drafter, tree))
    return decoders


def _decoded_again(
    plan: EvaluationPlan, evaluations: Sequence[Evaluation]
) -> list[Evaluation]:
    """The evaluations with how many calls a new process needs for the same prompts, or why that is not known.

    It has seen no response, so that none of its drafts can be copied from one.
    """
    settings = plan.settings
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    folder_of = {trained.name: trained.folder for trained in plan.drafters}
    repeated = []
    for evaluation in evaluations:
        folder = folder_of[evaluation.name.partition("@")[0]]
        repeated.append(Repeated(evaluation.name, folder, evaluation.tree))
    first = evaluations[0]
    conditions = Conditions(
        model=plan.workspace.model,
        how=dict(settings.how),
        prompts_file=plan.prompts_file,
        max_new_tokens=settings.max_new_tokens,
        threads=first.threads,
    )
    try:
        calls = decode_again(repeated, [*repeated_prompts(first)], conditions)
    except TrainingError as error:
        reason = one_line(error)
        return [replace(evaluation, not_again=reason) for evaluation in evaluations]
    repeated_evaluations = []
    for evaluation, drafter in zip(evaluations, repeated, strict=True):
        done = replace(evaluation, again=calls.get(evaluation.name, ()))
        if weights_hash(drafter.folder) != evaluation.weights:
            done = replace(done, not_again="it was trained again meanwhile")
        repeated_evaluations.append(done)
    return repeated_evaluations


def kept(
    workspace: Workspace, drafters: Sequence[Trained], settings: Settings
) -> list[Evaluation]:
    """The latest existing evaluations of these drafters; empty unless all can be reused.

    They can be reused if drafters and target have not changed since, settings, hardware and software are the
    same, there is at most one tree, and one process measured them all: numbers of several compare less.
    TargetError if there are some, and the target is not found.
    """
    from vlmdistill.pipelines.targets.loading import load_encoder

    if len(settings.trees) > 1:
        return []
    try:
        reuse = _Reuse.of(workspace, drafters, settings)
    except (DataError, TrainingError):
        return []
    runs: dict[object, dict[str, Evaluation]] = {}  # by process, then by drafter
    for file in records.files_in(workspace.reports):
        with suppress(DataError):  # what cannot be read is not reused
            evaluation = records.read(file)
            if reuse.allows(evaluation):
                run = runs.setdefault(evaluation.run, {})
                run[evaluation.name] = evaluation
    names = [drafter.name for drafter in drafters]
    whole_runs = [
        [run[name] for name in names]
        for run in runs.values()
        if run.keys() == set(names)
    ]
    if not whole_runs:
        return []
    fingerprint = str(load_encoder(workspace.model).fingerprint)
    of_target = [
        run for run in whole_runs if agree(run[0].target.fingerprint, fingerprint)
    ]
    return max(of_target, key=lambda run: run[0].measured, default=[])


@dataclass(frozen=True, kw_only=True)
class _Reuse:
    """The facts of a new evaluation; an existing one with the same facts is reused instead."""

    settings: Settings
    drafters: dict[str, Trained]
    described: dict[str, Description]
    keys: list[str]  # of the prompts
    hardware: str
    software: Software

    @classmethod
    def of(
        cls, workspace: Workspace, drafters: Sequence[Trained], settings: Settings
    ) -> "_Reuse":
        """DataError or TrainingError when the drafters cannot be evaluated together."""
        described = {drafter.name: Description.of(drafter) for drafter in drafters}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        prompts = held_out(workspace.prompts, settings.limit, workspace.model)
        return cls(
            settings=settings.trained_as(trained_thinking(described)),
            drafters={drafter.name: drafter for drafter in drafters},
            described=described,
            keys=[prompt.key for prompt in prompts],
            hardware=hardware.of(device).name,
            software=Software(**versions(PACKAGES)),
        )

    def allows(self, evaluation: Evaluation) -> bool:
        """Whether an existing evaluation has the facts of the new one."""
        return (
            evaluation.name in self.drafters
            and self._has_same_drafter(evaluation)
            and self._has_same_settings(evaluation)
            and self._has_same_machine(evaluation)
        )

    def _has_same_drafter(self, evaluation: Evaluation) -> bool:
        description = self.described[evaluation.name]
        trees = self.settings.trees
        tree = str(trees[0]) if trees else description.config.tree
        return (
            evaluation.drafter == description.drafter
            and evaluation.config == description.config
            and evaluation.training == description.training
            and evaluation.weights == self.drafters[evaluation.name].weights
            and evaluation.tree == tree
        )

    def _has_same_settings(self, evaluation: Evaluation) -> bool:
        settings = self.settings
        measured_temperatures = {at.temperature for at in evaluation.temperatures}
        return (
            evaluation.keys == self.keys
            and evaluation.max_new_tokens == settings.max_new_tokens
            and settings.seed in (None, evaluation.seed)
            and evaluation.attention == settings.attention
            and evaluation.compiled == settings.compiled
            and evaluation.thinking == settings.thinking
            and measured_temperatures >= set(settings.temperatures)
        )

    def _has_same_machine(self, evaluation: Evaluation) -> bool:
        dtype = self.settings.how.get("dtype", "auto")
        any_number = 0  # of threads
        return (
            evaluation.hardware == self.hardware
            and self.settings.threads in (any_number, evaluation.threads)
            and dtype in ("auto", evaluation.dtype)
            and evaluation.software.installed == self.software
        )
