"""Measures two revisions of fabricamp in turn on one machine: updates, steps of the Trainer, and its overhead on a CPU.

    git worktree add /tmp/before REVISION
    python benchmarks/two_trees.py /tmp/before . [--rows ...] [--row-seconds 8] [--cores 4] [--out results.json] [--quick]

The benchmark is this tree's, the package that of each tree.  A machine that other programs use too is busy for a second here and
idle for a second there, so the turns are short: each process holds its fit, or its update, ready between two *windows* of some
steps, and a round has four windows, in the order before, after, after, before.  The ratio of a round is that of the sums of its two
windows.  Each tree has two processes, which take turns from round to round, since a process can be a few percent faster than
another one of the same code.  All processes are pinned to the same cores.

Printed are medians of the rounds with their quartiles, for the ratio also the interval in which its median lies with 95 %
probability (by the binomial distribution of ranks, which takes the rounds as independent).  A row that fails is reported, and the
others go on in new processes.

The rows and their figures, each per step or update:

- *update*: exchange, statistics, finish, update and the end of the training step, FusedAdam with clipping, 161 and 1,000 tensors.
  Host and CPU us: medians of updates, each after a real backward and a wait for it.
- *mlp*, *gpt2-1*: steps of the Trainer on the networks of `loop.py`, eager and as a CUDA graph; *end_to_end*: on 16 windows of
  GPT-2-small.  Bar, logger and a checkpoint callback are on.
- *overhead*: steps of the Trainer on a CPU, one thread, everything at default and with three callbacks, as in `overhead.py`;
  *overhead by hand* is a loop without the package: what differs there is the machine.

GPU ms is that of two steps that were queued while the GPU slept, so that no gap between launches counts; it is left out if the
host queued them too late.  Wall us includes the wait for the device at the end of a window.  CPU us is the time of all threads of
the process before this wait; a program on the same core lengthens the wall time, and the CPU time far less.

`--quick` runs a few steps on a CPU, to show that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
UPDATES = [f"update {level} {shapes}" for level in ("O1", "O2") for shapes in ("161", "1000")]
FITS = ["mlp eager", "mlp graph", "end_to_end O2", "gpt2-1 eager", "gpt2-1 graph"]
ON_CPU = ["overhead by hand", "overhead lean", "overhead default"]
ROWS = [*UPDATES, *FITS, *ON_CPU]
QUICK = ["update O1 161", "end_to_end O2", *ON_CPU]
TREES = ("before", "after")
LEVEL = "O2"
WARM_UP = 40
FEWEST_ROUNDS = 4
ENDLESS = 10**8
ROW, WINDOW, END = "row", "window", "end"
"""What the first process asks another one for: to make a row ready, to measure one window of it, to leave it."""


# -- in a tree's process -----------------------------------------------------------------------------------------------------------


class Windows:
    """The windows that the first process asks for, one at a time."""

    def __init__(self, questions, answers):
        self._questions = questions
        self._answers = answers

    def answer(self, found):
        """Sends the figures of a window by unit; without figures the row is ready."""
        print(json.dumps(found), file=self._answers, flush=True)

    def wanted(self):
        """Waits for the next question; returns whether it asks for a window, and not for the end of the row."""
        return self._questions.readline().strip() == WINDOW


def on_gpu():
    import torch

    return torch.cuda.is_available()


class Timer:
    """Wall and CPU time from its creation on, in which the device has no work."""

    def __init__(self):
        import torch

        self._wait = torch.cuda.synchronize if on_gpu() else int
        self._wait()
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def per_step(self, steps):
        """Returns the times of ``steps`` steps, in us per step."""
        cpu = time.process_time() - self._cpu
        self._wait()
        wall = time.perf_counter() - self._wall
        return {"wall us": wall / steps * 1e6, "CPU us": cpu / steps * 1e6}


class Asleep:
    """The GPU's time for the steps that the host queues while the GPU sleeps for ``ms``."""

    def __init__(self, ms):
        import torch

        self._woken, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(ms * 2e6))  # cycles, at up to 2 GHz
        self._woken.record()

    def per_step(self, steps):
        """Returns GPU ms per step; nothing if the GPU did not sleep to the end of the queueing."""
        late = self._woken.query()
        self._end.record()
        self._end.synchronize()
        return {} if late else {"GPU ms": self._woken.elapsed_time(self._end) / steps}


def in_windows(windows, warm_up, measured):
    """Runs ``warm_up``, then ``measured`` for each window."""
    warm_up()
    windows.answer({})
    while windows.wanted():
        windows.answer(measured())


