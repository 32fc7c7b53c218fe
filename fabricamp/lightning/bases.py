"""Checks whether objects derive from Lightning's classes, by class and module names, without an import of Lightning."""

from __future__ import annotations

import sys
from typing import Final

PACKAGES: Final = ("lightning", "pytorch_lightning")
"""The packages of Lightning's base classes, as in ``lightning.pytorch.core.module`` and ``pytorch_lightning.core.module``."""

MODULE: Final = ("core.module", "LightningModule")
DATA: Final = ("core.datamodule", "LightningDataModule")
CALLBACK: Final = ("callbacks.callback", "Callback")
_BASES: Final = (MODULE, DATA, CALLBACK)


def path_of(kind: type) -> tuple[str, str] | None:
    """Returns (path, name) of a class of Lightning, such as ("core.module", "LightningModule"); None for any other class."""
    package, _, path = kind.__module__.partition(".")
    if package not in PACKAGES:
        return None
    if package == "lightning":
        path = path.removeprefix("pytorch.")
    return path, kind.__name__


def lightnings_base(kind: type) -> type | None:
    """Returns the class LightningModule, LightningDataModule or Callback that ``kind`` is or derives from, or None."""
    if not any(package in sys.modules for package in PACKAGES):
        return None
    return next((base for base in kind.__mro__ if path_of(base) in _BASES), None)


def derives_from(value: object, base: tuple[str, str]) -> bool:
    """Returns whether ``value`` is an instance of Lightning's ``base``, such as :data:`MODULE`, or of a derived class."""
    own_base = lightnings_base(type(value))
    return own_base is not None and path_of(own_base) == base


def own_class(value: object) -> type | None:
    """Returns the first class of Lightning in the MRO of an object's class, or None."""
    return next((one for one in type(value).__mro__ if path_of(one)), None)
