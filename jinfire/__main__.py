"""`python -m jinfire`, and the installed `jinfire`."""

import sys

from jinfire.cli import main

if __name__ == "__main__":
    sys.exit(main())
