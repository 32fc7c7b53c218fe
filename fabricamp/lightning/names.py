"""An import hook: ``import lightning.pytorch as pl`` finds fabricamp, in this process and in those that it spawns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricamp.errors import ConfigError
from fabricamp.lightning.bases import PACKAGES
from fabricamp.not_offered import words_for

if TYPE_CHECKING:
    from types import ModuleType

PATH: Final = str(Path(__file__).parent / "_path")
"""A folder with modules of Lightning's names: a spawned process gets this one's ``sys.path``, and finds the hook by it."""


class _Loader:
    """Puts fabricamp's module into ``sys.modules`` under Lightning's name; without a home it is the package around them."""

    def __init__(self, home: str | None) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own kind of module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the new module: what is in ``sys.modules`` behind this is what is imported."""
        if self._home is not None:
            sys.modules[module.__name__] = importlib.import_module(self._home)
            return
        fabricamp = importlib.import_module("fabricamp")
        vars(module).update(__all__=list(fabricamp.__all__), __doc__=fabricamp.__doc__, __getattr__=_of_package)


def _of_package(name: str) -> Any:
    """What ``import lightning as L`` offers: all that ``lightning.pytorch`` does, and that itself."""
    if name == "pytorch":
        return importlib.import_module("lightning.pytorch")
    return getattr(importlib.import_module("fabricamp"), name)


class Names:
    """Stands first on ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Finds fabricamp's module of Lightning's name; raises as the import of fabricamp's own would where there is none."""
        package, *parts = name.split(".")
        if package not in PACKAGES:
            return None
        if name == "lightning":
            return ModuleSpec(name, _Loader(None), is_package=True)  # type: ignore[arg-type]  # a loader by its methods
        asked = sys._getframe(2).f_globals.get("__name__") == "importlib.util"  # only whether there is such a module
        if package == "lightning" and parts.pop(0) != "pytorch":
            words = words_for(name.split(".")[1])
            if words is not None and not asked:
                raise ModuleNotFoundError(words, name=name)
            return None
        home = ".".join(["fabricamp", *parts])
        if asked and importlib.util.find_spec(home) is None:
            return None
        return ModuleSpec(name, _Loader(home))  # type: ignore[arg-type]  # the same


def install() -> None:
    """Lets the imports that follow find fabricamp by Lightning's names; raises ConfigError where Lightning is imported already."""
    if Names in sys.meta_path:
        return
    for package in PACKAGES:
        there = getattr(sys.modules.get(package), "__file__", None) or PATH
        if not there.startswith(PATH):
            raise ConfigError(
                f"{package!r} is imported already, from {there}; run the script as python -m fabricamp.lightning script.py"
            )
    sys.meta_path.insert(0, Names)


def take_over(name: str) -> None:
    """Puts fabricamp's in the place of a module of :data:`PATH` that is being imported; by another path nothing asks for that."""
    if name not in PACKAGES:
        return
    install()
    del sys.modules[name]
    importlib.import_module(name)
