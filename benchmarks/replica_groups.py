"""Measures how long the loss and recovery of a replica group delay a run: ``strategy="fault_tolerant"`` over Gloo.

    python benchmarks/replica_groups.py [--runs 5] [--heartbeats 1000 5000]

Runs two groups of one process each on this machine, with the small network of ``tests/distributed/test_replica_groups.py``.  Kills
one group in the middle of a step, and starts its process again at once.  Prints the median seconds from the kill until the other
group's sum fails ("missed"), until the other group has finished the step alone ("goes on"), and until both groups have finished a
step together ("healed"); the last includes a process's start and imports.  ``heartbeats`` are values of the lighthouse's
``heartbeat_timeout_ms``: after this many milliseconds without a heartbeat the lighthouse takes a group for dead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.test_replica_groups import lost_and_back, plan_of


def seconds(heartbeat: int) -> dict[str, float]:
    """Returns the seconds of one run."""
    plan = {**plan_of("killed"), "heartbeat_timeout_ms": heartbeat}
    with tempfile.TemporaryDirectory() as folder:
        rows, told, _ = lost_and_back(Path(folder), **plan)
        lost = float((Path(folder) / "lost").read_text())
    failed = next(line for line in told[0].splitlines() if "sum over replica groups failed" in line)
    alone = next(when for _, _, when, *_ in rows[0] if when > lost)
    back = next(when for _, groups, when, *_ in rows[1] if when > lost and groups == plan["groups"])
    return {"missed": float(failed.split()[0]) - lost, "goes on": alone - lost, "healed": back - lost}


def main() -> None:
    """Prints a line for each setting of the lighthouse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--heartbeats", type=int, nargs="+", default=[1000, 5000])
    options = parser.parse_args()
    for heartbeat in options.heartbeats:
        found = [seconds(heartbeat) for _ in range(options.runs)]
        values = ", ".join(f"{name} {statistics.median(one[name] for one in found):.2f} s" for name in found[0])
        print(f"heartbeat_timeout_ms={heartbeat}: {values} ({options.runs} runs)", flush=True)


if __name__ == "__main__":
    main()
