"""Which objects are of classes that derive from Lightning's: told by names, Lightning is never imported for it."""

from __future__ import annotations

import sys
from typing import Final

PACKAGES: Final = ("lightning", "pytorch_lightning")
"""Where Lightning's base classes stand: ``lightning.pytorch.core.module`` and ``pytorch_lightning.core.module``, for one."""

MODULE: Final = ("core.module", "LightningModule")
DATA: Final = ("core.datamodule", "LightningDataModule")
CALLBACK: Final = ("callbacks.callback", "Callback")
_BASES: Final = (MODULE, DATA, CALLBACK)


def place_of(kind: type) -> tuple[str, str] | None:
    """Returns path and name of a class of Lightning's own, such as ("core.module", "LightningModule"); None of any other."""
    package, _, path = kind.__module__.partition(".")
    if package not in PACKAGES:
        return None
    return (path.removeprefix("pytorch.") if package == "lightning" else path), kind.__name__


def lightnings_base(kind: type) -> type | None:
    """Returns Lightning's module, data module or callback that ``kind`` is, or derives from; None where it does not."""
    if not any(package in sys.modules for package in PACKAGES):
        return None
    return next((one for one in kind.__mro__ if place_of(one) in _BASES), None)


def derives_from(value: object, base: tuple[str, str]) -> bool:
    """Whether ``value`` is an object of Lightning's ``base``, such as :data:`MODULE`, or of a class derived from it."""
    found = lightnings_base(type(value))
    return found is not None and place_of(found) == base


def own_class(value: object) -> type | None:
    """Returns the nearest class of Lightning's own of an object's; None where it has none."""
    return next((one for one in type(value).__mro__ if place_of(one)), None)