class Updates:
    """The updates of one opt level and number of tensors, as the Trainer launches them."""

    def __init__(self, level, tensors, *, quick):
        import torch

        from benchmarks import optimizers
        from fabricamp.optimizers import FusedAdam
        from fabricamp.precision import Clip, OptLevel
        from fabricamp.strategies.base import Strategy

        device = "cuda" if on_gpu() else "cpu"
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
        # As older trees have it too.
        step_of = precision.step_of if hasattr(precision, "step_of") else precision.plan
        of_optimizer = step_of(optimizer, strategy, clip)
        note_end = results.note_end if hasattr(results, "note_end") else results.note_closed

        def step():
            of_optimizer.run(loss)
            of_optimizer.after()
            note_end()

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

    def measured(self, updates=8):
        """Returns the GPU ms (on a GPU) of an update, and its host us and CPU us."""
        import torch

        found = {}
        if on_gpu():
            asleep = Asleep(25)
            for _ in range(2):
                self.assign()
                self.step()
            found = asleep.per_step(2)
        host = []
        cpu = []
        for _ in range(updates):
            self.backward()
            if on_gpu():
                torch.cuda.synchronize()
            started = time.thread_time()
            began = time.perf_counter()
            self.step()
            host.append((time.perf_counter() - began) * 1e6)
            cpu.append((time.thread_time() - started) * 1e6)
        return {**found, "host us": statistics.median(host), "CPU us": statistics.median(cpu)}


def update_row(name, windows, quick):
    updates = Updates(*name.split()[1:], quick=quick)
    in_windows(windows, updates.measured, updates.measured)


def paced_class():
    """Returns the class of the callback that lets a fit wait between windows; fabricamp is imported only here."""
    from fabricamp import Callback

    class Paced(Callback):
        """Measures windows of ``steps`` steps; the fit waits between them, and stops at the end of the row.

        ``sleep_ms``: how long the GPU sleeps before the two steps that give GPU ms.
        """

        def __init__(self, windows, steps, sleep_ms):
            self._windows = windows
            self._steps = steps
            self._sleep_ms = sleep_ms
            self._phases = self._in_phases()
            self._left = next(self._phases)

        def _in_phases(self):
            """Yields the number of steps of each phase; what follows a ``yield`` runs after them."""
            yield WARM_UP
            self._windows.answer({})
            while self._windows.wanted():
                found = {}
                if self._sleep_ms and on_gpu():
                    asleep = Asleep(self._sleep_ms)
                    yield 2  # the third would read the status of the first, and wait for it
                    found = asleep.per_step(2)
                timer = Timer()
                yield self._steps
                self._windows.answer({**found, **timer.per_step(self._steps)})

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            """Begins the next phase after the last step of one."""
            self._left -= 1
            if self._left == 0:
                self._left = next(self._phases, 0)
                trainer.should_stop = self._left == 0

    return Paced


