"""What several workers of pytest-xdist read is computed by one of them.

from tests.shared import once, shared_folder
"""

from __future__ import annotations

import fcntl
import os
import shutil

import torch

__all__ = ["once", "shared_folder"]


def shared_folder(tmp_path_factory, name):
    """Returns a folder of this session that all of its workers have, for ``once``."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder below the session's
        folder = folder.parent
    return folder / f"shared-{name}"


def once(folder, make):
    """Returns ``make()``, which may write into ``folder``: the first worker calls it, later ones wait and read its result.

    After an exception the folder is removed, and the next worker tries again.
    """
    result = folder / "result-of-once"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not result.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
                folder.mkdir()
                torch.save(make(), folder / "part-of-once")
                (folder / "part-of-once").rename(result)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked processes may still have the file open
    return torch.load(result, weights_only=False)
