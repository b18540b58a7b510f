"""Plans of stages as a table or as JSON: the output of `plan` and of every `--dry-run`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.planning.stages import StagePlan

HEADER = (
    "stage",
    "done",
    "to do",
    "tokens",
    "time",
    "tokens/s",
    "rate",
    "memory of a process",
    "disk",
)
MARKS = {"counted": "", "estimated": "about ", "assumed": "at most "}
"""Before a number of tokens, by its certainty."""


def show(stages: "Sequence[StagePlan]", as_json: bool) -> None:
    """Print what a command would do, and how much time, memory and disk that takes."""
    if as_json:
        from vlmdistill.pipelines.planning.stages import to_dict

        console.result(to_dict(stages), as_json)
        return
    table(stages)
    console.echo("")
    from vlmdistill.pipelines.planning.resources import shown

    for stage in stages:
        details = f"{stage.details}; " if stage.details else ""
        console.echo(f"{stage.name}: {details}memory {shown(stage.memory)}")


def table(stages: "Sequence[StagePlan]", download_bytes: int = 0) -> None:
    """Print a download, stages, their sum, and what stands in their way."""
    from vlmdistill.pipelines.planning.stages import total

    lines = [_row(stage) for stage in stages]
    if download_bytes:
        cells = ["download", "", "weights", "", "not counted", "", "", ""]
        lines.insert(0, [*cells, size(download_bytes)])
    if len(lines) > 1:
        seconds = total(stage.seconds for stage in stages)
        disk_bytes = total([download_bytes, *(stage.disk_bytes for stage in stages)])
        lines.append(
            ["in all", "", "", "", time(seconds), "", "", "", size(disk_bytes)]
        )
    console.rows(HEADER, lines)
    for stage in stages:
        _note(stage)
    if any(stage.seconds is None and stage.tokens is not None for stage in stages):
        console.note(
            "time is unknown where nothing was measured here: state tokens per second, such as "
            "--rate train=20000"
        )


def _row(stage: "StagePlan") -> list[str]:
    speed = stage.speed
    memory = console.size(stage.memory.total)
    if stage.memory.lacking:
        memory += ", does not fit"
    tokens = "unknown"
    if stage.tokens is not None:
        count = console.scaled(stage.tokens, ("", "k", "M", "B"), "")
        tokens = f"{MARKS[stage.certainty]}{count}"
    to_do = "by epochs" if stage.to_do is None else str(stage.to_do)
    return [
        stage.name,
        str(stage.done),
        f"{to_do} {stage.unit}" if stage.to_do is not None else to_do,
        tokens,
        time(stage.seconds),
        f"{speed.tokens_per_second:.0f}" if speed else "-",
        speed.source if speed else "unknown",
        memory,
        size(stage.disk_bytes),
    ]


def _note(stage: "StagePlan") -> None:
    """Warn if the disk is too small."""
    from vlmdistill.pipelines.planning.resources import free_disk

    if not stage.folder or stage.disk_bytes is None:
        return
    free_bytes = free_disk(stage.folder)
    if free_bytes is not None and stage.disk_bytes > free_bytes:
        console.note(
            f"warning: {stage.name} does not fit on the disk of {stage.folder}: {stage.advice}"
        )


def time(seconds: float | None) -> str:
    """A duration in its unit."""
    if seconds is None:
        return "unknown"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} hours"


def size(count: float | None) -> str:
    """A number of bytes."""
    return "unknown" if count is None else console.size(count)
