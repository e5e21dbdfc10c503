"""`python -m panther_compile`: the command line."""

import sys

from panther_compile.cli import main

sys.exit(main())
