"""Where the `vlmdistill` command begins: whoever interrupts it while it loads is told so in one line."""

import sys

INTERRUPTED = "interrupted: nothing is lost, the same command goes on from here"


def main() -> int:
    """Run the command line; the exit status, see `cli.main`."""
    try:
        from vlmdistill.cli import main as command

        return command.main()
    except KeyboardInterrupt:
        sys.stderr.write(f"{INTERRUPTED}\n")
        return 130
