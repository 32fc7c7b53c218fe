"""``python -m fabricamp``: the same as the command ``fabricamp``."""

import sys

from fabricamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
