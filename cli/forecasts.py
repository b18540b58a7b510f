"""What `--dry-run` prints: the forecast of a command, as lines or as JSON."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.data.features.capturer import CaptureJob
    from vlmdistill.pipelines.planning.forecast import (
        CaptureForecast,
        EvalForecast,
        RunForecast,
        TrainForecast,
    )


def show_capture(
    job: "CaptureJob", rates: Sequence[str] | None, as_json: bool, *, features: bool
) -> None:
    """Print what `responses`, or also `features`, would do; `rates` are those of --rate."""
    from vlmdistill.pipelines.planning import forecast

    found = forecast.capture(job, forecast.Speeds.of(job.workspace.root, rates or ()))
    console.result(_facts(found) if as_json else _capture(found, features), as_json)
    if features and (found.bytes or 0) > (found.free_bytes or inf):
        console.note(
            "warning: the features do not fit on the disk: name another --store, or fewer methods in --for"
        )


def show_training(found: "TrainForecast", as_json: bool) -> None:
    """Print what `train` would do."""
    from vlmdistill.pipelines.planning.resources import shown

    lines = {
        "memory": shown(found.memory),
        "disk_bytes": console.size(found.disk_bytes),
        "seconds": _time(found.seconds, _unmeasured("train")),
    }
    console.result(_facts(found) | ({} if as_json else lines), as_json)


def show_evaluation(found: "EvalForecast", as_json: bool) -> None:
    """Print what `eval` would do."""
    from vlmdistill.pipelines.planning.resources import shown

    lines: dict[str, Any] = {"memory": shown(found.memory)}
    if found.seconds is None:
        lines["seconds"] = "unknown: a drafter was not measured on this machine"
    console.result(_facts(found) | ({} if as_json else lines), as_json)


def show_run(found: "RunForecast", as_json: bool) -> None:
    """Print what each stage of `run` would do, and the time of all."""
    from vlmdistill.pipelines.planning.resources import shown

    if as_json:
        console.result(_facts(found), as_json)
        return
    console.result(_capture(found.capture), as_json=False)
    header = ("training", "steps", "parameters", "time", "memory", "disk")
    lines = [
        (
            name,
            "by epochs" if one.steps is None else one.steps,
            one.parameters,
            "done" if one.finished else _time(one.seconds),
            console.size(one.memory.total),
            console.size(one.disk_bytes),
        )
        for name, one in found.training.items()
    ]
    if lines:
        console.echo("")
        console.rows(header, lines)
        console.echo("")
    facts = {
        "decodings": f"{found.evaluation.decodings} of each of {found.evaluation.prompts} held-out prompts",
        "time_of_decoding": _time(found.evaluation.seconds),
        "memory_of_decoding": shown(found.evaluation.memory),
        "time": _time(found.seconds),
    }
    console.result(facts, as_json=False)
    if found.seconds is None:
        console.note(
            "times are unknown where nothing was measured here: state rates with --rate train=N"
        )


def _capture(found: "CaptureForecast", features: bool = True) -> dict[str, Any]:
    from vlmdistill.pipelines.planning.resources import shown

    about = "some " if found.to_generate else ""

    def some(tokens: int | None) -> str:
        return (
            "unknown until some responses exist: try --limit"
            if tokens is None
            else f"{about}{tokens}"
        )

    disk = (
        ""
        if found.free_bytes is None
        else f"; {console.size(found.free_bytes)} are free"
    )
    lines = {
        "prompts": found.prompts,
        "responses": f"{found.responses} exist, {found.to_generate} to generate",
        "tokens_to_generate": f"{some(found.likely_tokens)}; at most {found.most_tokens}",
        "target": "its weights are not here"
        if found.weights_bytes is None
        else f"weights of {console.size(found.weights_bytes)}",
        "time_of_responses": _time(found.response_seconds, _unmeasured("responses")),
        "memory_of_responses": shown(found.response_memory),
    }
    if features:
        lines |= {
            "samples": f"{found.samples} exist, {found.to_capture} to capture",
            "text_tokens": some(found.text_tokens),
            "visual_tokens": some(found.visual_tokens),
            "features": found.features,
            "bytes": (
                some(None) if found.bytes is None else about + console.size(found.bytes)
            )
            + disk,
            "time_of_features": _time(found.feature_seconds, _unmeasured("features")),
            "memory_of_features": shown(found.feature_memory),
        }
    return lines


def _time(seconds: float | None, unknown: str = "unknown") -> str:
    if seconds is None:
        return unknown
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds:.0f} s"


def _unmeasured(stage: str) -> str:
    return f"unknown: no run here has measured it; --rate {stage}=TOKENS_PER_SECOND states it"


def _facts(found: Any) -> Any:
    """A forecast, or a part of it, as JSON."""
    from vlmdistill.pipelines.planning.resources import Memory, facts

    if isinstance(found, Memory):
        return facts(found)
    if is_dataclass(found):
        return {one.name: _facts(getattr(found, one.name)) for one in fields(found)}
    return (
        {name: _facts(one) for name, one in found.items()}
        if isinstance(found, dict)
        else found
    )
