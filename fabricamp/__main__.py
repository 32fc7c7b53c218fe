"""Runs the command ``fabricamp`` as ``python -m fabricamp``."""

import sys

from fabricamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
