"""What every verb shares: results on stdout, progress and logs on stderr."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.options import Options

LAST_SEED = 2**32 - 1  # that every generator of random numbers takes
QUIET_SECONDS = 30  # between two lines of progress where no bar can be drawn

Model = Annotated[str, typer.Option("--model", "-m", help="Target: a name, a hub id or a checkpoint folder.")]
Runs = Annotated[
    str | None, typer.Option("--runs", help="Folder of all workspaces.", envvar="VLMDISTILL_RUNS")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Attention(StrEnum):
    """Kernels of the target's attention."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class Dtype(StrEnum):
    """Number formats of what is written."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class TargetDtype(StrEnum):
    """Number formats that the target runs in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


Kernels = Annotated[Attention, typer.Option("--attention", help="Attention kernels of the target.")]
Precision = Annotated[
    TargetDtype,
    typer.Option("--target-dtype", help="What the target runs in; auto: bfloat16 on a GPU, else float32."),
]


Compiled = Annotated[
    bool,
    typer.Option("--compile", help="Compile the target's decoding steps: slow to start; for GPUs."),
]


def loading(attention: Attention, dtype: TargetDtype, *, compiled: bool = False) -> "Options":
    """How the target is to be loaded."""
    return {"attention": attention.value, "dtype": dtype.value, "compiled": compiled}


class Side(StrEnum):
    """Which prompts a verb works on."""

    train = "train"
    eval = "eval"
    all = "all"


def result(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print facts on stdout: JSON for programs, else one `name  value` line each."""
    if as_json:
        typer.echo(json.dumps(facts, default=str))
        return
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_short(count)}" for key, count in value.items()) or "none"
        elif isinstance(value, tuple | list):
            value = ", ".join(map(_short, value)) or "none"
        typer.echo(f"{name.replace('_', ' '):<{width}}  {_short(value)}")


def rows(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout in aligned columns, plain enough for grep and cut."""
    cells = [[_short(cell) for cell in line] for line in [header, *lines]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def note(text: str) -> None:
    """Tell the user something on stderr."""
    typer.echo(text, err=True)


class Report(Protocol):
    """Hears how far something is."""

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        """`total` 0 means unknown."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[Report]:
    """A bar with rate and time left on stderr; a line now and then where stderr is not a terminal.

    Yields `report(done, total, remark)`, to be called as often as one likes.
    """
    if sys.stderr.isatty():
        with _bar(what, unit) as bar:
            yield bar
        return
    last = start = time.monotonic()
    first: int | None = None

    def report(done: int, total: int, remark: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        first = done if first is None else first  # what an earlier run did is no measure of speed
        if now - last < QUIET_SECONDS:
            return
        last, rate = now, (done - first) / (now - start)
        left = f", {_clock((total - done) / rate)} left" if rate and total else ""
        note(f"{what}: {done}/{total or '?'} {unit}, {rate:.1f}/s{left}{', ' if remark else ''}{remark}")

    yield report


@contextmanager
def _bar(what: str, unit: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn(unit + " {task.fields[remark]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, remark="", left="")
        start, first = time.monotonic(), -1

        def report(done: int, total: int, remark: str = "") -> None:
            nonlocal first
            first = done if first < 0 else first
            rate = (done - first) / max(1e-9, time.monotonic() - start)
            left = f"{_clock((total - done) / rate)} left" if rate and total else ""
            shown = f"{rate:.1f}/s {remark}" if rate else remark
            bar.update(task, completed=done, total=total or None, remark=shown, left=left)

        yield report


def log_to_stderr(debug: bool) -> None:
    """Send the project's own log lines to stderr."""
    logger = logging.getLogger("vlmdistill")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
