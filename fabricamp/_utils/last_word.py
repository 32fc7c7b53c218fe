"""Makes the interpreter end by SIGINT, whatever runs before its end.

This module imports nothing but ``sys``, because Python releases the objects that this module refers to only after ``__del__`` ran.
"""

import sys


class _LastWord:
    """Is stored in ``sys``, which Python clears after all other modules: its ``__del__`` decides how the interpreter ends."""

    def __del__(self) -> None:
        # Builtins only: this module's own names are gone by now.
        try:  # noqa: SIM105
            exec("raise KeyboardInterrupt")  # noqa: S102
        except KeyboardInterrupt:
            pass


def end_by_sigint() -> None:
    """Makes an interpreter with an uncaught KeyboardInterrupt end by SIGINT, at which a shell ends its loop too.

    Python does so itself only if the last source text that it compiled and ran was interrupted.  Exit functions, threads and
    finalizers may run other text afterwards: a first import of a module with a namedtuple or a dataclass is enough, and the exit
    code would be 1.
    """
    vars(sys)["_fabricamp_last_word"] = _LastWord()
