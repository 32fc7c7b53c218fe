"""``self.log`` without a module."""

from __future__ import annotations

import inspect

from fabricamp.metrics.slots import Arguments
from fabricamp.module import TrainingModule

__all__ = ["log"]

_DEFAULTS = {name: one.default for name, one in inspect.signature(TrainingModule.log).parameters.items()}


def log(metrics, name, value, batch_size=None, **options):
    """Logs like ``TrainingModule.log(name, value, batch_size=batch_size, **options)``."""
    unknown = options.keys() - _DEFAULTS.keys()
    assert not unknown, unknown
    given = {**_DEFAULTS, **options, "name": name}
    metrics.keep(tuple(given[field] for field in Arguments._fields), value, batch_size)
