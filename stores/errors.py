"""Errors that are the user's to mend: one line that says what is wrong and what to do."""


class VlmdistillError(Exception):
    """Base of every error shown to a user as one line, without a traceback."""


class StoreError(VlmdistillError):
    """The feature store is missing, corrupt, or of another origin than what is asked of it."""


class NewerError(StoreError):
    """What a later version of this program has written: nothing is wrong with it."""


class DataError(VlmdistillError):
    """Input files (prompts, responses, configurations) cannot be used as they are."""


class TargetError(VlmdistillError):
    """The target VLM cannot be found, loaded or used."""


class TrainingError(VlmdistillError):
    """A drafter cannot be trained, resumed or loaded with what was given."""


def one_line(error: BaseException) -> str:
    """What an error says, whatever breaks of lines it has."""
    return " ".join(str(error).split())
