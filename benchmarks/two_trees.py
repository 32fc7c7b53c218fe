"""Measures two revisions of fabricamp in turn on one machine: updates, steps of the Trainer, and its overhead on a CPU.

    git worktree add /tmp/before REVISION
    python benchmarks/two_trees.py /tmp/before . [--rounds 5] [--rows ...] [--seconds 120] [--out results.json] [--quick]

The rows come from `optimizers.py`, `loop.py`, `end_to_end.py` and `overhead.py` in the `benchmarks` folder of each tree.  Each tree
has two processes for all rounds, since a process can be a few percent faster than another one of the same code.  Rounds take the
first and the second process of each tree in turn, in the order before, after, after, before.  Printed are the medians of the rounds
with their range, and the median ratio of a round.

- *update*: exchange, statistics, finish, update and the end of the training step, FusedAdam with clipping, 161 and 1,000 tensors.
  GPU ms is measured as in `optimizers.py`.  Host us is the median of 15 updates, each after a real backward and a wait for it.
- *mlp* and *gpt2-1*: ms of a whole step by the Trainer as in `loop.py`, eager and as a CUDA graph.
- *end_to_end*: 16 windows of GPT-2-small by the Trainer, GPU ms and wall ms.
- *overhead*: a step of the Trainer on a CPU, one thread, everything at default and with three callbacks; mean and median us.

`--quick` runs a few steps on a CPU, to show that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
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
from pathlib import Path

UPDATES = [f"update {level} {shapes}" for level in ("O1", "O2") for shapes in ("161", "1000")]
LOOPS = ["mlp eager", "mlp graph", "gpt2-1 eager", "gpt2-1 graph"]
ON_CPU = ["overhead default", "overhead lean"]
ROWS = [*UPDATES, *LOOPS, "end_to_end O2", *ON_CPU]
QUICK = ["update O1 161", "update O2 161", "end_to_end O2", "overhead default"]
LEVEL = "O2"
TREES = ("before", "after")
FEW_STEPS = 30


# -- in a tree's process -----------------------------------------------------------------------------------------------------------


class Updates:
    """The updates of one opt level and number of tensors, as the Trainer launches them; made once."""

    def __init__(self, level, tensors, *, quick):
        import torch

        from benchmarks import optimizers
        from fabricamp.optimizers import FusedAdam
        from fabricamp.precision import Clip, OptLevel
        from fabricamp.strategies.base import Strategy

        self.gpu = torch.cuda.is_available()
        device = "cuda" if self.gpu else "cpu"
        shapes = optimizers.SETS["resnet50" if tensors == "161" else "1000 tensors"]()
        if quick:
            shapes = [(8, 8)] * len(shapes)
        self.module = torch.nn.Module()
        self.module.all = torch.nn.ParameterList(torch.randn(shape, device=device) * 0.02 for shape in shapes)
        precision = OptLevel(level)
        precision.convert_module(self.module)
        optimizer = FusedAdam(self.module.parameters(), lr=1e-4, weight_decay=0.01)
        strategy = Strategy()
        precision.setup_optimizers(self.module, [optimizer], strategy)
        self.optimizer = optimizer
        self.parameters = precision.gradients(optimizer).parameters
        self.gradients = [torch.randn_like(parameter) for parameter in self.parameters]
        loss = torch.ones((), device=device)
        results = precision.verdicts
        clip = Clip(1.0)
        if hasattr(precision, "plan"):
            plan = precision.plan(optimizer, strategy, clip)

            def step():
                plan.run(loss)
                plan.after()
                results.note_closed()
        else:

            def step():
                precision.step(optimizer, clip=clip, loss=loss)
                results.close_window(loss)

        self.step = step

    def assign(self):
        """Sets the gradients, the same tensors each time."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def backward(self):
        """Runs a real backward, which leaves new tensors in ``.grad``."""
        import torch

        self.optimizer.zero_grad()
        torch.stack([parameter.float().sum() for parameter in self.parameters]).sum().backward()

    def measured(self):
        """Returns GPU ms (on a GPU) and host us of an update."""
        import torch

        from benchmarks.optimizers import behind_a_sleep

        found = {}
        if self.gpu:
            found["GPU ms"] = statistics.median(behind_a_sleep(self.step, self.assign)[0] for _ in range(3))
        host = []
        for _ in range(15):
            self.backward()
            if self.gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            self.step()
            host.append((time.perf_counter() - started) * 1e6)
        return {**found, "host us": statistics.median(host)}


def loop_row(name):
    from benchmarks import loop

    case, way = name.split()
    measured = loop.CASES[case]
    measured = measured._replace(steps=FEW_STEPS if case.startswith("gpt") else measured.steps)
    if way == "graph":
        measured = measured.replayed()
    seconds = loop.ours(measured, LEVEL, graph=way == "graph")
    return {"wall ms": 1000 * seconds / measured.steps}


def end_to_end_row(*, quick):
    import torch

    from benchmarks import end_to_end

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = end_to_end.TINY if quick else end_to_end.GPT2_SMALL
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as root:
        setting = end_to_end.Setting(sizes, device, end_to_end.WARM_UP, FEW_STEPS, root)
        result = end_to_end.through_the_trainer(setting, level=LEVEL)
    found = {"wall ms": result.wall_ms}
    return found if result.gpu_ms is None else {"GPU ms": result.gpu_ms, **found}


