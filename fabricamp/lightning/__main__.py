"""Runs a script of Lightning's as it is: ``python -m fabricamp.lightning train.py --args``, or under torchrun with ``-m``."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from fabricamp.lightning import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import CodeType

_USAGE: Final = """usage: python -m fabricamp.lightning script.py [arguments]
       python -m fabricamp.lightning -m module [arguments]

Runs a script, or with -m a module, in which lightning.pytorch and pytorch_lightning are fabricamp,
whether Lightning is installed or not."""


def main() -> None:
    """Runs what the command line names as ``__main__``, as Python itself would."""
    rest = sys.argv[1:]
    named = rest[:1] == ["-m"]
    if named:
        del rest[0]
    if not rest or rest[0] in ("-h", "--help"):
        (sys.stdout if rest else sys.stderr).write(f"{_USAGE}\n")
        sys.exit(0 if rest else 2)
    names.install()
    sys.path.insert(1, names.PATH)
    load, spec = _module(rest[0]) if named else _script(rest[0])
    main_module = _main_module(str(spec.origin) if spec else str(Path(rest[0]).absolute()), spec)
    sys.argv[:] = [str(spec.origin) if spec else rest[0], *rest[1:]]
    sys.modules["__main__"] = main_module
    try:
        exec(load(), vars(main_module))  # noqa: S102 - what this command is for
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - shown as Python shows it, without the frames of this package
        code = _show(error)
    else:
        return
    sys.exit(code)


def _main_module(file: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = file, spec
    module.__package__ = spec.parent if spec else None
    module.__loader__ = spec.loader if spec else None
    vars(module).update(__cached__=None, __builtins__=__builtins__)
    return module


def _script(name: str) -> tuple[Callable[[], CodeType], None]:
    """The code of a script, whose folder comes first on ``sys.path``."""
    path = Path(name)
    if not path.is_file():
        hint = "" if name.endswith(".py") else f"; for a module write -m {name}"
        _refuse(f"there is no file {name!r} in {Path.cwd()}{hint}")
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)

    def load() -> CodeType:
        with io.open_code(str(path.absolute())) as file:
            return compile(file.read(), str(path.absolute()), "exec")

    return load, None


def _module(name: str) -> tuple[Callable[[], CodeType], ModuleSpec]:
    """The code of a module, or of a package's ``__main__``; the present folder comes first on ``sys.path``, as it is."""
    spec = None
    for one in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(one)
        except ModuleNotFoundError as error:
            if not f"{one}.".startswith(f"{error.name}."):
                raise  # a line in a package imports what is not there
            spec = None
        if spec is None or spec.submodule_search_locations is None:
            break
    get_code = getattr(spec and spec.loader, "get_code", None)
    if spec is None or get_code is None:
        _refuse(f"there is no module {name!r} to run on Python's path ({Path.cwd()} is on it)")
    return partial(get_code, spec.name), spec


def _refuse(problem: str) -> NoReturn:
    sys.stderr.write(f"python -m fabricamp.lightning: {problem}\n")
    sys.exit(2)


def _show(error: BaseException) -> int:
    """Shows an error as Python shows that of a script; returns the exit code."""
    error.__traceback__ = shown = _of_the_script(error.__traceback__)
    sys.excepthook(type(error), error, shown)
    if isinstance(error, KeyboardInterrupt):  # a shell is told by the signal, so that it ends its own loop too
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without this file's frame, and up to an import that the import hook answered."""
    frames = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename != __file__:
            frames.append(traceback)
        traceback = traceback.tb_next
    files = [one.tb_frame.f_code.co_filename for one in frames]
    if names.__file__ in files:
        del frames[files.index(names.__file__) :]
        while frames and "importlib" in frames[-1].tb_frame.f_code.co_filename:
            frames.pop()
    shown = None
    for one in reversed(frames):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


if __name__ == "__main__":
    main()
