"""An import hook: ``import lightning.pytorch as pl`` finds fabricamp's classes, here and in processes spawned from this one.

Each of Lightning's modules is a separate module object.  Its import copies the names of fabricamp's module at the same path below
``fabricamp.lightning.packages`` or, if there is none, below ``fabricamp``.  Setting, patching or deleting an attribute in one of
the two modules does not change the other.

``lightning.pytorch`` and ``pytorch_lightning`` are two modules with the same classes.  Lightning has two packages too: a patch of a
name in one of them does not change the other.  A patch of a class, as ``mock.patch.object(Trainer, "fit")``, applies to both, and
to fabricamp.  ``lightning_fabric`` is ``lightning.fabric``: one module under two names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fabricamp import habits
from fabricamp.arguments.not_offered import words_for
from fabricamp.errors import ConfigError, nearest
from fabricamp.lightning import aliases

PACKAGES: Final = ("lightning", "pytorch_lightning", "lightning_fabric")
"""The packages of Lightning's three distributions."""

_PART_OF_LIGHTNING: Final = {"pytorch_lightning": "pytorch", "lightning_fabric": "fabric"}

PATH: Final = str(Path(__file__).parent / "_path")
"""A folder with modules of Lightning's names: a spawned process inherits ``sys.path``, and finds the hook through this folder.

``importlib.metadata`` reads its folders ``*.dist-info`` for the three distributions.  They state version 2.6.6, like the modules,
even if another version is installed, because no code of the installed one runs.
"""

_VERSION_MODULES: Final = ("__about__", "__version__")
_OF_THE_MODULE_ITSELF: Final = {
    "__builtins__", "__cached__", "__dir__", "__file__", "__getattr__", "__loader__", "__name__", "__package__", "__path__",
    "__spec__",
}  # fmt: skip


class _Loader:
    """Fills a module of Lightning's name with the names of fabricamp's module ``home``."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Copies the names of the home, but for fabricamp's modules: :func:`_submodule` imports Lightning's on first use."""
        home = importlib.import_module(self._home)
        name = module.__name__
        # Imported before the names are copied: the import binds __version__ to a module, and the copy then to the string.
        for part in _VERSION_MODULES:
            if _found(f"{self._home}.{part}"):
                importlib.import_module(f"{name}.{part}")
        names = {key: value for key, value in vars(home).items() if not _is_fabricamps_module(value)}
        # By getattr: some of these are not among the home's variables before their first use.
        names.update({key: getattr(home, key) for key in getattr(home, "__all__", ())})
        for key in _OF_THE_MODULE_ITSELF:
            names.pop(key, None)
        names["__getattr__"] = functools.partial(_submodule, module)
        # If the module is imported again, it gets the submodules of the first import.
        for loaded in [one for one in sys.modules if one.rpartition(".")[0] == name]:
            names.setdefault(loaded.rpartition(".")[2], sys.modules[loaded])
        vars(module).update(names)


class _SameModule:
    """Puts the module ``name`` into ``sys.modules`` under a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the new module in ``sys.modules``: the import returns the module that is there afterwards."""
        second = module.__name__
        sys.modules[second] = importlib.import_module(self._name)
        # Later imports of its submodules find these entries, and do not bind names in the package again.
        for loaded in [one for one in sys.modules if one.startswith(f"{self._name}.")]:
            sys.modules.setdefault(f"{second}{loaded.removeprefix(self._name)}", sys.modules[loaded])


