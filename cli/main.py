"""The `vlmdistill` command: its subcommands, and how errors reach the user.

The file of a command imports heavy packages inside its function, so that `vlmdistill --help` is fast.
"""

import errno
import functools
import inspect
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmdistill.cli import console, hints, store, target
from vlmdistill.cli.adapt import adapt
from vlmdistill.cli.doctor import doctor
from vlmdistill.cli.evaluate import evaluate
from vlmdistill.cli.explain import explain
from vlmdistill.cli.export import export
from vlmdistill.cli.features import features
from vlmdistill.cli.follow import follow
from vlmdistill.cli.forget import forget
from vlmdistill.cli.generate import generate
from vlmdistill.cli.harvest import harvest
from vlmdistill.cli.importing import import_drafter
from vlmdistill.cli.listing import list_names
from vlmdistill.cli.plan import plan
from vlmdistill.cli.prompts import prompts
from vlmdistill.cli.report import report
from vlmdistill.cli.responses import responses
from vlmdistill.cli.run import run
from vlmdistill.cli.serve import serve
from vlmdistill.cli.status import status
from vlmdistill.cli.train import train
from vlmdistill.cli.usage import CommandGroup
from vlmdistill.stores.errors import (
    FOR_USER,
    StoppedError,
    VlmdistillError,
    one_line,
    without_panics,
)

GROUPS = {"target": target.app, "store": store.app}
COMMANDS = (
    plan,
    prompts,
    responses,
    features,
    train,
    import_drafter,
    evaluate,
    explain,
    report,
    generate,
    serve,
    export,
    harvest,
    adapt,
    follow,
    forget,
    run,
    status,
    list_names,
    doctor,
)
# Names that a Python function cannot or should not have.
KEYWORDS = {evaluate: "eval", import_drafter: "import", list_names: "list"}
VERBS = {KEYWORDS.get(verb, verb.__name__): verb for verb in COMMANDS}

