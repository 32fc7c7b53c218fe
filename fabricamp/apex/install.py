"""Makes ``import apex`` find fabricamp.apex through entries in ``sys.modules``, in this process and in spawned ones."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Final

from fabricamp.errors import ConfigError

_HOME: Final = "fabricamp.apex"
_FOLDER: Final = Path(__file__).parent
_EXTENSIONS: Final = _FOLDER / "_extensions"
_NOT_IMPORTED: Final = frozenset({f"{_HOME}.__main__", f"{_HOME}._extensions.apex", f"{_HOME}.parallel.multiproc"})
"""Programs, and the file that spawned processes find as ``apex`` on their path."""


def install() -> None:
    """Makes ``import apex``, ``from apex.parallel import ...``, ``import amp_C`` and so on find fabricamp's modules.

    Call it before the first of these imports; a second call has no effect.  Processes that :mod:`multiprocessing` spawns find the
    modules too.  The classes are then printed and pickled under ``apex``; files with ``fabricamp.apex`` in them still load.
    Raises :class:`ConfigError` if another package of one of these names is imported already.
    """
    from fabricamp.apex._not_offered import tell_on_import

    # apex's compiled modules, which scripts import without a package.
    names = [module.name for module in pkgutil.iter_modules([str(_EXTENSIONS)]) if module.name != "apex"]
    extensions = {name: f"{_HOME}._extensions.{name}" for name in names}
    for name in ("apex", *extensions):
        _refuse_another(name)
    # Imports all of them now: a submodule first imported under its other name would be loaded twice, with separate state.
    for module in pkgutil.walk_packages([str(_FOLDER)], f"{_HOME}."):
        if module.name not in _NOT_IMPORTED:
            importlib.import_module(module.name)
    for name in [name for name in sys.modules if name == _HOME or name.startswith(f"{_HOME}.")]:
        sys.modules[name.removeprefix("fabricamp.")] = sys.modules[name]
        _name_classes(name)
    for name, home in extensions.items():
        sys.modules[name] = sys.modules[home]
    # Before it imports the script, a spawned process inherits only sys.path; it finds apex in this folder.
    if str(_EXTENSIONS) not in sys.path:
        sys.path.insert(0, str(_EXTENSIONS))
    tell_on_import()


def share_with_children() -> None:
    """Lets all Python processes started from this one find the modules too, through ``PYTHONPATH``."""
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(_EXTENSIONS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_EXTENSIONS), *others])


def _name_classes(name: str) -> None:
    """Sets ``__module__`` of the classes of a public module to the module's name without ``fabricamp.``."""
    if any(part.startswith("_") for part in name.split(".")):
        return
    for value in vars(sys.modules[name]).values():
        if isinstance(value, type) and value.__module__ == name and not value.__name__.startswith("_"):
            value.__module__ = name.removeprefix("fabricamp.")


def _refuse_another(name: str) -> None:
    """Raises ConfigError if ``name`` is imported already from another package."""
    module = sys.modules.get(name)
    if module is None:
        return
    path = getattr(module, "__file__", None)
    if path is None:  # a package without a file: its folder
        path = next(iter(getattr(module, "__path__", ())), None)
    file = None if path is None else Path(path)
    if file is not None and _FOLDER in file.parents:
        return
    raise ConfigError(
        f"{name!r} is imported already, from {file or 'nowhere'}, which is {_description(name, file)}; call "
        "fabricamp.apex.install() before the first import of it, or run the script as `python -m fabricamp.apex script.py`"
    )


def _description(name: str, file: Path | None) -> str:
    if name != "apex":
        return "an extension of NVIDIA apex, built by its setup.py"
    if file is not None and any((file.parent / part).is_dir() for part in ("multi_tensor_apply", "optimizers")):
        return "NVIDIA apex"
    return "not NVIDIA apex: on PyPI that name belongs to another package (pip uninstall apex)"
