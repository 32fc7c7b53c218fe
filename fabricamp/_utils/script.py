"""Runs a script or a module as ``__main__``, as Python does; used by the commands that take a script."""

from __future__ import annotations

import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from fabricamp.errors import nearest

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


_Program: TypeAlias = "tuple[str, Callable[[], CodeType], ModuleSpec | None]"
"""(file, function that returns its code, the module's spec or None)."""

_ELASTIC: Final = "TORCHELASTIC_ERROR_FILE"


def run_as_main(arguments: list[str], command: str, what: str, prepare: Callable[[], None]) -> None:
    """Runs the script, or with ``-m`` the module, that ``arguments`` begin with; the rest is the script's command line.

    Calls ``prepare`` after a script's file is found, and before a module is looked up.  The help of ``command`` shows ``what``.
    Exceptions of the script are not caught.
    """
    rest = list(arguments)
    named = rest[:1] == ["-m"]
    if named:
        del rest[0]
    if not rest or rest[0] in ("-h", "--help"):
        usage = f"usage: python -m {command} script.py [arguments]\n       python -m {command} -m module [arguments]"
        print(f"{usage}\n\n{what}", file=sys.stdout if rest else sys.stderr)
        sys.exit(0 if rest else 2)
    if not named:
        _check_script(rest[0], command)
    prepare()
    file, load, spec = _module(rest[0], command) if named else _script(rest[0])
    sys.argv[:] = [file if named else rest[0], *rest[1:]]
    module = _main_module(file, spec)
    sys.modules["__main__"] = module
    exec(load(), vars(module))  # noqa: S102 - what this is for


def end_as_python_does(run: Callable[[], object], hook: str) -> None:
    """Calls ``run``; prints an exception as Python does for a script, and exits with Python's exit code.

    The traceback leaves out the frames that ran the script, and those from ``hook`` on, the file of an import hook.  Under torchrun
    the error is also written to the file that torchrun names.
    """
    if _ELASTIC in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        run = record(run)
    try:
        run()
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _show(error, hook)
        sys.excepthook = _shown  # Python ends an interrupted process by SIGINT, so that a shell ends its own loop too
        raise
    except BaseException as error:  # noqa: BLE001 - shown as Python shows it
        _show(error, hook)
    else:
        return
    sys.exit(1)


def _main_module(file: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    module.__spec__ = spec
    module.__package__ = spec.parent if spec else None
    module.__loader__ = spec.loader if spec else None
    vars(module).update(__cached__=None, __builtins__=__builtins__)
    return module


def _check_script(name: str, command: str) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        _refuse(command, f"{name!r} is a folder without __main__.py; name the script in it")
    if path.exists():
        return
    if name.startswith("-"):
        _refuse(command, f"{name} is given before the script; write the script's arguments after it")
    hint = "" if name.endswith(".py") else f"; for a module write -m {name}"
    _refuse(command, f"there is no file {name!r} in {Path.cwd()}{hint}")


def _script(name: str) -> _Program:
    """Returns the program of a script, or of a folder's ``__main__.py``; puts its folder first on ``sys.path``."""
    path = Path(name) / "__main__.py" if Path(name).is_dir() else Path(name)
    if not sys.flags.safe_path:
        if sys.path[:1] == [str(Path.cwd())]:  # put there by `python -m`
            del sys.path[0]
        sys.path.insert(0, str(path.resolve().parent))
    file = str(path.absolute())  # stays valid if the script changes the current folder

    def load() -> CodeType:
        with io.open_code(file) as opened:
            return compile(opened.read(), file, "exec")

    return file, load, None


def _module(name: str, command: str) -> _Program:
    """Returns the program of a module, or of a package's ``__main__``; the lookup imports the parent packages."""
    spec = _find(name, command)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name, command)
    if spec is None:
        _refuse(command, _missing(name))
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is None:
        _refuse(command, f"{name!r} is not a Python module that can be run")
    return str(spec.origin), partial(get_code, spec.name), spec


def _find(name: str, command: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package imports a module that does not exist
        _refuse(
            command, f"Python's path has no module {error.name!r}, the package of {name} ({Path.cwd()} is on the path)"
        )


def _missing(name: str) -> str:
    package, _, last = name.rpartition(".")
    if not package:
        return f"there is no module {name!r} on Python's path ({Path.cwd()} is on it)"
    modules = [found.name for found in pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", ()))]
    return f"there is no module {last!r} in {package!r}{nearest(last, modules)}"


def _refuse(command: str, problem: str) -> NoReturn:
    print(f"python -m {command}: {problem}", file=sys.stderr)
    sys.exit(2)


def _show(error: BaseException, hook: str) -> None:
    """Prints an error as Python does for a script."""
    error.__traceback__ = _of_the_script(error.__traceback__, hook)
    sys.excepthook(type(error), error, error.__traceback__)


def _shown(*_error: object) -> None:
    """Replaces ``sys.excepthook``, because the error was already printed."""


def _of_the_script(traceback: TracebackType | None, hook: str) -> TracebackType | None:
    """Returns the traceback from the script's first frame on, cut before an import that ``hook`` refused."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    first = max((index for index, file in enumerate(files) if file == __file__), default=-1) + 1
    del frames[:first]
    del files[:first]
    if hook in files:
        del frames[files.index(hook) :]
        while frames and "importlib" in frames[-1].tb_frame.f_code.co_filename:
            frames.pop()
    shown = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown
