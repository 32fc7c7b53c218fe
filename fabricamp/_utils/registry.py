"""Registries of plug-ins by name; the error for an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from fabricamp.errors import ConfigError, meant, nearest

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Maps a name such as ``"ddp"`` to the function that builds the part with its default options.

    Third parties register names through the entry-point group ``fabricamp.<kind>`` (``strategies``, ``precision``, ``callbacks``).
    """

    def __init__(self, kind: str, argument: str) -> None:
        self._kind = kind
        self._argument = argument
        self._builders: dict[str, Callable[[], Part]] = {}
        self._third_parties_loaded = False

    def add(self, name: str, builder: Callable[[], Part]) -> None:
        """Registers ``builder`` under ``name``; raises :class:`ConfigError` if the name is taken."""
        if name in self._builders:
            raise ConfigError(f"{self._argument}={name!r} is already registered; choose another name")
        self._builders[name] = builder

    def build(self, name: str) -> Part:
        """Returns a new part called ``name``; raises :class:`ConfigError` with the known names and the nearest one."""
        builder = self._builders.get(name)
        if builder is None:
            self._load_third_parties()
            builder = self._builders.get(name)
        if builder is None and (cure := meant(self._argument, name)):
            raise ConfigError(f"{self._argument}={name!r} is not known{cure}")
        if builder is None:
            known = ", ".join(repr(other) for other in self.names()) or "none"
            raise ConfigError(
                f"{self._argument}={name!r} is not known{nearest(name, self._builders)} "
                f"(known: {known}; or pass an object with options)"
            )
        return builder()

    def names(self) -> list[str]:
        """Returns the registered names, including those of third parties."""
        self._load_third_parties()
        return list(self._builders)

    def _load_third_parties(self) -> None:
        if self._third_parties_loaded:
            return
        self._third_parties_loaded = True
        for point in entry_points(group=f"fabricamp.{self._kind}"):
            self.add(point.name, point.load())
