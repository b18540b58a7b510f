"""How often a campaign repeats: few times in `make test`, often in `make test-nightly`."""

import os

THOROUGH = os.environ.get("VLMDISTILL_THOROUGH", "") not in ("", "0")


def count(few: int, many: int) -> int:
    """`many` if VLMDISTILL_THOROUGH is set to anything but 0, else `few`."""
    return many if THOROUGH else few