KEPT = "finished work is kept; run the same command to continue"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors of the disk, which no bug causes."""
KEEPING = ("responses", "features", "merge", "push", "pull", "run", "harvest", "adapt")
AFTER_INTERRUPT = dict.fromkeys(KEEPING, KEPT) | {
    "prompts": "nothing was imported",
    "train": "no step was done",
}
"""What remains after an interrupt, for commands that do not report that themselves."""

app = typer.Typer(
    name="vlmdistill",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # print square brackets as they are
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"vlmdistill {metadata.version('vlmdistill')}")
        raise typer.Exit


@app.callback()
def vlmdistill(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the traceback of an error; may follow the subcommand."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            help="Print results, errors and warnings alone; may follow the subcommand.",
        ),
    ] = False,
) -> None:
    """Train, verify and compare drafters for speculative decoding of vision-language models.

    The flow: prompts -> responses -> features -> train -> eval -> report. Each command reads and writes the
    workspace runs/<model>/ and does only what is missing. `vlmdistill run` runs all of them.
    """
    console.quiet.set(quiet)
    console.log_to_stderr(debug)


def _with_local_paths(verb: Callable[..., None]) -> Callable[..., None]:
    """The command, which rejects URLs given for path options (pathlib would collapse `//`)."""

    @functools.wraps(verb)
    def run(**arguments: Any) -> None:
        for name, value in arguments.items():
            values = value if isinstance(value, list) else [value]
            for path in values:
                if isinstance(path, Path) and re.match(r"\w+:/", str(path)):
                    raise typer.BadParameter(
                        f"{path} is a URL: give a local path", param_hint=f"--{name}"
                    )
        verb(**arguments)

    return run


for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)
for _name, _verb in VERBS.items():
    app.command(_name)(_with_local_paths(_verb))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # These two may stand anywhere; typer takes them before the subcommand.
    anywhere = [option for option in ("--debug", "--quiet") if option in words]
    words = [*anywhere, *(word for word in words if word not in anywhere)]
    try:
        with without_panics():
            _run(words)
    except SystemExit as stop:
        return _after_exit(stop, words)
    except BrokenPipeError:
        # The reader of our output has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except StoppedError as stop:
        console.note(f"interrupted: {one_line(stop)}")
        return 128 + stop.signal
    except FOR_USER as error:
        _report(error, words, debug="--debug" in anywhere)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        requirement = _requirement(package)
        if "--debug" in anywhere or not requirement:
            raise
        console.note(
            f"error: the package {package} is not installed: pip install '{requirement}'"
        )
        return 1
    return 0


def _run(words: Sequence[str]) -> None:
    options = hints.given(words)
    hints.repeated.set({name: _taken(verb, options) for name, verb in VERBS.items()})
    console.opened.set(None)
    with ExitStack() as cleanup:
        console.cleanup.set(cleanup)
        app(words, prog_name="vlmdistill")


def _taken(verb: Callable[..., None], options: Mapping[str, str]) -> dict[str, str]:
    """The options that a command accepts."""
    names = inspect.signature(verb).parameters
    return {
        name: value
        for name, value in options.items()
        if name.removeprefix("--") in names
    }


def _after_exit(stop: SystemExit, words: Sequence[str]) -> int:
    """The exit status of a command that has ended itself, or was interrupted or terminated."""
    if isinstance(stop, console.CommandTerminated):
        signal.raise_signal(signal.SIGTERM)
    if isinstance(stop, console.CommandStopped):
        console.note(stop.message)
    elif stop.code in (console.SIGINT_STATUS, console.SIGTERM_STATUS):
        verbs = [word for word in words[:3] if word in AFTER_INTERRUPT]
        remains = f": {AFTER_INTERRUPT[verbs[0]]}" if verbs else ""
        console.note(f"interrupted{remains}")
    return stop.code if isinstance(stop.code, int) else 0


def _report(
    error: VlmdistillError | OSError, words: Sequence[str], debug: bool
) -> None:
    """Print an error meant for the user, and where the traceback of a surprising one is."""
    if debug:
        traceback.print_exc()
    log = ""
    if isinstance(error, OSError) and not debug and _is_surprise(error, words):
        log = _logged()
    console.note(f"error: {_line(error)}{console.beside(str(error))}{log}")


def _is_surprise(error: OSError, words: Sequence[str]) -> bool:
    """Whether an error may come from a bug: it is not of the disk, and not of a file of the user."""
    return error.errno not in DISK_ERRORS and not _is_of_users_file(error, words)


def _requirement(package: str) -> str:
    """The requirement that installs a missing dependency: one of our extras, or the package; else empty."""
    from importlib import metadata

    # Of a module a_b, the distribution is a-b or begins with that, as vl-convert-python.
    name = re.escape(package.replace("_", "-"))
    line_of_package = re.compile(rf"{name}\b[^;]*(?:;.*extra == [\"'](\w+)[\"'])?$")
    for line in metadata.requires("vlmdistill") or ():
        if match := line_of_package.match(line):
            extra = match[1]
            return f"vlmdistill[{extra}]" if extra else package
    return ""


def _is_of_users_file(error: OSError, words: Sequence[str]) -> bool:
    """Whether the file is below the current folder, or below or above a path of the command line."""
    if not isinstance(error.filename, str) or "\0" in error.filename:
        return False
    file = Path(error.filename).resolve()
    for word in ("", *words):
        if "\0" in word:
            continue
        path = Path(word.rpartition("=")[2]).resolve()
        if file.is_relative_to(path) or path.is_relative_to(file):
            return True
    return False


def _logged() -> str:
    """Write the traceback of the current error to a new temporary file; the end of the error's line."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="vlmdistill-", suffix=".log", delete=False
        ) as file:
            file.write(traceback.format_exc())
    except OSError:  # such as a full disk
        return "; --debug shows where"
    return f"; if you did not expect this, report it with the traceback in {file.name}"


def _line(error: VlmdistillError | OSError) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return one_line(error) or type(error).__name__