class Endless:
    """A loader that repeats a few batches."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return ENDLESS

    def __iter__(self):
        return itertools.islice(itertools.cycle(self._batches), ENDLESS)


class Repeated:
    """A dataset that repeats the samples of a few tensors."""

    def __init__(self, *tensors):
        self._tensors = tensors

    def __len__(self):
        return ENDLESS

    def __getitem__(self, index):
        index %= len(self._tensors[0])
        return tuple(tensor[index] for tensor in self._tensors)


def saves_nothing():
    from fabricamp.callbacks import ModelCheckpoint

    return ModelCheckpoint(every_n_train_steps=ENDLESS)


def loop_row(name, windows, _quick):
    from benchmarks import loop
    from fabricamp import Trainer, TrainingModule
    from fabricamp.optimizers import FusedAdam

    network, way = name.split()
    case = loop.CASES[network]
    graph = way == "graph"
    if network == "mlp":
        pace = paced_class()(windows, 500 if graph else 60, 10)
    else:
        # A window of a graph is long: it holds a flush of the log, with its weight in a run, and begins with an idle GPU.
        pace = paced_class()(windows, 50 if graph else 6, 150)
    module = loop.module_of(case, TrainingModule, partial(FusedAdam, lr=1e-4, weight_decay=0.01))
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision=LEVEL,
            max_epochs=1,
            default_root_dir=root,
            callbacks=[pace, saves_nothing()],
            gradient_clip_val=1.0,
            cuda_graph=graph,
        )
        trainer.fit(module, Endless(loop.pinned(case.batches)))


def end_to_end_row(_name, windows, quick):
    import torch
    from torch.utils.data import DataLoader

    from benchmarks import end_to_end
    from fabricamp import Trainer

    device = torch.device("cuda", 0) if on_gpu() else torch.device("cpu")
    sizes = end_to_end.TINY if quick else end_to_end.GPT2_SMALL
    torch.set_float32_matmul_precision("high")
    tokens = torch.randint(sizes.vocabulary, (4 * sizes.batch, sizes.context + 1))
    loader = DataLoader(Repeated(tokens), batch_size=sizes.batch, pin_memory=on_gpu())

    class NoClock:
        def tick(self):
            """Does nothing: the callback has the clock."""

    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            accelerator="gpu" if on_gpu() else "cpu",
            devices=1,
            precision=LEVEL,
            max_epochs=1,
            gradient_clip_val=1.0,
            log_every_n_steps=end_to_end.FLUSH_EVERY,
            default_root_dir=root,
            callbacks=[paced_class()(windows, 6, 150), saves_nothing()],
        )
        trainer.fit(end_to_end.Measured(sizes.network(device), NoClock()), loader)


def overhead_row(name, windows, quick):
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import fabricamp
    from benchmarks import overhead

    torch.set_num_threads(1)
    steps = 20 if quick else 200
    torch.manual_seed(2)
    loader = DataLoader(Repeated(torch.randn(4000, 32), torch.randint(0, 2, (4000,))), batch_size=4)
    if name == "overhead by hand":
        net = overhead.new_net()
        optimizer = torch.optim.AdamW(net.parameters())
        batches = iter(loader)

        def run():
            timer = Timer()
            for features, labels in itertools.islice(batches, steps):
                loss = F.cross_entropy(net(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return timer.per_step(steps)

        in_windows(windows, run, run)
        return
    everything = name == "overhead default"
    module = overhead.module_class(fabricamp.TrainingModule)(prog_bar=everything)
    pace = paced_class()(windows, steps, 0)
    with tempfile.TemporaryDirectory() as root:
        options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": root}
        options["callbacks"] = [pace]
        if not everything:
            options["callbacks"] += [one() for one in overhead.callback_classes(fabricamp.Callback)]
            options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            options |= {"enable_checkpointing": False}
        fabricamp.Trainer(**options).fit(module, loader)


KINDS = {
    "update": update_row,
    "mlp": loop_row,
    "gpt2-1": loop_row,
    "end_to_end": end_to_end_row,
    "overhead": overhead_row,
}
"""By the first word of a row's name."""


