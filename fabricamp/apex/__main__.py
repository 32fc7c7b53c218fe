"""Runs an apex script as it is: ``python -m fabricamp.apex train.py --args``, or under torchrun with ``-m fabricamp.apex``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fabricamp.apex.install import install, share_with_children
from fabricamp.errors import nearest

_SPELLINGS: Final = ("--local_rank", "--local-rank")
_USAGE: Final = """usage: python -m fabricamp.apex [-m] script [arguments]
       torchrun --nproc_per_node=2 -m fabricamp.apex [-m] script [arguments]

Runs a script, or with -m a module, in which `import apex` finds fabricamp.apex."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script, or with ``-m`` the module, that ``arguments`` (the command line's by default) begin with.

    A rank that ``torch.distributed.launch`` puts in front, and the one in ``LOCAL_RANK``, reach the script as the option that its
    parser knows: ``--local_rank`` or ``--local-rank``.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    rank = _take_rank(rest)
    if rank is not None:
        os.environ.setdefault("LOCAL_RANK", rank)
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest or rest[0] in ("-h", "--help"):
        sys.stderr.write(f"{_USAGE}\n")
        raise SystemExit(0 if rest else 2)
    if problem := _missing(rest[0], is_module=is_module):
        sys.stderr.write(f"python -m fabricamp.apex: {problem}\n")
        raise SystemExit(2)
    install()
    share_with_children()
    if is_module and (problem := _missing_part(rest[0])):
        sys.stderr.write(f"python -m fabricamp.apex: {problem}\n")
        raise SystemExit(2)
    with _local_rank_as_known():
        if is_module:
            sys.argv[:] = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(rest)


def _missing(name: str, *, is_module: bool) -> str:
    """Why there is nothing to run under ``name``; empty where there is."""
    if is_module:
        # A package's parents are left to the import itself: to look into them would run them.
        there = "." in name or name in sys.modules or importlib.util.find_spec(name) is not None
        return "" if there else f"there is no module {name!r} on Python's path ({Path.cwd()} is on it)"
    if Path(name).is_dir() and not (Path(name) / "__main__.py").exists():
        return f"{name!r} is a folder without __main__.py; name the script in it"
    if Path(name).exists():
        return ""
    if name.startswith("-"):
        return f"{name} stands where the script has to; its own arguments come behind it"
    hint = "" if name.endswith(".py") else f"; for a module write -m {name}"
    return f"there is no file {name!r} in {Path.cwd()}{hint}"


def _missing_part(name: str) -> str:
    """Why there is no module ``name`` in its package, which this imports, as running it does; empty where there is."""
    package, _, last = name.rpartition(".")
    if not package:
        return ""
    try:
        if importlib.util.find_spec(name) is not None:
            return ""
    except ModuleNotFoundError as error:
        if not f"{package}.".startswith(f"{error.name}."):
            raise  # a line in the package imports what is not there
        return f"there is no module {error.name!r} on Python's path, to run {name} of it ({Path.cwd()} is on it)"
    parts = [one.name for one in pkgutil.iter_modules(getattr(sys.modules[package], "__path__", ()))]
    return f"there is no module {last!r} in {package!r}{nearest(last, parts)}"


def _run_script(rest: list[str]) -> None:
    script = Path(rest[0])
    sys.argv[:] = rest
    # Where `python script.py` looks first; `python -m` has put the current folder there.
    if script.is_file():
        sys.path.insert(0, str(script.resolve().parent))
    # Absolute, as `python script.py` has it in __file__: scripts change the folder.
    runpy.run_path(str(script.absolute()), run_name="__main__")


def _take_rank(arguments: list[str]) -> str | None:
    """Takes ``--local-rank=N`` in either spelling from the front of ``arguments``, where ``torch.distributed.launch`` puts it."""
    if not arguments:
        return None
    option, equals, value = arguments[0].partition("=")
    if option not in _SPELLINGS:
        return None
    del arguments[0]
    return value if equals else arguments.pop(0) if arguments else None


@contextlib.contextmanager
def _local_rank_as_known() -> Iterator[None]:
    """Lets every parser of a command line find the local rank under the spelling that it knows."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        if given == sys.argv[1:]:  # no list of the script's own, nor what a subparser gets
            given = _with_rank(self, given)
        return parse(self, given, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def _with_rank(parser: argparse.ArgumentParser, given: list[str]) -> list[str]:
    """Returns ``given`` with the local rank in the spelling that ``parser`` knows; as it is where it knows none, or both."""
    known = [spelling for spelling in _SPELLINGS if spelling in parser._option_string_actions]
    if len(known) == 1:
        other = next(spelling for spelling in _SPELLINGS if spelling not in known)
        given = [known[0] + one.removeprefix(other) if one.split("=")[0] == other else one for one in given]
    rank = os.environ.get("LOCAL_RANK")
    if not known or rank is None or any(one.split("=")[0] in known for one in given):
        return given
    return [f"{known[0]}={rank}", *given]


def run() -> None:
    """Runs :func:`main`; under torchrun, which shows it then, an error leaves its traceback in the file that torchrun names."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        main()
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()


if __name__ == "__main__":
    run()
