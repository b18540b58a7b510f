"""The entry point of the `vlmdistill` command, which handles an interrupt while the command loads."""

import sys


def main() -> int:
    """Run the command line; see `cli.main` for the exit status."""
    try:
        from vlmdistill.cli import main as command

        return command.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: no work was started\n")
        return 130
