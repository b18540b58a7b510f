"""Errors for the user: one line that says what is wrong and what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class VlmdistillError(Exception):
    """Base of every error shown to a user as one line, without a traceback."""

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().splitlines()))


FOR_USER = (VlmdistillError, OSError)  # errors whose text is shown as one line


class StoreError(VlmdistillError):
    """The feature store is missing, corrupt, or of another origin than required."""


class VersionError(StoreError):
    """The data was written in another version of the format than this program reads."""


class RacedError(StoreError):
    """Another process has changed the same files meanwhile: another attempt may succeed."""


class DataError(VlmdistillError):
    """Input files (prompts, responses, configurations) cannot be used as they are."""


class LostError(DataError):
    """Another machine has published a version of the same folder meanwhile; the local changes are kept."""


class TargetError(VlmdistillError):
    """The target VLM cannot be found, loaded or used."""


class PromptError(TargetError):
    """One prompt of a batch, number `at`, cannot be run on this machine; the others can."""

    def __init__(self, text: str, at: int = 0) -> None:
        super().__init__(text)
        self.at = at


class TrainingError(VlmdistillError):
    """A drafter cannot be trained, resumed or loaded with the given settings or files."""


class LostRankError(TrainingError):
    """Training has ended on this rank because another rank died."""


class StoppedError(VlmdistillError):
    """The user or the system has ended the work by a signal; the text says which results are kept."""

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.signal = signal


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Say which file it was when a disk is full or fails: of a write, the system does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class PanicError(VlmdistillError):
    """A library that is written in Rust has failed on its input."""


@contextmanager
def without_panics() -> Iterator[None]:
    """Turn a panic of such a library into a PanicError.

    pyo3 raises it as a type of its own that is no Exception, so that it passes every handler of errors.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError(f"a library failed: {one_line(error)[:300]}") from error


def printable(text: str) -> str:
    """Text with all that controls a terminal, such as ESC or bidirectional marks, escaped as in Python."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, safe for a terminal."""
    return printable(" ".join(str(error).split()))


def lone_surrogate(text: str) -> int | None:
    """The position of an unpaired surrogate, from 1. JSON can hold one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start + 1
    return None


def scaled(count: float, units: Sequence[str], space: str = " ") -> str:
    """A number with three digits and its unit; each of `units` is 1000 of the one before it."""
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:.3g}{space}{unit}"
        count /= 1000
    return f"{count:.3g}{space}{units[-1]}"


def size(count: float) -> str:
    """A number of bytes."""
    return scaled(count, ("B", "kB", "MB", "GB", "TB"))
