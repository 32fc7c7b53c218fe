"""Compares two trees of fabricamp bit by bit: both run the same configurations of a fit, drawn at random.

    git worktree add /tmp/before REVISION
    python tests/tools/two_trees_bits.py /tmp/before . [--seed 0] [--count 300] [--workers 2] [--differences 5]
    python tests/tools/two_trees_bits.py . --faults [--seed 0] [--count 300]

``configured_fit.py`` beside this file has what is drawn, and says what an outcome holds.  Each column's values are drawn in turn
from a shuffled deck, so each value is in at least ``count // values`` configurations; the table at the end counts them.  The exit
code is 1 if an outcome differs.

``--faults`` shows that a difference would be found: it copies the tree, plants one fault after the other, and runs configurations
until one differs.  The exit code is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIT = HERE / "configured_fit.py"

FAULTS = {
    "clip": ("ops/scaling.py", "(norm + _NORM_EPSILON)).clamp_(max=1.0)", "(norm + _NORM_EPSILON)).clamp_(max=0.999)"),
    "loss scale": ("ops/scaling.py", "grows = growth >= rule.growth_interval", "grows = growth > rule.growth_interval"),
    "skipped steps": ("ops/scaling.py", "state.skipped.add_(1 - state.finite)", "state.skipped.add_(0)"),
    "weight decay": ("ops/adam.py", "1 - lr * self.weight_decay", "1 - 0.99 * lr * self.weight_decay"),
    "average": (
        "ops/ema.py",
        "torch._foreach_lerp_(wide, values, 1 - decay)",
        "torch._foreach_lerp_(wide, values, 0.999 - decay)",
    ),
    "accumulation": ("engine/update.py", "or (last and self._steps_at_epoch_end)", "or last"),
    "resume": ("engine/update.py", "1 + (self._state.open_batches - batch_idx)", "1 + (-batch_idx)"),
    "epoch mean": ("metrics/slots.py", "self.number += value * weight", "self.number += value * max(weight, 3)"),
    "best file": ("callbacks/_checkpoint_files.py", "sort_key(score, mode) < worst", "sort_key(score, mode) <= worst"),
    "exchange": (
        "gradients/flat.py",
        "return 1.0 / self.predivide, world_size / self.predivide",
        "return 1.0 / self.predivide, 1.0",
    ),
}
"""Where a fault is planted: the file of the package, a text in it, and what stands there instead."""


def columns():
    """Returns the table of what is drawn, what makes a configuration one that is not refused, and what tells its ranks."""
    sys.path.insert(0, str(HERE))
    from configured_fit import COLUMNS, STRATEGIES, neutral

    return COLUMNS, neutral, lambda asked: STRATEGIES[asked["strategy"]][0]


def draw(seed, count):
    """Returns ``count`` configurations."""
    table, neutral, _ = columns()
    chosen = random.Random(seed)
    decks = {}
    for name, values in table.items():
        deck = [values[place % len(values)] for place in range(count)]
        chosen.shuffle(deck)
        decks[name] = deck
    return [neutral({name: deck[place] for name, deck in decks.items()}) for place in range(count)]


class Tree:
    """The processes that run configurations with the package of one tree: one by itself, and two ranks."""

    def __init__(self, root, folder):
        self._root = root
        self._folder = folder
        self._processes = {}
        self._number = 0

    def ask(self, asked, ranks):
        """Has the configuration run; :meth:`answer` has the outcome."""
        self._number += 1
        base = self._folder / str(self._number)
        base.mkdir(parents=True)
        for process in self._started(ranks):
            process.stdin.write(json.dumps([asked, str(base)]) + "\n")
            process.stdin.flush()

    def answer(self, ranks):
        """Returns the outcome of each rank, or how its process ended."""
        found = {}
        for rank, process in enumerate(self._started(ranks)):
            line = process.stdout.readline()
            found[f"rank {rank}"] = json.loads(line) if line else f"its process ended with {process.wait()}"
        if any(isinstance(outcome, str) for outcome in found.values()):
            self._end(self._processes.pop(ranks))
        shutil.rmtree(self._folder / str(self._number))
        return found

    def close(self):
        """Ends the processes."""
        for processes in self._processes.values():
            self._end(processes)

    def _started(self, ranks):
        if ranks not in self._processes:
            port = _free_port()
            self._processes[ranks] = [self._start(rank, ranks, port) for rank in range(ranks)]
        return self._processes[ranks]

    def _start(self, rank, ranks, port):
        environment = {**os.environ, "PYTHONPATH": str(self._root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if ranks > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [sys.executable, str(FIT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._root,
        )

    @staticmethod
    def _end(processes):
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait()


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def outcomes(roots, configurations):
    """Yields each configuration with its outcome in each of the trees."""
    ranks_of = columns()[2]
    with tempfile.TemporaryDirectory(prefix="bits") as name:
        trees = [Tree(root, Path(name) / str(number)) for number, root in enumerate(roots)]
        try:
            for asked in configurations:
                ranks = ranks_of(asked)
                for tree in trees:
                    tree.ask(asked, ranks)
                yield asked, [tree.answer(ranks) for tree in trees]
        finally:
            for tree in trees:
                tree.close()


def differences(one, other, place=""):
    """Returns the places at which two nested outcomes differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found for key in sorted({*one, *other})
            for found in differences(one.get(key), other.get(key), f"{place}/{key}")
        ]  # fmt: skip
    return [] if one == other else [f"{place}: {one} | {other}"]


