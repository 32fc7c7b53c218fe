"""Compares the Trainer's time per step of two trees of fabricamp: the one before a change, and this one.

Each round starts four processes, one after the other: old, new, new, old.  A process runs the hand-written loop of ``overhead.py``,
then a fit with three callbacks and one log, then one with everything at its default.  On a machine with two cores or more for each
round, all rounds run at once, each on a core of its own; else they run one after the other.

    python benchmarks/overhead_trees.py OLD_TREE [--rounds 5] [--steps 2000] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
ORDER = ("old", "new", "new", "old")


def measure(steps):
    """Prints the mean and the median step of each run, in microseconds; run in the folder of the tree to measure."""
    sys.path.insert(0, str(Path.cwd()))
    import torch

    import fabricamp

    spec = importlib.util.spec_from_file_location("overhead", HERE.with_name("overhead.py"))
    overhead = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overhead)
    torch.set_num_threads(1)
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    found = {overhead.HAND_WRITTEN: overhead.hand_written(steps)[0].microseconds()}
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, everything in ((overhead.LEAN, False), (overhead.DEFAULT, True)):
            times, _ = overhead.trained(fabricamp, steps, root, everything=everything)
            found[name] = times.microseconds()
    print(json.dumps({"package": fabricamp.__file__, "torch": torch.__version__, "runs": found}))


def run_round(trees, steps, core):
    """Returns what the processes of one round have measured, by tree; on ``core``, if it is given."""
    measured = {name: [] for name in trees}
    for name in ORDER:
        command = [sys.executable, str(HERE), "--measure", "--steps", str(steps)]
        if core is not None:
            command += ["--core", str(core)]
        environment = {**os.environ, "PYTHONPATH": str(trees[name]), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command,
            cwd=trees[name],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        if not Path(found["package"]).is_relative_to(trees[name]):
            raise SystemExit(f"{name} measured {found['package']}, which is not in {trees[name]}")
        measured[name].append(found)
    return measured


def quartiles(values):
    """Returns the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, method="inclusive")


def rows_of(rounds):
    """Returns a row for each run and statistic: the quartiles of both trees, and of the ratio of a round's two sums."""
    rows = []
    for run in rounds[0]["old"][0]["runs"]:
        for index, statistic in enumerate(("mean", "median")):
            us = {
                name: [one["runs"][run][index] for measured in rounds for one in measured[name]]
                for name in ("old", "new")
            }
            ratios = []
            for measured in rounds:
                sums = {name: sum(one["runs"][run][index] for one in measured[name]) for name in ("old", "new")}
                ratios.append(sums["new"] / sums["old"])
            row = {"run": run, "step": statistic, "old_us": quartiles(us["old"]), "new_us": quartiles(us["new"])}
            rows.append({**row, "new_over_old": quartiles(ratios)})
    return rows


def print_rows(rows):
    print(f"{'us / step':24}{'':>8}{'old':>26}{'new':>26}{'new over old':>26}")
    for row in rows:
        cells = [f"{row['run']:24}{row['step']:>8}"]
        for name, form in (("old_us", ".1f"), ("new_us", ".1f"), ("new_over_old", ".3f")):
            low, middle, high = row[name]
            cells.append(f"{middle:{form}} ({low:{form}} to {high:{form}})".rjust(26))
        print("".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="the folder that has the earlier package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        if arguments.core is not None:
            os.sched_setaffinity(0, {arguments.core})
        measure(arguments.steps)
        return
    if arguments.old is None or not (arguments.old / "fabricamp").is_dir():
        parser.error("give the folder that has the earlier package, fabricamp/")
    if arguments.rounds < 2:
        parser.error("quartiles need two rounds or more")
    trees = {"old": arguments.old.resolve(), "new": HERE.parents[1]}
    together = len(os.sched_getaffinity(0)) >= 2 * arguments.rounds
    with ThreadPoolExecutor(arguments.rounds if together else 1) as pool:
        allowed = sorted(os.sched_getaffinity(0))  # a container may have some of the machine's cores
        cores = [allowed[2 * number] if together else None for number in range(arguments.rounds)]
        rounds = list(pool.map(lambda core: run_round(trees, arguments.steps, core), cores))
    rows = rows_of(rounds)
    print_rows(rows)
    if arguments.out:
        facts = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "rounds_at_once": together,
            "torch": rounds[0]["new"][0]["torch"],
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/overhead_trees.py OLD --steps {arguments.steps} --rounds {arguments.rounds}",
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
