"""apex's launcher, one process per GPU of this machine: ``python -m fabricamp.apex.parallel.multiproc script --args``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import torch


def main(arguments: list[str] | None = None) -> int:
    """Runs ``script --args --world-size N --rank i`` in N processes; returns the first exit code that is not 0, else 0.

    N is the value of ``--world-size`` in the arguments, by default the number of GPUs.  Rank 0 prints; rank i writes to
    ``GPU_i.log``.  The script finds fabricamp.apex as ``apex``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print("usage: python -m fabricamp.apex.parallel.multiproc script [--world-size N] [arguments]", file=sys.stderr)
        return 2
    if "--world-size" in given:
        world_size = int(given[given.index("--world-size") + 1])
    else:
        world_size = torch.cuda.device_count()
        given += ["--world-size", str(world_size)]
    command = [sys.executable, "-u", "-m", "fabricamp.apex", *given, "--rank"]
    processes = []
    for rank in range(world_size):
        with Path(f"GPU_{rank}.log").open("w") if rank else contextlib.nullcontext() as output:
            processes.append(subprocess.Popen([*command, str(rank)], stdout=output))  # noqa: S603  # the user's own script
    return next((code for code in [process.wait() for process in processes] if code), 0)


if __name__ == "__main__":
    raise SystemExit(main())
