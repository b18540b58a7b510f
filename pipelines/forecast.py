"""What a stage would do, without doing it: samples, tokens, bytes, and what exists already."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import describe as describe_drafter
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.training import saved
from vlmdistill.drafters.training.run import Run, RunData, finished
from vlmdistill.drafters.training.saved import Position
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.pipelines.bench.evaluate import Settings, held_out
from vlmdistill.pipelines.data.features.store_part import StorePart
from vlmdistill.pipelines.data.prompts.prompt_table import Prompts
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.targets.describe import describe, feature_cost
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import Feature

FLOATS = 4  # of each trained weight: itself, its gradient, Adam's two moments


@dataclass(frozen=True, kw_only=True)
class CaptureForecast:
    """What `responses` and `features` would do for some prompts.

    Tokens of responses that are missing are estimated by the mean of those that exist, dropped ones included;
    None where none exists.
    """

    prompts: int
    responses: int  # that exist
    to_generate: int
    most_tokens: int  # to generate at most
    likely_tokens: int | None  # to generate
    samples: int  # of these prompts that exist
    to_capture: int  # at most: filters may drop some of the responses to come
    text_tokens: int | None  # to capture
    visual_tokens: int | None
    features: tuple[str, ...]
    bytes: int | None  # in the dtype of two bytes; a store of int8 takes half
    free_bytes: int | None  # where the store lies; None behind a URL
    weights_bytes: int | None  # of the target


@dataclass(frozen=True)
class _Gain:
    """What a store, or an annex of it, would get; tokens None where no response tells."""

    features: frozenset[Feature]
    samples: int
    text: int | None = None
    visual: int | None = None

    def bytes(self, width: int) -> int:
        spans = self.samples if self.visual else 0
        rows = {"text": self.text or 0, "visual": self.visual or 0, "span": spans}
        return int(feature_cost(self.features, rows, width)["bytes"])


def capture(
    model: str,
    prompts: Prompts,
    responses: Path,
    part: StorePart,
    drafters: Sequence[str] | None,
    max_new_tokens: int | None,
) -> CaptureForecast:
    """Forecast responses and features; no weights are loaded and nothing is written."""
    import polars as pl

    facts = dataset.facts(responses).filter(pl.col("key").is_in(prompts.facts["key"].implode()))
    stored = part.keys()
    there = sum(key in stored for key in prompts.facts["key"])
    missing = len(prompts) - len(facts)
    limit = max_new_tokens or dataset.read_settings(responses)[0].max_new_tokens
    about = describe(model, 0, 0, drafters=drafters)

    def of(part: StorePart) -> _Gain:
        """What a part gets from the responses that exist, and from those to come, each of the mean size."""
        waiting = facts.filter(pl.col("keep") & ~pl.col("key").is_in(list(part.keys())))
        held = part.select(drafters, part.store.info) if part.store else map(Feature.parse, needed)
        gain = _Gain(frozenset(held), len(waiting) + missing)
        if not len(facts) and missing:
            return gain
        more = missing / len(facts) if missing else 0.0
        visual, prompt, response = (
            int(waiting[name].sum()) + round(more * int(facts[name].sum()))
            for name in ("visual_tokens", "prompt_tokens", "tokens")
        )
        return replace(gain, text=prompt - visual + response, visual=visual)

    needed = about["drafters"]["all"]["features"]
    gains = [of(one) for one in (part, *part.annexes(drafters))]
    largest, width = max(gains, key=lambda gain: gain.samples), about["target"]["hidden_size"]
    return CaptureForecast(
        prompts=len(prompts),
        responses=len(facts),
        to_generate=missing,
        most_tokens=missing * limit,
        likely_tokens=round(missing * int(facts["tokens"].sum()) / len(facts)) if len(facts) else None,
        samples=there,
        to_capture=largest.samples,
        text_tokens=largest.text,
        visual_tokens=largest.visual,
        features=tuple(sorted({feature.name for one in gains if one.samples for feature in one.features})),
        bytes=None if largest.text is None else sum(one.bytes(width) for one in gains),
        free_bytes=_free(part.path),
        weights_bytes=about["weights_bytes"],
    )


@dataclass(frozen=True, kw_only=True)
class TrainForecast:
    """What a training would do."""

    samples: int  # with images or videos, and without
    text_samples: int
    held_out: int
    steps: int
    stages: dict[str, str]  # the share of each in the run
    batch_tokens: int  # of an optimizer step
    parameters: int  # that are trained
    state_bytes: int  # weights, gradients and both moments of Adam, in float32, before ZeRO
    done: int  # steps of an earlier start of the same run
    finished: bool


def training(run: Run, world: int = 1) -> TrainForecast:
    """Forecast a training; nothing is written. Raises what the training would of its store and settings."""
    data = RunData.of(run)
    micro, budget = run.packing(world)
    schedule = Schedule(run.config.training, run.config.schedule, micro)

    def batches(keys: Sequence[str]) -> int:
        return len(Epoch(data.store, data.needs, keys=keys, token_budget=budget, world=world))

    def drawn(stage: int, ramp: float) -> Sequence[str]:
        return data.samples[stage].draw(schedule.stages[stage], ramp, 0)

    info = data.store.info
    with torch.device("meta"):
        table_VD = torch.empty(info.vocab_size, info.hidden_size)
        drafter = catalogue.trained(run.drafter)(run.config.model, info, Head(table_VD, table_VD))
    weights = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
    begun = saved.read(run.state)
    last = data.samples[-1]
    return TrainForecast(
        samples=len(last.visual),
        text_samples=len(last.text),
        held_out=len(last.held_out),
        steps=schedule.planned(Position(), drawn, batches),
        stages={one.name: schedule.share(number) for number, one in enumerate(schedule.stages)},
        batch_tokens=run.config.training.batch_tokens,
        parameters=weights,
        state_bytes=FLOATS * 4 * weights,
        done=begun.position.total if begun and begun.signature == data.signature else 0,
        finished=finished(run, data),
    )


@dataclass(frozen=True, kw_only=True)
class EvalForecast:
    """What an evaluation would do."""

    prompts: int
    decodings: int  # of a prompt: plain, and each drafter with each tree, at each temperature
    most_tokens: int
    seconds: float | None  # of decoding, by earlier evaluations here; None where a drafter has none


def evaluation(
    workspace: Workspace, drafters: Sequence[str], settings: Settings, prompts_file: Path | None = None
) -> EvalForecast:
    """Forecast an evaluation; nothing is decoded or written.

    DataError if there are no prompts, TrainingError if a drafter is missing.
    """
    settings.check()
    for name in drafters:
        describe_drafter(workspace.drafter(name))
    prompts = len(held_out(prompts_file or workspace.prompts, settings.limit, workspace.model))
    temperatures, trees = len(settings.temperatures), max(1, len(settings.trees))
    decodings = temperatures * (1 + len(drafters) * trees)
    return EvalForecast(
        prompts=prompts,
        decodings=decodings,
        most_tokens=prompts * decodings * settings.max_new_tokens,
        seconds=_seconds(workspace, drafters, prompts * temperatures, trees),
    )


def _seconds(workspace: Workspace, drafters: Sequence[str], responses: int, trees: int) -> float | None:
    """The time of so many responses, plain and of each drafter, by the latest measurements here."""
    machine = hardware.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).name
    latest = {
        one.facts["drafter"]: one.at.prompts
        for one in reversed(selection.read(workspace.reports).own)
        if one.evaluation.hardware == machine
    }
    if not {*drafters} <= latest.keys():
        return None
    found = [latest[name] for name in drafters]
    plain = fmean(row.plain.seconds for rows in found for row in rows)
    return responses * (plain + trees * sum(fmean(row.drafted.seconds for row in rows) for rows in found))


def _free(path: str) -> int | None:
    """Free bytes of the disk of a local path, which may not exist yet."""
    if "://" in path:
        return None
    folder = Path(path).absolute()
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