def overhead_row(name, *, quick):
    import torch

    import fabricamp
    from benchmarks import overhead

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        times, _ = overhead.trained(fabricamp, 400 if quick else 2000, root, everything=name.endswith("default"))
    mean, median = times.microseconds()
    return {"mean us": mean, "median us": median}


def serve(tree, *, quick):
    """Measures the rows that standard input names, one at a time, and writes each result as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runs print is no answer
    warnings.simplefilter("ignore")
    import torch

    import fabricamp

    if Path(fabricamp.__file__).resolve().parents[1] != Path(tree).resolve():
        sys.exit(f"{tree} was to be measured, and {fabricamp.__file__} was imported")
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    torch.manual_seed(0)
    updates = functools.cache(functools.partial(Updates, quick=quick))
    for line in sys.stdin:
        name = line.strip()
        with contextlib.redirect_stdout(sys.stderr):
            if not name.startswith("update"):
                # The update rows come first, and their tensors are not needed any more.
                updates.cache_clear()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            if name.startswith("update"):
                found = updates(*name.split()[1:]).measured()
            elif name.startswith("end_to_end"):
                found = end_to_end_row(quick=quick)
            elif name.startswith("overhead"):
                found = overhead_row(name, quick=quick)
            else:
                found = loop_row(name)
        print(json.dumps(found), file=answers, flush=True)


# -- in the first process ----------------------------------------------------------------------------------------------------------


class Tree:
    """A process that measures one tree."""

    def __init__(self, tree, *, quick):
        words = [sys.executable, str(Path(__file__).resolve()), "--serve", str(tree), *(["--quick"] if quick else [])]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
        )

    def ask(self, row):
        """Lets the process measure a row."""
        print(row, file=self._process.stdin, flush=True)

    def answer(self):
        """Returns the process's figures of the row, by unit."""
        line = self._process.stdout.readline()
        if not line:
            raise BrokenPipeError("a process has ended; run one tree's benchmark by itself to see why")
        return json.loads(line)

    def close(self):
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)


def warm_up(processes, row):
    """Measures a row in all processes at the same time: its kernels are loaded, and its network is made."""
    every = [process for name in TREES for process in processes[name]]
    for process in every:
        process.ask(row)
    for process in every:
        process.answer()


def one_round(processes, row, number):
    """Returns the figures of both trees in round ``number``, by unit."""
    found = {}
    for name in TREES if number % 2 == 0 else reversed(TREES):
        process = processes[name][number % 2]
        process.ask(row)
        found[name] = process.answer()
    return found


def result_of(row, unit, rounds):
    """Returns a row of the results: medians, ranges, and the median ratio of a round with its range."""
    before = [one["before"][unit] for one in rounds]
    after = [one["after"][unit] for one in rounds]
    ratios = [late / early for early, late in zip(before, after, strict=True)]
    return {
        "row": row,
        "unit": unit,
        "before": round(statistics.median(before), 4),
        "before_range": [round(min(before), 4), round(max(before), 4)],
        "after": round(statistics.median(after), 4),
        "after_range": [round(min(after), 4), round(max(after), 4)],
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "rounds": len(rounds),
    }


def printed(result):
    """Prints a row."""
    early = f"{result['before']:.4g} ({result['before_range'][0]:.4g} to {result['before_range'][1]:.4g})"
    late = f"{result['after']:.4g} ({result['after_range'][0]:.4g} to {result['after_range'][1]:.4g})"
    low, high = result["ratio_range"]
    ratio = f"{result['ratio']:.3f} ({low:.3f} to {high:.3f})"
    print(f"{result['row']:18} {result['unit']:10} {early:32} {late:32} {ratio}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="the folders of the tree before and of the tree after")
    parser.add_argument("--names", default="before,after", help="the revisions of both, for the results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no round later; at least one of a row that has begun"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each row")
    parser.add_argument("--quick", action="store_true", help="a few steps on a CPU: shows that it works")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, quick=arguments.quick)
        return
    if len(arguments.trees) != 2:
        parser.error(f"two folders are compared, and {len(arguments.trees)} were given")
    rows = QUICK if arguments.quick else arguments.rows.split(",")
    if unknown := sorted(set(rows) - set(ROWS)):
        parser.error(f"--rows has {unknown}; the rows are {', '.join(ROWS)}")
    end = time.monotonic() + arguments.seconds
    processes = {
        name: [Tree(tree.resolve(), quick=arguments.quick) for _ in range(2)]
        for name, tree in zip(TREES, arguments.trees, strict=True)
    }
    results = []
    for row in rows:
        if time.monotonic() > end:
            break
        warm_up(processes, row)
        rounds = [one_round(processes, row, 0)]
        while len(rounds) < arguments.rounds and time.monotonic() < end:
            rounds.append(one_round(processes, row, len(rounds)))
        made = [result_of(row, unit, rounds) for unit in rounds[0]["before"]]
        for result in made:
            printed(result)
        results += made
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({**about(arguments), "rows": results}, indent=1) + "\n")
    for process in [*processes["before"], *processes["after"]]:
        process.close()


def about(arguments):
    """Returns the machine, the versions and the command."""
    import torch

    before, after = arguments.names.split(",")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "before": before,
        "after": after,
        "command": f"python benchmarks/two_trees.py BEFORE AFTER --rounds {arguments.rounds}",
    }


if __name__ == "__main__":
    main()