class Report:
    """What the configurations gave so far; differences are printed as they come."""

    def __init__(self, shown):
        self._shown = shown
        self._lock = threading.Lock()
        self.different = 0
        self._asked = collections.Counter()
        self._trained = collections.Counter()
        self._ends = collections.Counter()

    def add(self, asked, one, other):
        """Adds a configuration with its outcome in each tree."""
        found = differences(one, other)
        first = one["rank 0"]
        end = first if isinstance(first, str) else first["straight"]["end"]
        with self._lock:
            self._ends[end[:110]] += 1
            for item in asked.items():
                self._asked[item] += 1
                self._trained[item] += end == "ended"
            if not found:
                return
            self.different += 1
            if self.different <= self._shown:
                print(json.dumps(asked), *found, sep="\n    ", flush=True)

    def print(self):
        """Prints how the fits ended, and how often each value was drawn and trained."""
        print(f"{self._ends.total()} configurations: {self.different} differ")
        for end, number in self._ends.most_common():
            print(f"{number:5d}  {end}")
        for name, values in columns()[0].items():
            counts = [f"{value} {self._asked[name, value]} ({self._trained[name, value]} ended)" for value in values]
            print(f"{name}: " + ", ".join(counts))


def compare(before, after, seed, count, workers, shown):
    """Prints what differs, and how often each value was drawn and trained; returns whether nothing differs."""
    drawn = draw(seed, count)
    report = Report(shown)

    def work(part):
        for asked, (one, other) in outcomes([before, after], part):
            report.add(asked, one, other)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, [drawn[each::workers] for each in range(workers)]))
    report.print()
    return not report.different


def plant(root, seed, count):
    """Prints for each fault the number of configurations after which it was found; returns whether all were."""
    drawn = draw(seed, count)
    missed = []
    with tempfile.TemporaryDirectory() as name:
        for fault, (file, text, instead) in FAULTS.items():
            copy = Path(name) / "tree"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(Path(root) / "fabricamp", copy / "fabricamp")
            source = (copy / "fabricamp" / file).read_text()
            if source.count(text) != 1:
                raise SystemExit(f"{file} has {text!r} {source.count(text)} times; name another fault in {__file__}")
            (copy / "fabricamp" / file).write_text(source.replace(text, instead))
            for number, (_, (one, other)) in enumerate(outcomes([Path(root).resolve(), copy], drawn), 1):
                if one != other:
                    print(f"{fault}: found by configuration {number}: {differences(one, other)[0]}", flush=True)
                    break
            else:
                missed.append(fault)
                print(f"{fault}: NOT found by {count} configurations", flush=True)
    return not missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", help="the folders of two trees; one with --faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2, help="pairs of processes side by side")
    parser.add_argument("--differences", type=int, default=5, help="how many configurations that differ are shown")
    parser.add_argument("--faults", action="store_true", help="plant faults, and see each one found")
    given = parser.parse_args()
    if len(given.trees) != (1 if given.faults else 2):
        parser.error("give two trees, or one tree with --faults")
    roots = [Path(tree).resolve() for tree in given.trees]
    if given.faults:
        sys.exit(not plant(roots[0], given.seed, given.count))
    sys.exit(not compare(*roots, given.seed, given.count, given.workers, given.differences))


if __name__ == "__main__":
    main()
