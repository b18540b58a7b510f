"""A plan: disk, memory and hours of a project before anything is downloaded or paid for.

Hours follow from rates. A rate is *measured* if the workspace has a run of the stage on this kind of GPU,
else *assumed* (`assumptions.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines.data.features.capturer import CaptureSettings
from vlmdistill.pipelines.planning.assumptions import (
    AssumedRates,
    decoding_rate,
    training_rate,
)
from vlmdistill.pipelines.planning.forecast import (
    TOKEN_BYTES,
    TrainingNeeds,
    response_batch,
    worker_memory,
)
from vlmdistill.pipelines.planning.gpus import Gpus
from vlmdistill.pipelines.planning.resources import Memory, kv_cache, on_target, rows
from vlmdistill.pipelines.planning.stages import Speeds, StagePlan, to_dict
from vlmdistill.pipelines.targets.batching import CPU_BATCH
from vlmdistill.pipelines.targets.describe import TargetDescription, describe
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace

FREE = 0.95  # of a GPU's memory
EVALUATED = 100  # held-out prompts, decoded plainly and with each drafter
DTYPE = "bfloat16"


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
class ProjectPlan:
    """The time, memory and disk of a project."""

    target: TargetDescription
    data: ProjectData
    gpus: Gpus
    stages: Sequence[StagePlan]
    drafters: Mapping[str, int]
    """By method, the bytes of the features that it alone needs."""
    download_bytes: (
        int  # of the target's weights, in bfloat16; 0: they are on this machine
    )

    @property
    def fits(self) -> bool:
        """Whether all stages fit into the memory of the GPUs."""
        return not any(stage.memory.lacking for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the description of the target."""
        drafters = {}
        for name, store_bytes in self.drafters.items():
            choice = catalogue.choice(name)
            drafters[name] = {
                "store_bytes": store_bytes,
                "published_tau": choice.tau,
                "served_by": choice.engines,
            }
        facts = to_dict(self.stages)
        if facts["disk_bytes"] is not None:
            facts["disk_bytes"] += self.download_bytes
        return {
            "target": self.target.name,
            "parameters": self.target.parameters.all,
            "download_bytes": self.download_bytes,
            "data": vars(self.data),
            "gpus": f"{self.gpus.count}x{self.gpus.name}",
            **facts,
            "drafters": drafters,
        }


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
) -> ProjectPlan:
    """Plan responses, features, trainings and an evaluation of some drafters for a target.

    `configs` are the settings of those that are trained. TargetError if nothing is known of the target here.
    """
    with_response = data.text_tokens + data.response_tokens
    target = describe(
        workspace.model, with_response, data.visual_tokens, drafters=drafters
    )
    project = _Project(
        target, data, gpus, Speeds(measured=measured_rates(workspace, gpus, drafters))
    )
    trainings = [project.training(name, config) for name, config in configs.items()]
    stages = [*project.capture, *trainings, project.evaluation(len(drafters))]
    return ProjectPlan(
        target=target,
        data=data,
        gpus=gpus,
        stages=stages,
        drafters={
            name: data.prompts * target.drafters[name].bytes for name in drafters
        },
        download_bytes=0 if target.found else 2 * target.parameters.all,
    )


@dataclass(frozen=True)
class _Project:
    """What the stages of a project have in common."""

    target: TargetDescription
    data: ProjectData
    gpus: Gpus
    speeds: Speeds

    @property
    def capture(self) -> list[StagePlan]:
        """The plans of responses and features."""
        data = self.data
        info = self.target.target
        assumed = AssumedRates(
            self.gpus, self.target, data.prompt_tokens, data.response_tokens
        )
        memory = partial(worker_memory, self.target, DTYPE)
        batch = response_batch(
            info, CPU_BATCH, data.prompt_tokens + data.response_tokens
        )
        names = self.target.together.features
        one_pass = rows(info, CaptureSettings.batch_tokens, names)
        response_tokens = data.prompts * data.response_tokens
        responses = StagePlan(
            name="responses",
            unit="responses",
            to_do=data.prompts,
            tokens=response_tokens,
            certainty="assumed",
            speed=self.speeds.speed("responses", assumed.responses),
            memory=self._on_gpus(memory(batch)),
            disk_bytes=TOKEN_BYTES * response_tokens,
        )
        features = StagePlan(
            name="features",
            unit="samples",
            to_do=data.prompts,
            tokens=data.tokens,
            certainty="assumed",
            speed=self.speeds.speed("features", assumed.features),
            memory=self._on_gpus(memory({"pass": one_pass})),
            disk_bytes=data.prompts * self.target.together.bytes
            + self.target.head_bytes,
            details=", ".join(names),
        )
        return [responses, features] if names else []

    def training(self, name: str, config: DrafterConfig) -> StagePlan:
        """The plan of a training, with a rank on each GPU and without ZeRO."""
        run = Run(
            drafter=catalogue.base(name),
            config=config,
            store="",
            out=Path(name),
            dtype=DTYPE,
        )
        needs = TrainingNeeds.of(run, self.target.target, self.gpus.count)
        tokens = self._trained_tokens(config)
        assumed = training_rate(self.gpus, config, needs.weights)
        return StagePlan(
            name=f"train {name}",
            unit="steps",
            to_do=config.training.steps or None,
            tokens=tokens,
            certainty="assumed",
            speed=self.speeds.speed(f"train {name}", assumed),
            memory=self._on_gpus(needs.memory),
            disk_bytes=needs.disk_bytes,
            details=f"{needs.weights} weights",
        )

    def evaluation(self, drafters: int) -> StagePlan:
        """The plan of decoding held-out prompts, plainly and with each drafter, on one GPU."""
        data = self.data
        parameters = self.target.parameters.all
        kv_numbers = kv_cache(
            self.target.target, data.prompt_tokens + data.response_tokens
        )
        decodings = EVALUATED * (1 + drafters)
        memory = on_target(parameters, DTYPE, batch={"kv_cache": kv_numbers})
        return StagePlan(
            name="eval",
            unit="responses",
            to_do=decodings,
            tokens=decodings * data.response_tokens,
            certainty="assumed",
            speed=self.speeds.speed("eval", decoding_rate(self.gpus, parameters)),
            memory=self._on_gpus(memory),
            disk_bytes=0,
            details=f"{EVALUATED} held-out prompts, plain and {drafters} drafters, on one GPU",
        )

    def _on_gpus(self, memory: Memory) -> Memory:
        """Compared with the memory of the GPUs, not of this machine."""
        free_bytes = round(FREE * (self.gpus.each.gib << 30))
        return replace(memory, free=[free_bytes] * self.gpus.count, device="GPU")

    def _trained_tokens(self, config: DrafterConfig) -> int:
        """Tokens of all optimizer steps: by steps, or by epochs of all samples.

        Visual tokens count if the drafter reads their states.
        """
        if config.training.steps:
            return config.training.steps * config.training.batch_tokens
        data = self.data
        tokens = data.text_tokens + data.response_tokens
        needs = config.model.needs(self.target.target)
        if any(feature.where == "visual" for feature in needs):
            tokens += data.visual_tokens
        epochs = sum(stage.epochs for stage in config.schedule)
        return round(epochs * data.prompts * tokens)
