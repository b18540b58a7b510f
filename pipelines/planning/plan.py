"""A plan: disk, memory and hours of a project before anything is downloaded or paid for.

Hours follow from rates. A rate is *measured* if the workspace has a run of the stage on this kind of GPU,
else *assumed*: the arithmetic of the stage at the share of the GPU's peak that an H100 reached
(docs/measurements/gpu.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.drafters.checkpoints.export import exportable
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines.planning.forecast import fits, needs_of_training
from vlmdistill.pipelines.planning.gpus import Gpus
from vlmdistill.pipelines.planning.resources import Memory, facts, kv_cache
from vlmdistill.pipelines.targets.describe import TargetDescription, describe
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace

PEAK = {"features": 0.285, "steps": 0.37, "train": 0.27}
"""Shares of a GPU's arithmetic: capture of 17,000 tokens a second, decoding steps of 512 responses in 30 ms,
4,000 tokens of `eagle2` in 25 ms, all with 8.3 billion parameters on an H100."""
READ = 0.69
"""Share of a GPU's bandwidth at which all weights are read."""
FREE = 0.95  # of a GPU's memory
EVALUATED = 100  # held-out prompts, decoded plainly and with each drafter
MOST_RESPONSES = 512  # at a time
BYTES_OF_A_TOKEN = 8  # of a response on the disk: its id and text
PASSES = 3  # of a weight for each trained token: forward, and twice backward

PUBLISHED = {
    "eagle2": "3.61 (LLaVA-1.5-7B, by MSD)",
    "eaglevlm": "3.69 (LLaVA-1.6-7B)",
    "dream": "5.51 (LLaVA-1.6-7B)",
    "hivis": "5.07 (LLaVA-NeXT-7B, without bonus)",
    "lookahead": "1.41 (LLaVA-1.5-7B, by MSD)",
    "medusa": "0.60 (Qwen2.5-VL-7B, by ViSpec, without bonus)",
    "msd": "4.45 (LLaVA-1.5-7B)",
    "sparrow": "3.87 (Qwen2.5-VL-7B)",
    "specflash": "2.46 (Qwen2.5-VL, accepted a pass)",
    "specvlm": "4.07 (LLaVA-OneVision-7B, by Sparrow)",
    "text_only": "3.08 (LLaVA-1.5-7B, by MSD)",
    "vispec": "2.24 (Qwen2.5-VL-7B, without bonus)",
}
"""Tau at temperature 0 as papers print it on images or videos. They count differently: docs/papers.md."""


@dataclass(frozen=True, kw_only=True)
class ProjectData:
    """The data of a project."""

    prompts: int
    text_tokens: int  # of a prompt
    visual_tokens: int  # of a prompt
    response_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.text_tokens + self.visual_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all prompts with their responses."""
        return self.prompts * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The time, memory and disk of a stage."""

    hours: float
    rate: float  # tokens per second of all GPUs
    measured: bool  # the rate; else assumed
    memory: Memory
    disk_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **vars(self),
            "memory": {**facts(self.memory), "fits": not self.memory.lacking},
        }


@dataclass(frozen=True, kw_only=True)
class MethodPlan:
    """The store and training of a method, its published tau, and whether vLLM serves it."""

    store_bytes: int  # of the features that it alone needs
    training: StagePlan | None  # None: not trained
    published_tau: str
    served: bool  # by vLLM with the plugin


