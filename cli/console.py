"""Shared by all commands: common options, results on stdout, progress and logs on stderr."""

import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from vlmdistill.cli import hints
from vlmdistill.stores.errors import printable
from vlmdistill.stores.errors import scaled as scaled
from vlmdistill.stores.errors import size as size
from vlmdistill.stores.progress import Progress, silent

if TYPE_CHECKING:
    from vlmdistill.pipelines.cluster.engine_environment import EngineName
    from vlmdistill.pipelines.cluster.pool import WorkerOptions
    from vlmdistill.pipelines.targets.checkpoints.registry import Options
    from vlmdistill.pipelines.workspace.workspace import Workspace

LAST_SEED = 2**32 - 1  # all random generators accept it
SIGINT_STATUS, SIGTERM_STATUS = 128 + signal.SIGINT, 128 + signal.SIGTERM
RECENT = 120  # seconds or reports by which the time left is estimated
QUIET_SECONDS = 30  # between two lines of progress if stderr is not a terminal

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Target model: a name, a hub id or a checkpoint folder.",
        envvar="VLMDISTILL_MODEL",
    ),
]
Runs = Annotated[
    str | None,
    typer.Option(
        "--runs",
        metavar="DIR|URL",
        help="Folder or URL of the workspaces; default: runs.",
        envvar="VLMDISTILL_RUNS",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Only say what would be done, and the time, memory and disk that it takes.",
    ),
]
Rate = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        metavar="STAGE=N",
        help="With --dry-run: tokens per second of responses, features or train, where no run here has "
        "measured them; may be repeated.",
    ),
]
Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway", help="Start also where free disk or memory will not suffice."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts", help="Prompts file; default: the workspace's prompts.parquet."
    ),
]
StoreName = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="Feature store, a folder or URL; default: the workspace's features/.",
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Name or folder of a trained drafter; default: plain decoding.",
    ),
]
Frames = Annotated[
    int | None,
    typer.Option(
        "--frames", help="Number of frames to sample from each video, instead of --fps."
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.")
]
SplitName = Annotated[
    Literal["train", "eval", "all"],
    typer.Option("--split", help="Split of the prompts to use."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=LAST_SEED, help="Random seed.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", min=1, help="Maximum length of a response, in tokens."
    ),
]
TrainedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Maximum length of a response to train on, in tokens; default: that of the responses that "
        "exist, or 1024.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Responses generated at a time; default: as many as a GPU's memory holds, without one 32.",
    ),
]
TreeShape = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="SHAPE|auto",
        help="Draft tree: total-depth-k, such as 30-3-8, or chain-5, or chain-8-0.3; auto: the one that "
        "`eval --tree auto` has kept; default: the drafter's own.",
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="paper|fair|fair-paper|small|demo|demo-paper|FILE.toml",
        help="Training settings, by name or in a file; default: demo for the demo targets, else "
        "paper, the settings of each method's own paper or code.",
    ),
]
ValidationShare = Annotated[
    float,
    typer.Option(
        "--validation-share",
        metavar="SHARE",
        min=0,
        max=0.9,
        help="Share of the samples that validate and are not trained on; --set validate_every=N.",
    ),
]
LIST = "separate several by commas, or repeat the option"
"""The end of the help of an option that takes a list."""
TRACKERS = ("tensorboard", "trackio", "wandb")
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="|".join(TRACKERS),
        callback=lambda names: _known_trackers(names or ()),
        help=f"Also log metrics to it, an extra of that name; {LIST}.",
    ),
]
AllowFailed = Annotated[
    float,
    typer.Option(
        "--allow-failed",
        metavar="SHARE",
        min=0,
        max=1,
        help="Exit 0 if at most this share of prompts fails.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Ray workers; 0: this process, without Ray; default: this process for few prompts or on one "
        "device, else as many as the GPUs, or cores, can hold.",
    ),
]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        help="Fail after this time without any live worker; default: 300.",
    ),
]
Dtype = Literal["bfloat16", "float16", "float32"]
Attention = Annotated[
    Literal["sdpa", "eager", "flash_attention_2"],
    typer.Option("--attention", help="Attention implementation of the target."),
]
TargetDtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(
        "--target-dtype",
        help="Dtype of the target; auto: bfloat16 on a GPU, else float32.",
    ),
]
Engine = Annotated[
    Literal["transformers", "vllm"],
    typer.Option(
        "--engine",
        help="What runs the target; vllm: fast on GPUs, needs `make engine` once.",
    ),
]
Thinking = Annotated[
    Literal["on", "off", "mixed"] | None,
    typer.Option(
        "--thinking",
        help="Whether the target reasons before it answers, where its chat template has a switch for it; "
        "mixed: at half of the prompts; default: as the template has it; in eval: as in training.",
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the target's decoding steps: a slow start, faster on a GPU.",
    ),
]


