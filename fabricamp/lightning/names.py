"""An import hook: ``import lightning.pytorch as pl`` finds fabricamp, in this process and in processes spawned from it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricamp._utils import lightning_alias
from fabricamp.arguments.not_offered import words_for
from fabricamp.errors import ConfigError
from fabricamp.lightning.bases import PACKAGES

if TYPE_CHECKING:
    from types import ModuleType

PATH: Final = str(Path(__file__).parent / "_path")
"""A folder with modules of Lightning's names: a spawned process inherits ``sys.path``, and finds the hook through this folder."""


class _Loader:
    """Puts fabricamp's module ``home`` into ``sys.modules`` under Lightning's name; None is for the package ``lightning``."""

    def __init__(self, home: str | None) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the new module in ``sys.modules``: the import returns the module that is there afterwards."""
        if self._home is not None:
            sys.modules[module.__name__] = importlib.import_module(self._home)
            return
        fabricamp = importlib.import_module("fabricamp")
        vars(module).update(__all__=list(fabricamp.__all__), __doc__=fabricamp.__doc__, __getattr__=_of_package)


def _of_package(name: str) -> Any:
    """Returns an attribute of the package ``lightning``: ``pytorch``, or any attribute of ``lightning.pytorch``."""
    if name == "pytorch":
        return importlib.import_module("lightning.pytorch")
    return getattr(importlib.import_module("fabricamp"), name)


class Names:
    """The first finder on ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Returns the spec of fabricamp's module for a Lightning name; raises the error of fabricamp's import if there is none."""
        package, *parts = name.split(".")
        if package not in PACKAGES:
            return None
        if name == "lightning":
            return ModuleSpec(name, _Loader(None), is_package=True)  # type: ignore[arg-type]  # a loader by its methods
        # importlib.util.find_spec asks only whether the module exists, so it gets an answer and no error.
        asked = sys._getframe(2).f_globals.get("__name__") == "importlib.util"
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
    """Makes later imports of Lightning's names find fabricamp; raises ConfigError if Lightning is imported already."""
    if Names in sys.meta_path:
        return
    for package in PACKAGES:
        file = getattr(sys.modules.get(package), "__file__", None) or PATH
        if not file.startswith(PATH):
            raise ConfigError(
                f"{package!r} is imported already, from {file}; run the script as python -m fabricamp.lightning script.py"
            )
    sys.meta_path.insert(0, Names)
    lightning_alias.note_installed()


def take_over(name: str) -> None:
    """Replaces a module of :data:`PATH` by fabricamp's while it is imported; does nothing if it is imported under another name."""
    if name not in PACKAGES:
        return
    install()
    del sys.modules[name]
    importlib.import_module(name)
