"""Functions on the objects that Fabric wraps, which do not exist here."""

from __future__ import annotations

from typing import Any

from fabricamp.lightning.refused import Refused


class _FabricModule(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric._FabricModule"


class _FabricOptimizer(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric._FabricOptimizer"


class _FabricDataLoader(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric._FabricDataLoader"


def is_wrapped(obj: object) -> bool:
    """Returns False: only Fabric wraps modules, optimizers and loaders, and it is not offered."""
    return False


def _unwrap_objects(collection: Any) -> Any:
    """Returns the objects unchanged: none is wrapped."""
    return collection