@dataclass(frozen=True, kw_only=True)
class ProjectPlan:
    """The time, memory and disk of a project."""

    target: TargetDescription
    data: ProjectData
    gpus: Gpus
    stages: Mapping[str, StagePlan]
    methods: Mapping[str, MethodPlan]
    download_bytes: int  # of the target's weights, in bfloat16

    @property
    def hours(self) -> float:
        """Of all stages and trainings, one after the other."""
        return sum(stage.hours for stage in self._all)

    @property
    def disk_bytes(self) -> int:
        """Of all stages and trainings."""
        return self.download_bytes + sum(stage.disk_bytes for stage in self._all)

    @property
    def fits(self) -> bool:
        """Whether all stages and trainings fit into the memory of the GPUs."""
        return not any(stage.memory.lacking for stage in self._all)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the description of the target."""
        return {
            "target": self.target.name,
            "parameters": self.target.parameters.all,
            "download_bytes": self.download_bytes,
            "data": vars(self.data),
            "gpus": f"{self.gpus.count}x{self.gpus.name}",
            "hours": self.hours,
            "disk_bytes": self.disk_bytes,
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "methods": {
                name: {
                    **vars(method),
                    "training": method.training and method.training.to_dict(),
                }
                for name, method in self.methods.items()
            },
        }

    @property
    def _all(self) -> list[StagePlan]:
        """The stages and the trainings."""
        trainings = [method.training for method in self.methods.values()]
        return [*self.stages.values(), *filter(None, trainings)]


@dataclass(frozen=True)
class _AssumedRates:
    """Tokens per second of the stages on GPUs of a class, with a target."""

    gpus: Gpus
    parameters: int
    kv_bytes: int  # of one response with its prompt
    data: ProjectData

    @property
    def features(self) -> float:
        """Tokens of prompts and responses in forward passes."""
        flops = PEAK["features"] * self.gpus.each.flops
        return self.gpus.count * flops / (2 * self.parameters)

    @property
    def responses(self) -> float:
        """Response tokens, the reading of their prompts included."""
        gpu = self.gpus.each
        weights_bytes = 2 * self.parameters
        # A target that is too large for one GPU is spread over all of them.
        together = self.gpus.count if weights_bytes > gpu.gib << 30 else 1
        free_bytes = together * (gpu.gib << 30) - weights_bytes
        at_a_time = max(1, min(MOST_RESPONSES, free_bytes // self.kv_bytes))
        read_seconds = weights_bytes / (READ * gpu.bandwidth)
        flops = PEAK["steps"] * gpu.flops
        step_seconds = read_seconds + at_a_time * 2 * self.parameters / flops
        decoding_seconds = self.data.response_tokens * step_seconds / at_a_time
        prefill_seconds = self.data.prompt_tokens * self.gpus.count / self.features
        seconds = decoding_seconds + prefill_seconds
        return self.gpus.count / together * self.data.response_tokens / seconds

    @property
    def evaluation(self) -> float:
        """Tokens of decoding one response at a time, on one GPU."""
        weights_bytes = 2 * self.parameters
        return READ * self.gpus.each.bandwidth / weights_bytes

    def training(self, config: DrafterConfig, weights: int) -> float:
        """Tokens of optimizer steps."""
        flops = PEAK["train"] * self.gpus.each.flops
        share = sum(stage.epochs for stage in config.schedule)
        hops = sum(stage.epochs * stage.hops for stage in config.schedule) / share
        passes = 2 * PASSES * weights * hops
        return self.gpus.count * flops / passes


@dataclass(frozen=True)
class _Rates:
    """The rates that were measured, and the memory of each stage."""

    measured: Mapping[str, float]
    memory: Mapping[str, Memory]

    def stage(
        self, name: str, assumed: float, tokens: int, disk_bytes: int
    ) -> StagePlan:
        """A stage of so many tokens, by its measured rate or the assumed one."""
        rate = self.measured.get(name, assumed)
        return StagePlan(
            hours=tokens / rate / 3600,
            rate=rate,
            measured=name in self.measured,
            memory=self.memory[name],
            disk_bytes=disk_bytes,
        )


def measured_rates(
    workspace: Workspace, gpus: Gpus, drafters: Sequence[str]
) -> dict[str, float]:
    """Tokens per second of stages by name, as the workspace has measured them on such GPUs.

    They were measured on all GPUs of this machine, and grow with their number.
    """
    own_gpus = Gpus.here()
    if own_gpus is None or own_gpus.name != gpus.name:
        return {}
    measured = {}
    for stage in ("responses", "features", *(f"train {name}" for name in drafters)):
        rate = rates.known(workspace.root, stage)
        if rate:
            measured[stage] = rate.tokens_per_second * gpus.count / own_gpus.count
    return measured


def plan(
    workspace: Workspace,
    data: ProjectData,
    gpus: Gpus,
    drafters: Sequence[str],
    configs: Mapping[str, DrafterConfig],
    measured: Mapping[str, float],
) -> ProjectPlan:
    """Plan responses, features and trainings of some drafters for a target.

    `configs` are the settings of those that are trained, `measured` tokens per second of stages by name
    (`train wren`). TargetError if nothing is known of the target here.
    """
    model = workspace.model
    with_response = data.text_tokens + data.response_tokens
    target = describe(model, with_response, data.visual_tokens, drafters=drafters)
    sequence_tokens = data.prompt_tokens + data.response_tokens
    kv_bytes = 2 * kv_cache(target.target, sequence_tokens)
    assumed = _AssumedRates(gpus, target.parameters.all, kv_bytes, data)
    free_bytes = round(FREE * (gpus.each.gib << 30))
    memory = fits(model, gpus.count, free_bytes)
    stage_rates = _Rates(measured, memory)
    decoded_tokens = EVALUATED * data.response_tokens * (1 + len(drafters))
    stages = {
        "responses": stage_rates.stage(
            "responses",
            assumed.responses,
            data.prompts * data.response_tokens,
            data.prompts * data.response_tokens * BYTES_OF_A_TOKEN,
        ),
        "features": stage_rates.stage(
            "features",
            assumed.features,
            data.tokens,
            data.prompts * target.together.bytes + target.head_bytes,
        ),
        "eval, serve": stage_rates.stage(
            "eval, serve", assumed.evaluation, decoded_tokens, 0
        ),
    }
    methods = {}
    for name in drafters:
        training = None
        if name in configs:
            config = configs[name]
            weights, disk_bytes = _weights(name, config, target, gpus.count)
            training = stage_rates.stage(
                f"train {name}",
                assumed.training(config, weights),
                _trained_tokens(config, data),
                disk_bytes,
            )
        methods[name] = MethodPlan(
            store_bytes=data.prompts * target.drafters[name].bytes,
            training=training,
            published_tau=PUBLISHED.get(name, "-"),
            served=name in exportable(),
        )
    return ProjectPlan(
        target=target,
        data=data,
        gpus=gpus,
        stages=stages,
        methods=methods,
        download_bytes=2 * target.parameters.all,
    )


def _weights(
    name: str, config: DrafterConfig, target: TargetDescription, ranks: int
) -> tuple[int, int]:
    """The weights that a method trains, and the bytes that its training writes."""
    run = Run(drafter=name, config=config, store="", out=Path(name), dtype="bfloat16")
    weights, _, disk_bytes = needs_of_training(run, target.target, ranks)
    return weights, disk_bytes


def _trained_tokens(config: DrafterConfig, data: ProjectData) -> int:
    """Tokens of all optimizer steps: by steps, or by epochs of all samples."""
    if config.training.steps:
        return config.training.steps * config.training.batch_tokens
    epochs = sum(stage.epochs for stage in config.schedule)
    return round(epochs * data.tokens)
