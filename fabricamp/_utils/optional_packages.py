"""Packages that only some programs need, imported where they do."""

from __future__ import annotations

import importlib
from typing import Any

from fabricamp.errors import NotInstalledError


def load(module: str, missing: str) -> Any:
    """Returns ``module``; raises :class:`NotInstalledError` with the words ``missing`` if its package is not installed.

    A package that is there, and lacks another one, raises its own error.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise NotInstalledError(missing) from None
