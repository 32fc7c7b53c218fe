"""Checkpoint file names: a template such as ``"{epoch}-{val_loss:.2f}"`` filled with metrics."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping

from torch import Tensor

from fabricamp.errors import ConfigError


class FileName:
    """A template, parsed once; raises :class:`ConfigError` if numbers cannot fill its fields."""

    def __init__(self, template: str, equals: str = "=", *, insert_names: bool = True) -> None:
        self.fields: tuple[str, ...] = ()
        self._template = template
        self._equals = equals
        self._insert_names = insert_names
        try:
            self._pieces = [(text, name, spec or "") for text, name, spec, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise ConfigError(
                f"filename={template!r} is no template ({error}); write it like '{{epoch}}-{{val_loss:.2f}}'"
            ) from error
        for _, name, spec in self._pieces:
            if name is not None:
                self._check(name, spec)
                self.fields += (name,)

    def fill(self, metrics: Mapping[str, Tensor | float]) -> str:
        """Returns the name for these metrics; a metric that was not logged is written as 0, as in Lightning."""
        return "".join(text + self._show(name, spec, metrics) for text, name, spec in self._pieces)

    def _show(self, name: str | None, spec: str, metrics: Mapping[str, Tensor | float]) -> str:
        if name is None:
            return ""
        value = metrics.get(name, 0)
        shown = _format(value.item() if isinstance(value, Tensor) else value, spec)
        # A slash in a metric's name would create a folder.
        return f"{name.replace('/', '_')}{self._equals}{shown}" if self._insert_names else shown

    def _check(self, name: str, spec: str) -> None:
        if not name:
            raise ConfigError(
                f"filename={self._template!r} has an empty {{}}; name the metric, as in '{{epoch}}-{{val_loss:.2f}}'"
            )
        try:
            _format(1.0, spec)
        except ValueError as error:
            raise ConfigError(
                f"filename={self._template!r} cannot show {name!r} as {spec!r} ({error}); use a format like '.2f'"
            ) from error


def _format(value: float, spec: str) -> str:
    """Formats ``value`` by ``spec``; integer formats such as ``04d`` also accept floats."""
    if spec.endswith(("d", "x", "b", "o", "n")) and isinstance(value, float):
        return format(int(value), spec) if math.isfinite(value) else str(value)
    return format(value, spec)