def _is_fabricamps_module(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.split(".")[0] == "fabricamp"


def _submodule(module: ModuleType, name: str) -> Any:
    """Returns a submodule, imported on first use, because Lightning's packages import theirs."""
    full_name = f"{module.__name__}.{name}"
    # Python also reads __path__ of modules that are not packages.
    if "__path__" in vars(module) and not name.startswith("__") and importlib.util.find_spec(full_name) is not None:
        importlib.import_module(full_name)
        if name in vars(module):  # missing if the program has deleted it
            return vars(module)[name]
    words = words_for(_without_package(full_name))
    raise AttributeError(words or f"module {module.__name__!r} has no attribute {name!r}{nearest(name, vars(module))}")


def _without_package(name: str) -> str:
    """Returns ``callbacks.timer`` for ``lightning.pytorch.callbacks.timer`` and for ``pytorch_lightning.callbacks.timer``."""
    return name.removeprefix("lightning.").removeprefix("pytorch.").removeprefix("pytorch_lightning.")


class LightningFinder:
    """Finds the modules of Lightning's names: the first finder on ``sys.meta_path``, so an installed Lightning is not found."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Returns the spec of a module with Lightning's name, or None; raises ModuleNotFoundError, with advice, if not offered."""
        package = name.partition(".")[0]
        if package not in PACKAGES:
            return None
        path = name.removeprefix(package).removeprefix(".")
        if package != "lightning":
            path = f"{_PART_OF_LIGHTNING[package]}.{path}".removesuffix(".")
        home = _home_of(path)
        if home is not None:
            return _spec(name, path, home)
        words = words_for(path.removeprefix("pytorch."))
        # importlib.util.find_spec only checks whether the module exists, so it gets None and no error.
        if words is not None and sys._getframe(2).f_globals.get("__name__") != "importlib.util":
            # The error's name differs from the module's: `from lightning.pytorch import loops` swallows an error with that name.
            raise ModuleNotFoundError(words, name=path)
        return None


def _spec(name: str, path: str, home: ModuleSpec) -> ModuleSpec:
    """Returns the spec of a module of Lightning's name, which is at ``path`` below ``lightning``, with the names of ``home``."""
    folders = home.submodule_search_locations
    if name.startswith("lightning_fabric"):
        return ModuleSpec(name, _SameModule(f"lightning.{path}"), is_package=folders is not None)  # type: ignore[arg-type]  # by its methods
    # The file is the home's, for inspect and for messages about the module.
    spec = ModuleSpec(name, _Loader(home.name), origin=home.origin)  # type: ignore[arg-type]  # the same
    spec.has_location = True
    if folders is not None:  # pkgutil lists the modules in them
        below = _found_below_fabricamp(path)
        more = [] if below is None else [*(below.submodule_search_locations or []), aliases.place_of(below.name)]
        spec.submodule_search_locations = list(dict.fromkeys([*folders, aliases.place_of(home.name), *more]))
    return spec


def _home_of(path: str) -> ModuleSpec | None:
    """Returns the spec of fabricamp's module with the names of ``lightning.path``; None if there is none."""
    own = _found(f"{aliases.HOME}.{path}".removesuffix("."))
    # Directly below ``pytorch`` a module needs a home of its own: fabricamp has modules there that Lightning lacks.
    if own is not None or path.count(".") < 2:
        return own
    return _found_below_fabricamp(path)


def _found_below_fabricamp(path: str) -> ModuleSpec | None:
    package, _, below = path.partition(".")
    return _found(f"fabricamp.{below}") if package == "pytorch" and below else None


def _found(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package does not exist
        return None


def install() -> None:
    """Makes later imports of Lightning's names find fabricamp, and takes up Lightning's habits (``habits.py``).

    Both are for the whole process, also for what it imports as ``fabricamp``.  Raises ConfigError if Lightning is imported already.
    """
    if is_installed():
        return
    for package in PACKAGES:
        file = getattr(sys.modules.get(package), "__file__", None) or PATH
        if not file.startswith(PATH):
            raise ConfigError(
                f"{package!r} is imported already, from {file}; run the script as python -m fabricamp.lightning script.py"
            )
    sys.meta_path.insert(0, LightningFinder)
    habits.take_up(habits.LIGHTNING)


def is_installed() -> bool:
    """Returns whether Lightning's names are fabricamp's in this process."""
    return LightningFinder in sys.meta_path


def take_over(name: str) -> None:
    """Replaces a module of :data:`PATH` by the one of this hook, installed here; nothing if it is imported under another name."""
    if name not in PACKAGES:
        return
    install()
    del sys.modules[name]
    importlib.import_module(name)
