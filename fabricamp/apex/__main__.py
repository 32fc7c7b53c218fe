"""Runs an unchanged apex script: ``python -m fabricamp.apex train.py --args``, or under torchrun with ``-m fabricamp.apex``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fabricamp._utils import script
from fabricamp.apex import _not_offered
from fabricamp.apex.install import install, share_with_children

_SPELLINGS: Final = ("--local_rank", "--local-rank")
_WHAT: Final = "Runs a script, or with -m a module, in which `import apex` finds fabricamp.apex."


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script, or with ``-m`` the module, that ``arguments`` (the command line's by default) begin with.

    The script gets the local rank, from the first argument (of ``torch.distributed.launch``) or from ``LOCAL_RANK``, as the option
    that its parser knows: ``--local_rank`` or ``--local-rank``.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    rank = _take_rank(rest)
    if rank is not None:
        os.environ.setdefault("LOCAL_RANK", rank)
    with _local_rank_as_known():
        script.run_as_main(rest, "fabricamp.apex", _WHAT, _prepare)
    _leave_group()


def _leave_group() -> None:
    """Destroys the process group that the script has left: its threads would end with the interpreter, which can abort it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _prepare() -> None:
    install()
    share_with_children()


def _take_rank(arguments: list[str]) -> str | None:
    """Removes ``--local-rank=N``, in either spelling, from the front of ``arguments`` and returns N, or None if it is not there.

    ``torch.distributed.launch`` puts the option there.
    """
    if not arguments:
        return None
    option, equals, value = arguments[0].partition("=")
    if option not in _SPELLINGS:
        return None
    del arguments[0]
    return value if equals else arguments.pop(0) if arguments else None


@contextlib.contextmanager
def _local_rank_as_known() -> Iterator[None]:
    """Returns a context in which every parser of the command line gets the local rank in the spelling that it knows."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        if given == sys.argv[1:]:  # neither a list of the script's own nor the arguments of a subparser
            given = _with_rank(self, given)
        return parse(self, given, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def _with_rank(parser: argparse.ArgumentParser, given: list[str]) -> list[str]:
    """Returns ``given`` with the local rank in the spelling that ``parser`` knows, converting it or adding ``LOCAL_RANK``."""
    known = [spelling for spelling in _SPELLINGS if spelling in parser._option_string_actions]
    if len(known) == 1:
        other = next(spelling for spelling in _SPELLINGS if spelling not in known)
        given = [known[0] + one.removeprefix(other) if one.split("=")[0] == other else one for one in given]
    rank = os.environ.get("LOCAL_RANK")
    if not known or rank is None or any(one.split("=")[0] in known for one in given):
        return given
    return [f"{known[0]}={rank}", *given]


if __name__ == "__main__":
    script.end_as_python_does(main, _not_offered.__file__)