def separated(texts: Sequence[str] | None) -> list[str]:
    """The items of a list that is given as `a,b`, as several words, or both; each once."""
    items = [item.strip() for text in texts or () for item in text.split(",")]
    return [*dict.fromkeys(filter(None, items))]


Number = TypeVar("Number", int, float)


def numbers(option: str, texts: Sequence[str] | None, least: Number) -> list[Number]:
    """The numbers of a list, whole ones if `least` is; BadParameter names the option of any other text."""
    number = type(least)
    word = "whole number" if number is int else "number"
    values: list[Number] = []
    for text in separated(texts):
        value: Number | None = None
        with suppress(ValueError):
            value = number(text)
        if value is None or not least <= value < inf:
            raise typer.BadParameter(
                f"'{text}' is no {word} from {least:g} on: {LIST}", param_hint=option
            )
        if value not in values:
            values.append(value)
    return values


def _known_trackers(texts: Sequence[str]) -> list[str]:
    names = separated(texts)
    for name in names:
        if name not in TRACKERS:
            raise typer.BadParameter(
                f"there is no tracker '{name}': choose from {', '.join(TRACKERS)}"
            )
    return names


quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Whether to print results, errors and warnings alone."""

cleanup: ContextVar[ExitStack] = ContextVar("cleanup")
"""Contexts that the end of the command closes."""


opened: ContextVar["Workspace | None"] = ContextVar("opened", default=None)
"""The workspace of the command."""


def workspace(model: str, runs: str | None) -> "Workspace":
    """The workspace of a target, which is closed at the end of the command."""
    from vlmdistill.pipelines.workspace.workspace import Workspace

    of_target = Workspace.of(model, runs)
    opened.set(of_target)
    return cleanup.get().enter_context(of_target)


def beside(error: str) -> str:
    """If an error names the command's workspace and that is empty, the workspaces beside it, to append."""
    of_command = opened.get()
    if of_command is None or str(of_command.root) not in error:
        return ""
    others = of_command.beside()
    return f"; {others}" if others else ""


def loading(attention: str, dtype: str, *, compiled: bool = False) -> "Options":
    """How the target is loaded."""
    return {"attention": attention, "dtype": dtype, "compiled": compiled}


def worker_options(
    workers: int | None,
    wait: float | None,
    attention: str = "sdpa",
    dtype: str = "auto",
    engine: "EngineName" = "transformers",
) -> "WorkerOptions":
    """How many workers a stage uses, how each loads the target, and what runs it."""
    from vlmdistill.pipelines.cluster.pool import WorkerOptions

    options = WorkerOptions(
        workers=workers, load=loading(attention, dtype), engine=engine
    )
    return options if wait is None else replace(options, wait=wait)


