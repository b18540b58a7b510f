"""The entry point of the `vlmdistill` command, which handles an interrupt while the command loads."""

import os
import sys


def main() -> int:
    """Run the command line; see `cli.main` for the exit status."""
    try:
        from vlmdistill.cli import main as command

        status = command.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: no work was started\n")
        status = 130
    if "RANK" in os.environ:  # of torchrun
        sys.stdout.flush()  # then end at once: in the teardown, gloo's threads may abort the process
        os._exit(status)
    return status
