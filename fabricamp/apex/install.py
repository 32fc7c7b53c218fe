"""``import apex`` finds fabricamp.apex: real entries in ``sys.modules``, here and in processes that are spawned from here."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from fabricamp.errors import ConfigError

_HOME: Final = "fabricamp.apex"
_FOLDER: Final = Path(__file__).parent
_EXTENSIONS: Final = _FOLDER / "_extensions"
_NOT_IMPORTED: Final = frozenset({f"{_HOME}.__main__", f"{_HOME}._extensions.apex", f"{_HOME}.parallel.multiproc"})
"""Programs, and the file that stands for ``apex`` on the path of spawned processes."""


def install() -> None:
    """Makes ``import apex``, ``from apex.parallel import ...``, ``import amp_C`` and so on find fabricamp's.

    Call it before the first of them; again changes nothing.  Processes that :mod:`multiprocessing` spawns find them too.  apex's
    classes then say ``apex`` in what is printed, and are pickled by those names; files that have ``fabricamp.apex`` go on loading.
    Raises :class:`ConfigError` where another package of one of these names is imported already.
    """
    from fabricamp.apex._not_offered import tell_on_import

    extensions = {name: f"{_HOME}._extensions.{name}" for name in _extension_names()}
    for name in ("apex", *extensions):
        _refuse_another(name)
    # All of them now: a submodule that is imported by its other name first would be loaded twice, with a state of its own.
    for module in pkgutil.walk_packages([str(_FOLDER)], f"{_HOME}."):
        if module.name not in _NOT_IMPORTED:
            importlib.import_module(module.name)
    for name in [name for name in sys.modules if name == _HOME or name.startswith(f"{_HOME}.")]:
        sys.modules[name.removeprefix("fabricamp.")] = sys.modules[name]
        _name_classes(name)
    for name, home in extensions.items():
        sys.modules[name] = sys.modules[home]
    # A spawned process gets this one's sys.path, and nothing else, before it imports the script; in this folder it finds apex.
    if str(_EXTENSIONS) not in sys.path:
        sys.path.insert(0, str(_EXTENSIONS))
    tell_on_import()


def share_with_children() -> None:
    """Lets Python processes that are started from here, by whatever way, find them too: by their environment."""
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(_EXTENSIONS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_EXTENSIONS), *others])


def _name_classes(name: str) -> None:
    """Lets the classes of a public module say the name that scripts know it by."""
    if any(part.startswith("_") for part in name.split(".")):
        return
    for value in vars(sys.modules[name]).values():
        if isinstance(value, type) and value.__module__ == name and not value.__name__.startswith("_"):
            value.__module__ = name.removeprefix("fabricamp.")


def _extension_names() -> list[str]:
    """The modules that apex compiled, which are imported by these names without a package."""
    return [module.name for module in pkgutil.iter_modules([str(_EXTENSIONS)]) if module.name != "apex"]


def _refuse_another(name: str) -> None:
    """Raises where ``name`` is imported already and is another package's."""
    module = sys.modules.get(name)
    if module is None:
        return
    file = _file_of(module)
    if file is not None and _FOLDER in file.parents:
        return
    raise ConfigError(
        f"{name!r} is imported already, from {file or 'nowhere'}, which is {_description(name, file)}; call "
        "fabricamp.apex.install() before the first import of it, or run the script as `python -m fabricamp.apex script.py`"
    )


def _file_of(module: ModuleType) -> Path | None:
    """Where a module was loaded from; the folder of a package that has no file."""
    file = getattr(module, "__file__", None)
    if file is None:
        file = next(iter(getattr(module, "__path__", ())), None)
    return None if file is None else Path(file)


def _description(name: str, file: Path | None) -> str:
    if name != "apex":
        return "an extension of NVIDIA apex, built by its setup.py"
    if file is not None and any((file.parent / part).is_dir() for part in ("multi_tensor_apply", "optimizers")):
        return "NVIDIA apex"
    return "not NVIDIA apex: on PyPI that name belongs to another package (pip uninstall apex)"
