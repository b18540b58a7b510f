"""`python -m vlmdistill`: the `vlmdistill` command."""

import sys

from vlmdistill.cli.entry import main

sys.exit(main())
