"""What a stage reports when prompts failed."""

from collections.abc import Mapping

from vlmdistill.stores.errors import DataError

LISTED_CAUSES = 2  # in the error message


def check_failed(failed: Mapping[str, str], total: int, allowed: float) -> None:
    """DataError with the first causes if more than a share `allowed` (0 to 1) of `total` prompts failed."""
    if len(failed) <= allowed * total:
        return
    causes = list(dict.fromkeys(failed.values()))
    more = (
        f"; and {len(causes) - LISTED_CAUSES} more causes"
        if len(causes) > LISTED_CAUSES
        else ""
    )
    share = min(
        1.0, -(-1000 * len(failed) // total) / 1000
    )  # rounded up, so that it allows what failed
    raise DataError(
        f"{len(failed)} of {total} prompts failed: {'; '.join(causes[:LISTED_CAUSES])}{more}. All others are "
        f"done. Run the same command to retry, or add --allow-failed {share:g} to continue without them"
    )
