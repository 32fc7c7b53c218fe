"""Modules that only hold names of other modules, or classes that are not offered: rows of ``aliases.toml``, where no file is.

Python finds them as it finds files: an entry in the ``__path__`` of their package is a place in the table, as other entries are
folders, or places in a zip archive.  ``pkgutil`` lists them there.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from importlib import resources
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricamp.arguments.not_offered import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HOME: Final = "fabricamp.lightning.packages"
"""The package whose modules have the names of those of ``lightning``."""

TABLE: Final = str(Path(__file__).with_name("aliases.toml"))
"""The ``__file__`` of every row's module."""

_ROOT: Final = Path(__file__).parents[2]
_TOLD_APART: Final = ("connectors", "environments", "io", "launchers", "precision")
"""Subpackages of Lightning with their own message in migration.toml."""


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    """Returns the table by the names of the modules; ``resources`` reads it from a zip archive too."""
    text = resources.files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8")
    return {_home_of(name): row for name, row in tomllib.loads(text).items()}


def _home_of(name: str) -> str:
    """Returns the module that has the names of the module ``name`` of ``lightning``; any other name as it is."""
    return f"{HOME}{name.removeprefix('lightning')}" if name.startswith("lightning.") else name


def place_of(package: str) -> str:
    """Returns the entry of a ``__path__`` for the rows directly below ``package``."""
    return str(Path(TABLE, *package.split(".")))


def path_of(package: str) -> list[str]:
    """Returns a ``__path__`` for ``package``: the folder of its modules that are files, and its place in the table.

    The table is read, which takes some milliseconds, where a module is no file.
    """
    return [str(_ROOT.joinpath(*package.split("."))), place_of(package)]


def spec_of(name: str) -> ModuleSpec | None:
    """Returns the spec of a row's module; None if there is no such row."""
    row = _rows().get(name)
    if row is None:
        return None
    spec = ModuleSpec(name, _Loader(), origin=TABLE)  # type: ignore[arg-type]  # by its methods
    spec.has_location = True
    if row.get("package", False):
        spec.submodule_search_locations = path_of(name)
    return spec


class _PlaceFinder:
    """Finds the modules at an entry of :func:`place_of`.

    Python calls the class with each new entry of a path; an ImportError leaves the entry to the next of ``sys.path_hooks``.
    """

    def __init__(self, entry: str) -> None:
        if not entry.startswith(TABLE):
            raise ImportError(f"{entry} is not in {TABLE}")
        self._package = ".".join(Path(entry).relative_to(TABLE).parts)

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Returns the spec of a row's module, by its full name; None if there is no such row."""
        return spec_of(name)

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yields each row directly below the package, for ``pkgutil``: ``prefix`` and last name, and whether it is a package."""
        for name, row in _rows().items():
            package, _, last = name.rpartition(".")
            if package == self._package:
                yield prefix + last, row.get("package", False)


class _Loader:
    """Fills a module from its row."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Imports the row's names, and makes its classes that are not offered."""
        row = _rows()[module.__name__]
        names: dict[str, Any] = {}
        has_all = row.get("all", False)
        for one in row.get("names", ()):
            home, _, name = one.partition(":")
            imported = importlib.import_module(_home_of(home))
            original, _, alias = name.partition(" as ")
            if original == "*":
                names.update({key: getattr(imported, key) for key in imported.__all__})
            else:
                names[alias or original] = getattr(imported, original)
            has_all = has_all or original == "*" or bool(alias)
        refused = row.get("refused", ())
        names.update({name: _refused(name, module.__name__) for name in refused})
        if has_all or refused:
            names["__all__"] = [*names]
        if row.get("package", False):  # Lightning's packages import their submodules
            names["__getattr__"] = functools.partial(part_of, module.__name__, known=(*names,))
        vars(module).update(names, __doc__=row["doc"])


def _refused(name: str, module: str) -> type:
    """Returns a class of the module that raises when it is constructed."""
    from fabricamp.lightning.refused import Refused

    attributes: dict[str, Any] = {
        "__doc__": "Not offered: constructing it raises.",
        "__module__": module,
        "_lightnings_name": f"{_part_of_lightning(module)}.{name}",
    }
    if name.endswith("Accelerator"):  # programs ask for each kind of device before they choose one
        attributes["is_available"] = staticmethod(lambda: False)
        attributes["auto_device_count"] = staticmethod(lambda: 0)
    return type(name, (Refused,), attributes)


def _part_of_lightning(module: str) -> str:
    """Returns the part of Lightning in whose name migration.toml refuses the module's classes: "loops", "plugins.io", "fabric"."""
    distribution, *path = module.removeprefix(f"{HOME}.").split(".")
    if distribution == "fabric" and path[0] != "plugins":  # Fabric's plugins are told of as those of lightning.pytorch
        return "fabric"
    is_told_apart = len(path) > 1 and path[1] in _TOLD_APART
    return ".".join(path[:2] if is_told_apart else path[:1])


# The first: in a zip archive, Python's own would take a place in the table for a folder of the archive.
sys.path_hooks.insert(0, _PlaceFinder)