def result(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print facts on stdout: as JSON, or as one `name  value` line each."""
    if as_json:
        typer.echo(json.dumps(facts, default=str))
        return
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        words = name.replace("_", " ")
        echo(f"{words:<{width}}  {_value_text(value)}")


def _value_text(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, Mapping):
        counts = [f"{key} {_short(count)}" for key, count in value.items()]
        return ", ".join(counts) or "none"
    if isinstance(value, tuple | list):
        return ", ".join(map(_short, value)) or "none"
    return _short(value)


def rows(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout in aligned columns, plain enough for grep and cut."""
    table = [[_short(cell) for cell in line] for line in [header, *lines]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        echo("  ".join(padded).rstrip())


def echo(text: str) -> None:
    """Print a line on stdout. Control characters are escaped, since names may come from others."""
    typer.echo(plain(hints.in_text(text)))


def note(text: str) -> None:
    """Print a line on stderr, as `echo`."""
    typer.echo(plain(hints.in_text(text)), err=True)


def remark(text: str) -> None:
    """Print a line on stderr that --quiet leaves out."""
    if not quiet.get():
        note(text)


def plain(text: str) -> str:
    """Lines of text in which control characters are escaped."""
    return "\n".join(map(printable, text.split("\n")))


class CommandTerminated(SystemExit):
    """SIGTERM has ended the command. When all is closed, the process dies of it, as without a handler."""


class CommandStopped(SystemExit):
    """The command was interrupted or terminated; `message` says which work is kept."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message


@contextmanager
def progress(action: str, unit: str, kept_in: str = "") -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, else a line every `QUIET_SECONDS`.

    If results are kept in `kept_in` as they come, an interrupt raises CommandStopped with that path.
    """
    kept = "no work was started"

    def report(done: int, total: int, remark: str = "") -> None:
        nonlocal kept
        kept = f"{done} of {total} {unit} are done and kept in {kept_in}"
        show(done, total, remark)

    try:
        with _shown(action, unit) as show:
            yield report
    except (KeyboardInterrupt, SystemExit) as stop:
        if not kept_in:
            raise
        code = getattr(stop, "code", None)
        if not isinstance(code, int):
            code = SIGINT_STATUS
        raise CommandStopped(
            code, f"stopped: {kept}; run the same command to continue"
        ) from None


def _shown(action: str, unit: str) -> AbstractContextManager[Progress]:
    if quiet.get():
        return nullcontext(silent)
    if sys.stderr.isatty():
        return _bar(action, unit)
    return nullcontext(_ProgressLines(action, unit))


class _ProgressLines:
    """Prints a line of progress now and then."""

    def __init__(self, action: str, unit: str) -> None:
        self.action = action
        self.unit = unit
        self.speed = _Speed()
        self.last = time.monotonic()

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        rate, time_left = self.speed(done, total)
        now = time.monotonic()
        if now - self.last < QUIET_SECONDS:
            return
        self.last = now
        count = f"{self.action}: {done}/{total or '?'} {self.unit}"
        parts = [count, rate, time_left, remark]
        note(", ".join(part for part in parts if part))


class _Speed:
    """The rate and the time left, by the last `RECENT` seconds or reports, whichever is longer.

    Loading and the work of an earlier run do not count, and a stage that is slower soon shows.
    """

    def __init__(self) -> None:
        # Time and work done, a second apart.
        self.marks: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def __call__(self, done: int, total: int) -> tuple[str, str]:
        now = time.monotonic()
        last_time = self.marks[-1][0] if self.marks else -inf
        if now - last_time >= 1:
            self.marks.append((now, done))
        start, done_at_start = self.marks[0]
        seconds = max(1e-9, now - start)
        rate = (done - done_at_start) / seconds
        if not rate:
            return "", ""
        rate_text = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        if not total:
            return rate_text, ""
        return rate_text, f"{_clock((total - done) / rate)} left"


@contextmanager
def _bar(action: str, unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn(unit + " {task.fields[remark]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[time_left]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(action, total=None, remark="", time_left="")
        speed = _Speed()

        def show(done: int, total: int, remark: str = "") -> None:
            rate, time_left = speed(done, total)
            bar.update(
                task,
                completed=done,
                total=total or None,
                remark=f"{rate} {remark}".strip(),
                time_left=time_left,
            )

        yield show


def waiting(reason: str) -> AbstractContextManager[object]:
    """On a terminal, show why the command waits."""
    if quiet.get() or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(reason)


class _PlainFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(hints.in_text(super().formatMessage(record)))


class _ToStderr(logging.Handler):
    """Logs to the current `sys.stderr`, even if it has been replaced since."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except (OSError, ValueError):  # it was closed
            self.handleError(record)


def log_to_stderr(debug: bool) -> None:
    """Send the project's log lines to stderr."""
    logger = logging.getLogger("vlmdistill")
    if not logger.handlers:
        handler = _ToStderr()
        handler.setFormatter(_PlainFormatter("%(message)s"))
        logger.addHandler(handler)
    if debug:
        logger.setLevel(logging.DEBUG)
    else:
        logger.setLevel(logging.WARNING if quiet.get() else logging.INFO)
    logger.propagate = False


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