def serve(tree, *, quick):
    """Makes the rows ready that standard input names, and measures their windows; each answer is a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runs print is no answer
    warnings.simplefilter("ignore")
    import torch

    import fabricamp

    if Path(fabricamp.__file__).resolve().parents[1] != Path(tree).resolve():
        sys.exit(f"{tree} was to be measured, and {fabricamp.__file__} was imported")
    sys.path.insert(0, str(HERE.parents[1]))  # for this tree's benchmarks and examples, after the import of the package
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    windows = Windows(sys.stdin, answers)
    for line in iter(sys.stdin.readline, ""):
        name = line.removeprefix(ROW).strip()
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                KINDS[name.split()[0]](name, windows, quick)
        except Exception:  # noqa: BLE001 - a row of either tree may raise anything; the first process reports it
            windows.answer({"error": traceback.format_exc()})
            continue
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()
        windows.answer({})


# -- in the first process ----------------------------------------------------------------------------------------------------------


class RowError(Exception):
    """A row failed in one of the processes."""


class Tree:
    """A process that measures one tree."""

    def __init__(self, name, tree, *, quick):
        words = [sys.executable, str(HERE), "--serve", str(tree), *(["--quick"] if quick else [])]
        self._name = name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
        )

    def ask(self, question):
        """Sends a question, without a wait for its answer."""
        with contextlib.suppress(BrokenPipeError):  # answer() says what has happened
            print(question, file=self._process.stdin, flush=True)

    def answer(self):
        """Returns the answer to the last question; raises if the row has failed."""
        line = self._process.stdout.readline()
        found = json.loads(line) if line else {"error": f"the process ended with {self._ended()}"}
        if "error" in found:
            raise RowError(f"{self._name}: {found['error'].strip()}")
        return found

    def _ended(self):
        status = self._process.wait(60)
        self._errors.seek(0)
        return f"status {status}: {self._errors.read()[-2000:]}"

    def close(self):
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def of_all(processes, question, *, at_once=True):
    """Asks all processes a question that has no figures as its answer."""
    every = [process for name in TREES for process in processes[name]]
    if at_once:
        for process in every:
            process.ask(question)
    for process in every:
        if not at_once:
            process.ask(question)
        process.answer()


def one_round(processes, number):
    """Returns the sums of the two windows of each tree in round ``number``, by unit that both windows have."""
    found = {name: [] for name in TREES}
    for name in (*TREES, *reversed(TREES)):
        process = processes[name][number % 2]
        process.ask(WINDOW)
        found[name].append(process.answer())
    return {
        name: {unit: first[unit] + second[unit] for unit in first if unit in second}
        for name, (first, second) in found.items()
    }


def measure(processes, row, *, seconds, most):
    """Returns the rounds of a row: at least ``FEWEST_ROUNDS``, then more for ``seconds``, at most ``most``."""
    # A capture is compared with an eager step if the memory that is free then suffices, so captures are made one after the other.
    of_all(processes, f"{ROW} {row}", at_once="graph" not in row)
    end = time.monotonic() + seconds
    rounds = []
    while len(rounds) < most and (len(rounds) < FEWEST_ROUNDS or time.monotonic() < end):
        rounds.append(one_round(processes, len(rounds)))
    of_all(processes, END)
    return rounds


def quartiles(values):
    """Returns the lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 9.0])
    [2.0, 3.0, 4.0]
    """
    return [round(value, 4) for value in statistics.quantiles(values, method="inclusive")]


def around_the_median(values):
    """Returns the two values between which the median of the distribution lies with 95 % probability.

    Fewer than six values cannot say that: then it is their range, with 88 % for four and 94 % for five.

    >>> around_the_median([float(value) for value in range(100)])
    [40.0, 59.0]
    """
    ordered = sorted(values)
    rank = max(int((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
    return [round(ordered[rank], 4), round(ordered[-1 - rank], 4)]


def results_of(row, rounds):
    """Returns the results of a row, one for each unit that at least ``FEWEST_ROUNDS`` rounds have."""
    results = []
    for unit in dict.fromkeys(unit for one in rounds for unit in one["before"]):
        complete = [one for one in rounds if all(unit in one[name] for name in TREES)]
        if len(complete) < FEWEST_ROUNDS:
            continue
        ratios = [one["after"][unit] / one["before"][unit] for one in complete]
        results.append(
            {
                "row": row,
                "unit": unit,
                **{name: quartiles([one[name][unit] / 2 for one in complete]) for name in TREES},
                "ratio": quartiles(ratios),
                "median_ratio_in": around_the_median(ratios),
                "rounds": len(complete),
            }
        )
    return results


def printed(result):
    """Prints a result."""
    cells = [f"{middle:.4g} ({low:.4g} to {high:.4g})" for low, middle, high in (result[name] for name in TREES)]
    low, middle, high = result["ratio"]
    between = "{:.3f} to {:.3f}".format(*result["median_ratio_in"])
    print(
        f"{result['row']:18} {result['unit']:8} {cells[0]:30} {cells[1]:30} {middle:.3f} ({low:.3f} to {high:.3f})  "
        f"median in {between}, {result['rounds']} rounds",
        flush=True,
    )


def pin(cores):
    """Pins this process, and those that it starts, to the last ``cores`` of the cores that it may use; returns their number."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[-cores:])
    return min(cores, len(allowed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="the folders of the tree before and of the tree after")
    parser.add_argument("--names", default="before,after", help="the revisions of both, for the results")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=100, help="the most rounds of a row")
    parser.add_argument(
        "--row-seconds", type=float, default=8.0, help="begin no round of a row later than this after its first"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row later")
    parser.add_argument("--cores", type=int, default=4, help="pin the processes to so many cores")
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
    facts = {**about(arguments), "pinned_to_cores": pin(arguments.cores)}

    def started():
        return {
            name: [Tree(name, tree.resolve(), quick=arguments.quick) for _ in range(2)]
            for name, tree in zip(TREES, arguments.trees, strict=True)
        }

    def ended(processes):
        for process in [*processes["before"], *processes["after"]]:
            process.close()

    processes = started()
    results = []
    for row in rows:
        if time.monotonic() > end:
            break
        try:
            rounds = measure(
                processes, row, seconds=0 if arguments.quick else arguments.row_seconds, most=arguments.rounds
            )
        except RowError as error:
            print(f"{row} failed in {error}", flush=True)
            results.append({"row": row, "failed": str(error)})
            ended(processes)
            processes = started()
        else:
            made = results_of(row, rounds)
            for result in made:
                printed(result)
            results += made
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({**facts, "rows": results}, indent=1) + "\n")
    ended(processes)


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
        "command": f"python benchmarks/two_trees.py BEFORE AFTER --row-seconds {arguments.row_seconds:g} --cores {arguments.cores}",
    }


if __name__ == "__main__":
    main()
