"""The output of `--dry-run`: the forecast of a command, as lines or as JSON."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.data.features.capturer import CaptureJob
    from vlmdistill.pipelines.planning.forecast import (
        CaptureForecast,
        EvalForecast,
        PlannedTraining,
        RunForecast,
        TrainForecast,
    )

UNKNOWN_TOKENS = "unknown until some responses exist: try --limit"


def show_capture(
    job: "CaptureJob", rates: Sequence[str] | None, as_json: bool, *, features: bool
) -> None:
    """Print what `responses`, or also `features`, would do; `rates` are those of --rate."""
    from vlmdistill.pipelines.planning import forecast

    speeds = forecast.Speeds.of(job.workspace.root, rates or ())
    planned = forecast.capture(job, speeds)
    if as_json:
        console.result(_facts(planned), as_json)
    else:
        console.result(_capture(planned, features), as_json)
    if planned.bytes is None or planned.free_bytes is None:
        return
    if features and planned.bytes > planned.free_bytes:
        console.note(
            "warning: the features do not fit on the disk: name another --store, or fewer methods in --for"
        )


def show_training(planned: "TrainForecast", as_json: bool) -> None:
    """Print what `train` would do."""
    from vlmdistill.pipelines.planning.resources import shown

    facts: dict[str, Any] = _facts(planned)
    if not as_json:
        facts["memory"] = shown(planned.memory)
        facts["disk_bytes"] = console.size(planned.disk_bytes)
        facts["seconds"] = _time(planned.seconds, _unmeasured("train"))
    console.result(facts, as_json)


def show_evaluation(planned: "EvalForecast", as_json: bool) -> None:
    """Print what `eval` would do."""
    from vlmdistill.pipelines.planning.resources import shown

    facts: dict[str, Any] = _facts(planned)
    if not as_json:
        facts["memory"] = shown(planned.memory)
        if planned.seconds is None:
            facts["seconds"] = "unknown: a drafter was not measured on this machine"
    console.result(facts, as_json)


def show_run(planned: "RunForecast", as_json: bool) -> None:
    """Print what each stage of `run` would do, and the time of all."""
    from vlmdistill.pipelines.planning.resources import shown

    if as_json:
        console.result(_facts(planned), as_json)
        return
    console.result(_capture(planned.capture), as_json=False)
    if planned.training:
        console.echo("")
        console.rows(
            ("training", "steps", "parameters", "time", "memory", "disk"),
            [_training_row(*training) for training in planned.training.items()],
        )
        console.echo("")
    evaluation = planned.evaluation
    facts = {
        "decodings": f"{evaluation.decodings} of each of {evaluation.prompts} held-out prompts",
        "time_of_decoding": _time(evaluation.seconds),
        "memory_of_decoding": shown(evaluation.memory),
        "time": _time(planned.seconds),
    }
    console.result(facts, as_json=False)
    if planned.seconds is None:
        console.note(
            "times are unknown where nothing was measured here: state rates with --rate train=N"
        )


def _training_row(name: str, training: "PlannedTraining") -> list[Any]:
    return [
        name,
        "by epochs" if training.steps is None else training.steps,
        training.parameters,
        "done" if training.finished else _time(training.seconds),
        console.size(training.memory.total),
        console.size(training.disk_bytes),
    ]


def _capture(planned: "CaptureForecast", features: bool = True) -> dict[str, Any]:
    """The lines on responses, and on features if they are captured, too."""
    lines = _response_lines(planned)
    return lines | _feature_lines(planned) if features else lines


def _response_lines(planned: "CaptureForecast") -> dict[str, Any]:
    from vlmdistill.pipelines.planning.resources import shown

    target = "its weights are not here"
    if planned.weights_bytes is not None:
        target = f"weights of {console.size(planned.weights_bytes)}"
    likely_tokens = _estimate(planned, planned.likely_tokens)
    return {
        "prompts": planned.prompts,
        "responses": f"{planned.responses} exist, {planned.to_generate} to generate",
        "tokens_to_generate": f"{likely_tokens}; at most {planned.most_tokens}",
        "target": target,
        "time_of_responses": _time(planned.response_seconds, _unmeasured("responses")),
        "memory_of_responses": shown(planned.response_memory),
    }


def _feature_lines(planned: "CaptureForecast") -> dict[str, Any]:
    from vlmdistill.pipelines.planning.resources import shown

    size = None if planned.bytes is None else console.size(planned.bytes)
    disk = _estimate(planned, size)
    if planned.free_bytes is not None:
        disk += f"; {console.size(planned.free_bytes)} are free"
    return {
        "samples": f"{planned.samples} exist, {planned.to_capture} to capture",
        "text_tokens": _estimate(planned, planned.text_tokens),
        "visual_tokens": _estimate(planned, planned.visual_tokens),
        "features": planned.features,
        "bytes": disk,
        "time_of_features": _time(planned.feature_seconds, _unmeasured("features")),
        "memory_of_features": shown(planned.feature_memory),
    }


def _estimate(planned: "CaptureForecast", amount: int | str | None) -> str:
    """An amount; with `some`, if it depends on responses that do not exist yet."""
    if amount is None:
        return UNKNOWN_TOKENS
    return f"some {amount}" if planned.to_generate else str(amount)


def _time(seconds: float | None, unknown: str = "unknown") -> str:
    if seconds is None:
        return unknown
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds:.0f} s"


def _unmeasured(stage: str) -> str:
    return f"unknown: no run here has measured it; --rate {stage}=TOKENS_PER_SECOND states it"


def _facts(planned: Any) -> Any:
    """A forecast, or a part of it, as JSON."""
    from vlmdistill.pipelines.planning.resources import Memory, facts

    if isinstance(planned, Memory):
        return facts(planned)
    if is_dataclass(planned):
        names = [field.name for field in fields(planned)]
        return {name: _facts(getattr(planned, name)) for name in names}
    if isinstance(planned, dict):
        return {name: _facts(part) for name, part in planned.items()}
    return planned
