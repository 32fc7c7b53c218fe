"""Makes the interpreter end by SIGINT, whatever runs before its end.

This module imports nothing but ``sys``: what a function's module refers to is released only after the function.
"""

import sys


class _LastWord:
    """In ``sys``, whose names Python releases after all modules; has the last word on how the interpreter ends."""

    def __del__(self) -> None:
        # Builtins only: this module's own names are gone by now.
        try:  # noqa: SIM105
            exec("raise KeyboardInterrupt")  # noqa: S102
        except KeyboardInterrupt:
            pass


def end_by_sigint() -> None:
    """Makes this interpreter, which an uncaught KeyboardInterrupt ends, do so by SIGINT: a shell then ends its loop too.

    Python does that by itself, but only if the last text that it compiled and ran was interrupted.  Exit functions, threads and
    finalizers may run others: a first import of a module with a namedtuple or a dataclass is enough, and the exit code would be 1.
    """
    vars(sys)["_fabricamp_last_word"] = _LastWord()
