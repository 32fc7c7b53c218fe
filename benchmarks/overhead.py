"""Compares the time per step of the Trainer and of a Loop with a hand-written loop.

Beside them Lightning, its Fabric and Accelerate, if they are installed.

CPU, one thread, an MLP 32-32-2, batches of 4, AdamW; a step lasts from one `training_step` to the next.  Each run has the mean
over its steps after the warm-up (with flushes and refreshes of the bar) and the median step (less affected by other load on the
machine).  Runs are interleaved: a run's overhead is its difference from the hand-written loop of the same round, and the script
prints the median of the rounds' differences.

The limits apply to the mean, on a machine that runs the smallest possible loop (Linear(32, 2), SGD, ready batches of 8) in 56 us
per step.  Each round measures that loop too: "here" is the limit scaled by this machine's time for it.

    python benchmarks/overhead.py [--steps 3000] [--rounds 5] [--profile lean|default]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import importlib.util
import json
import logging
import os
import platform
import pstats
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fabricamp

WARM_UP = 200
HAND_WRITTEN = "hand-written loop"
LEAN, DEFAULT = "3 callbacks, 1 log", "everything at default"
BARE, LOOP = "fabricamp: no callback, no log", "fabricamp.Loop"
FABRIC, ACCELERATE = "Lightning's Fabric", "Accelerate"
SMALLEST_LOOP_US = 56
LIMITS = {LOOP: 15, f"fabricamp: {LEAN}": 15, f"fabricamp: {DEFAULT}": 40}


def new_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def new_loader(steps):
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(4 * steps, 32, generator=generator)
    labels = torch.randint(0, 2, (4 * steps,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=4)


class Times:
    """The times of the calls of `training_step`."""

    def __init__(self):
        self.moments = []

    def note(self):
        """Appends the current time."""
        self.moments.append(time.perf_counter())

    def microseconds(self):
        """Returns the mean and the median step in microseconds."""
        moments = self.moments[WARM_UP:]
        steps = [1e6 * (after - before) for before, after in pairwise(moments)]
        return statistics.fmean(steps), statistics.median(steps)


def hand_written(steps):
    net, times = new_net(), Times()
    optimizer = torch.optim.AdamW(net.parameters())
    for features, labels in new_loader(steps):
        times.note()
        loss = F.cross_entropy(net(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return times, ""


def own_loop(steps):
    """The hand-written loop with the step of a Loop."""
    times = Times()
    run = fabricamp.Loop(accelerator="cpu", devices=1)
    net = new_net()
    net, _ = run.prepare(net, torch.optim.AdamW(net.parameters()))

    def loss_of(batch):
        times.note()
        features, labels = batch
        return F.cross_entropy(net(features), labels)

    with run:
        for batch in run.prepare_data(new_loader(steps)):
            run.step(loss_of, batch)
    return times, ""


def by_fabric(steps):
    """The hand-written loop with Lightning's Fabric."""
    times = Times()
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = new_net()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for features, labels in fabric.setup_dataloaders(new_loader(steps)):
        times.note()
        loss = F.cross_entropy(net(features), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return times, ""


def by_accelerate(steps):
    """The hand-written loop with Hugging Face's Accelerate."""
    times = Times()
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    net = new_net()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), new_loader(steps))
    for features, labels in loader:
        times.note()
        loss = F.cross_entropy(net(features), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return times, ""


def smallest_loop(steps):
    """Returns the median step of the smallest loop, which measures the machine's speed."""
    net, times = nn.Linear(32, 2), Times()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for features in DataLoader([torch.randn(8, 32) for _ in range(steps)], batch_size=None):
        times.note()
        loss = net(features).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return times.microseconds()[1]


def module_class(base):
    """Returns a module class that derives from ``base``, fabricamp's or Lightning's."""

    class Classifier(base):
        def __init__(self, *, prog_bar, logs=True):
            super().__init__()
            self.logs = logs
            self.net = new_net()
            self.times = Times()
            self.frames = ""
            self.shown = prog_bar

        def training_step(self, batch, batch_idx):
            self.times.note()
            if batch_idx == 0:
                self.frames = frames_to_here()
            features, labels = batch
            loss = F.cross_entropy(self.net(features), labels)
            if self.logs:
                self.log("loss", loss, prog_bar=self.shown)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Classifier


def frames_to_here():
    """Returns the number of frames and files between `fit` and `training_step`, without those of torch and contextlib."""
    stack = traceback.extract_stack()
    start = next(index for index, frame in enumerate(stack) if frame.name == "fit")
    ours = [frame for frame in stack[start:-2] if not {"torch", "contextlib.py"} & set(Path(frame.filename).parts)]
    return f"{len(ours)} / {len({frame.filename for frame in ours})}"


def callback_classes(base):
    class Count(base):
        def __init__(self):
            self.batches = 0

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.batches += 1

    class Last(base):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.last = batch_idx

    class Both(Count):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.last = batch_idx

    return Count, Last, Both


def trained(package, steps, root, *, everything, bare=False):
    """Runs a fit with the defaults, with three callbacks and nothing else, or ``bare``, without these."""
    base = getattr(package, "TrainingModule", None) or package.LightningModule
    options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": root}
    if not everything:
        callbacks = [] if bare else [one() for one in callback_classes(package.Callback)]
        options |= {"callbacks": callbacks, "logger": False}
        options |= {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    module = module_class(base)(prog_bar=everything, logs=not bare)
    package.Trainer(**options).fit(module, new_loader(steps))
    return module.times, module.frames


def find_lightning():
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    return None


def print_table(results, frames, rounds, smallest):
    terminal = "a terminal" if sys.stdout.isatty() else "no terminal"
    print(f"\n{rounds} rounds, torch {torch.__version__}, {os.cpu_count()} CPUs, stdout is {terminal}")
    print(f"the smallest loop takes {smallest:.0f} us a step; {SMALLEST_LOOP_US} where the limits were set\n")
    print(
        f"{'us / step':36}{'mean':>8}{'over':>8}{'limit':>7}{'here':>6}{'median':>10}{'over':>8}   "
        f"{'frames / files':16}means over, by round"
    )
    for name, runs in results.items():
        mean, median = (statistics.median(column) for column in zip(*runs, strict=True))
        means_over, medians_over = over(results, name)
        limit = LIMITS.get(name)
        here = "" if limit is None else f"{limit * smallest / SMALLEST_LOOP_US:.0f}"
        print(
            f"{name:36}{mean:>8.1f}{statistics.median(means_over):>+8.1f}{limit or '':>7}{here:>6}"
            f"{median:>10.1f}{statistics.median(medians_over):>+8.1f}   {frames[name]:16}"
            + " ".join(f"{value:+.0f}" for value in means_over)
        )


def over(results, name):
    """Returns the differences of each round's run from the hand-written loop of that round: means, and medians."""
    pairs = zip(results[name], results[HAND_WRITTEN], strict=True)
    return zip(
        *[(mean - base_mean, median - base_median) for (mean, median), (base_mean, base_median) in pairs], strict=True
    )


def write_results(path, results, frames, smallest, arguments):
    rows = []
    for name, runs in results.items():
        mean, median = (statistics.median(column) for column in zip(*runs, strict=True))
        means_over, medians_over = over(results, name)
        more = {"mean_over_us": statistics.median(means_over), "median_over_us": statistics.median(medians_over)}
        limit = LIMITS.get(name)
        more |= {"limit_us": limit, "limit_here_us": None if limit is None else limit * smallest / SMALLEST_LOOP_US}
        more |= {"frames_and_files": frames[name]}
        rows.append({"run": name, "mean_us": mean, "median_us": median, **more})
    facts = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "smallest_loop_us": smallest,
        "smallest_loop_goal_us": SMALLEST_LOOP_US,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/overhead.py --steps {arguments.steps} --rounds {arguments.rounds}",
    }
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def profile(kind, steps, root):
    """Prints where a fit's time goes: everything, then fabricamp's own functions."""
    trained(
        fabricamp, WARM_UP, root, everything=kind == "default"
    )  # runs the imports of the first use before the profile
    profiler = cProfile.Profile()
    profiler.runcall(trained, fabricamp, steps, root, everything=kind == "default")
    profiled = pstats.Stats(profiler).sort_stats("tottime")
    profiled.print_stats(15)
    profiled.print_stats("fabricamp/", 40)


def all_runs(steps, root):
    """Returns the functions to run, by name."""
    runs = {HAND_WRITTEN: partial(hand_written, steps), LOOP: partial(own_loop, steps)}
    runs[BARE] = partial(trained, fabricamp, steps, root, everything=False, bare=True)
    lightning = find_lightning()
    for name, package in {"fabricamp": fabricamp, "Lightning": lightning}.items():
        if package is not None:
            logging.getLogger(package.__name__).setLevel(logging.ERROR)
            runs[f"{name}: {LEAN}"] = partial(trained, package, steps, root, everything=False)
            runs[f"{name}: {DEFAULT}"] = partial(trained, package, steps, root, everything=True)
    for name, package, run in ((FABRIC, "lightning", by_fabric), (ACCELERATE, "accelerate", by_accelerate)):
        if importlib.util.find_spec(package) is not None:
            runs[name] = partial(run, steps)
    return runs


def counters():
    """Returns the nanoseconds a batch for counting where the time of a fit goes: the least of many loops, less a plain one."""
    # Only here: two_trees.py runs this file on earlier packages too.
    from fabricamp.engine.report.time_spent import TimeSpent

    batches = [None] * 1000

    def of_loop(read):
        began = time.perf_counter()
        for _ in read(batches):
            pass
        return (time.perf_counter() - began) / len(batches)

    plain, counted = (min(of_loop(read()) for _ in range(300)) for read in (lambda: iter, lambda: TimeSpent().reading))
    return 1e9 * (counted - plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument("--profile", choices=["lean", "default"], help="show where the time goes instead")
    arguments = parser.parse_args()
    if arguments.steps < 2 * WARM_UP:
        parser.error(
            f"--steps {arguments.steps} is too few: the first {WARM_UP} are the warm-up; use {2 * WARM_UP} or more"
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if arguments.profile:
            profile(arguments.profile, arguments.steps, root)
            return
        runs = all_runs(arguments.steps, root)
        results, frames, smallest = {name: [] for name in runs}, {}, []
        for _ in range(arguments.rounds):
            smallest.append(smallest_loop(arguments.steps))
            for name, run in runs.items():
                times, frames[name] = run()
                results[name].append(times.microseconds())
    print_table(results, frames, arguments.rounds, statistics.median(smallest))
    print(f"of which the counters of a fit's time: {counters():.0f} ns a batch")
    if arguments.out:
        write_results(arguments.out, results, frames, statistics.median(smallest), arguments)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
