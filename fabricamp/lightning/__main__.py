"""Runs an unchanged Lightning script: ``python -m fabricamp.lightning train.py --args``, or under torchrun with ``-m``."""

from __future__ import annotations

import sys
from typing import Final

from fabricamp._utils import script
from fabricamp.lightning import names

_WHAT: Final = """Runs a script, or with -m a module, in which lightning.pytorch and pytorch_lightning are fabricamp,
whether Lightning is installed or not."""


def main() -> None:
    """Runs the script or module of the command line as ``__main__``, as Python does."""
    script.run_as_main(sys.argv[1:], "fabricamp.lightning", _WHAT, _prepare)


def _prepare() -> None:
    names.install()
    sys.path.insert(1, names.PATH)


if __name__ == "__main__":
    script.end_as_python_does(main, names.__file__)
