"""``python -m fabricamp.lightning`` in a process forked from the tests', where everything is imported: a fifth of the time.

``run_forked`` starts it.  For tests of what a script does; test_names.py starts new interpreters, for tests of what is imported.
"""

from __future__ import annotations

import sys

from fabricamp._utils import script
from fabricamp.lightning import names
from fabricamp.lightning.__main__ import main
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish


def run_forked(folder, *command, code=0, limit=200, **variables):
    """Runs the script and its arguments in ``folder``; returns what it printed, standard error behind standard output."""
    variables["CUDA_VISIBLE_DEVICES"] = ""
    ended, out, err = finish(start_forked(folder, __file__, *map(str, command), **variables), limit)
    assert ended == code, out + err
    return out + err


if __name__ == "__main__":
    # Tests may have imported Lightning itself, which a new interpreter has not.
    for name in [one for one in sys.modules if one.split(".")[0] in names.PACKAGES]:
        del sys.modules[name]
    script.end_as_python_does(main, names.__file__)
