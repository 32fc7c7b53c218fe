"""No thread of torch.distributed requests the GIL during interpreter shutdown, which would abort the process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.nn import BatchNorm1d, Linear, Sequential

from fabricamp.strategies import DDP, DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.distributed.scripts import PATHS
from tests.small import Classifier, loader, quiet_trainer

ROOT = Path(__file__).parents[2]

# Provokes the latest possible release of the last exchanged tensor: Gloo's thread gets the lowest priority on the only core, and
# the long switch interval keeps the main thread from giving up the GIL.
LATE_THREADS = """
import os, sys
from fabricamp import Callback

class LateThreads(Callback):
    def on_fit_start(self, trainer, module):
        core = {min(os.sched_getaffinity(0))}
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), core)
            if open(f"/proc/self/task/{thread}/comm").read().startswith("pt_gloo"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        sys.setswitchinterval(1000)
"""

RUN = """
from tests.small import Classifier, loader, quiet_trainer

trainer = quiet_trainer(strategy="STRATEGY", max_steps=2, callbacks=[LateThreads()])
module = Classifier()
trainer.fit(module, loader(8))
"""

MANY = """
import gc, os, socket, sys
import torch, torch._dynamo, torch.distributed.fsdp  # seconds that each run would spend
from tests.distributed.ranks import variables_of
from tests.small import Classifier, loader, quiet_trainer

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def begin():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= variables_of(rank, 2, port)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            return None
    return pids

def all_well(runs):
    for number in range(runs):
        pids = begin()
        if pids is None:
            return False
        codes = [status(pid) for pid in pids]
        if codes != [0, 0]:
            sys.exit(f"run {number} of {runs} ended with {codes}")
    return True

torch.set_num_threads(1)
gc.freeze()  # what is not looked at is not copied
if not all_well(int(sys.argv[1])):
    # A forked rank; its interpreter ends as any other does.
    trainer = quiet_trainer(strategy=sys.argv[2], devices=2, max_steps=2)
    trainer.fit(Classifier(), loader(16))
"""


FAILURES = """
import collections, gc, os, socket, sys, threading, time
import torch, torch.distributed as dist
from tests.distributed.ranks import variables_of
from tests.small import Classifier, loader, quiet_trainer
from fabricamp.errors import ConfigError

class Lingers:
    # Holds a thread of Gloo's until the interpreter ends, and gives it the time to ask for the lock then.
    def __init__(self):
        self.entered = threading.Event()
        self.ending = threading.Event()
        self.sleep = time.sleep

    def __del__(self):
        self.ending.set()
        self.sleep(2)

class Fails(Classifier):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def setup(self, stage):
        if not self.how.startswith("held"):
            LateThreads().on_fit_start(self.trainer, self)

    def configure_optimizers(self):
        if self.how in ("early", "caught"):
            raise ConfigError("this cannot work")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.how == "step":
            raise ValueError("unwell")
        if batch_idx == 1 and self.how == "interrupt":
            raise KeyboardInterrupt
        if batch_idx == 1 and self.how.startswith("held"):
            if self.global_rank == 1:
                os.read(meeting[0], 1)  # comes to the exchange after rank 0
            work = dist.all_reduce(torch.ones(2), async_op=True)
            if self.global_rank == 0:
                work.get_future().then(lambda _: (lingers.entered.set(), lingers.ending.wait()))
                os.write(meeting[1], b".")
                lingers.entered.wait()
            else:
                work.wait()
            if self.how.endswith("exit"):
                sys.exit(3)
            raise ValueError("unwell")
        return super().training_step(batch, batch_idx)

class Unwell(Classifier):
    def configure_callbacks(self):  # before there is a session that would be given back
        LateThreads().on_fit_start(self.trainer, self)
        self.all_reduced = dist.all_reduce(torch.ones(2))
        raise ValueError("unwell")

destroy = dist.destroy_process_group

def destroy_and_import(*groups):
    collections.namedtuple("Made", "late")  # a text that runs: torch imports modules with such, one time or another
    return destroy(*groups)

dist.destroy_process_group = destroy_and_import

CODES = {
    ("early", "ddp"): [1, 1],
    ("early", "delayed_ddp"): [1, 1],
    ("caught", "ddp"): [7, 7],
    ("before", "ddp"): [1, 1],
    ("step", "ddp"): [1, 1],
    ("interrupt", "ddp"): [-2, -2],
    ("held", "ddp"): [1, 1],
    ("held, exit", "ddp"): [3, 3],
}

meeting = []

def begin():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= variables_of(rank, 2, port)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            return None
    return pids

def begun():
    for case, expected in CODES.items():
        meeting[:] = os.pipe()
        pids = begin()
        if pids is None:
            return case
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(case, codes, "" if codes == expected else "WRONG", flush=True)
    return None

torch.set_num_threads(1)
gc.freeze()
if (case := begun()) is not None:
    how, strategy = case
    if how.startswith("held"):
        lingers = Lingers()
    # A forked rank; its interpreter ends as any other does.
    try:
        quiet_trainer(strategy=strategy, devices=2, max_steps=3).fit(Unwell() if how == "before" else Fails(how), loader(16))
    except ConfigError:
        if how == "caught":
            sys.exit(7)
        raise
"""

# Code that runs after the package's own exit function; each part calls exec, after which Python forgets the interrupt.
INTERRUPTED = """
import atexit, os

def left():  # runs last: registered before torch and the package are imported
    if how == "exit function":
        exec("")
    print("left")

how = ""
atexit.register(left)

import gc, socket, sys, threading, types
import torch, torch._dynamo  # seconds that each process would spend
from tests.distributed.ranks import variables_of
from tests.small import Classifier, loader, quiet_trainer

class Interrupted(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

class Released:
    def __del__(self):
        exec("")

def texts():
    while True:
        exec("")

def begin(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            if ranks > 1:
                os.environ |= variables_of(rank, ranks, port)
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            return None
    return pids

CASES = {
    **{(how, ranks): -2 for how in ("exit function", "thread", "module") for ranks in (1, 2)},
    ("caught", 1): 0,
    ("caught, exit", 1): 3,
}

def begun():
    for case, expected in CASES.items():
        pids = begin(case[1])
        if pids is None:
            return case
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(case, codes, "" if codes == [expected] * case[1] else "WRONG", flush=True)
    return "the parent", 0

torch.set_num_threads(1)
gc.freeze()
how, ranks = begun()
if how == "thread":
    threading.Thread(target=texts, daemon=True).start()
if how == "module":
    sys.modules["held"] = types.ModuleType("held")
    sys.modules["held"].released = Released()
if ranks:
    # A forked process; its interpreter ends as any other does.
    strategy = "ddp" if ranks > 1 else "auto"
    try:
        quiet_trainer(strategy=strategy, devices=ranks, max_steps=3).fit(Interrupted(), loader(16))
    except KeyboardInterrupt:
        if not how.startswith("caught"):
            raise
    if how.endswith("exit"):
        sys.exit(3)
"""


def run_script(text, *arguments, timeout=200):
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.net = Sequential(Linear(8, 16), BatchNorm1d(16), Linear(16, 3))


class ByHand(Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


RUNS = {
    "ddp": lambda: ({"strategy": "ddp"}, Classifier),
    "manual": lambda: ({"strategy": "ddp"}, ByHand),
    "accumulation": lambda: ({"strategy": DDP(gradient_as_bucket_view=True), "accumulate_grad_batches": 2}, Classifier),
    "statistics": lambda: ({"strategy": "ddp", "sync_batchnorm": True}, Normalised),
    "delayed_ddp": lambda: ({"strategy": "delayed_ddp"}, Classifier),
    "fsdp": lambda: ({"strategy": "fsdp"}, Classifier),
    "overlapped": lambda: ({"strategy": DelayedDDP(message_size=8, num_allreduce_streams=2)}, Classifier),
}


def threads():
    """Returns the names of this process's threads by number, without the CUDA driver's; threads that end meanwhile have no name."""
    found = {}
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            found[file.parent.name] = file.read_text().strip()
    return {number: name for number, name in found.items() if not name.startswith("cuda")}


def new_since(before):
    """Returns the names of new threads; a joined thread may stay in the list for a moment."""
    deadline = time.monotonic() + 30
    while (new := threads().keys() - before.keys()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [name for number, name in threads().items() if number in new]


def threads_left_by(name):
    options, module = RUNS[name]()
    gc.disable()
    trainer = quiet_trainer(devices=2, max_steps=3, **options)
    before = threads()
    trained = module()
    trainer.fit(trained, loader(32), loader(8))
    after_fit = new_since(before)
    trainer.validate(trained, loader(8))
    return after_fit, new_since(before)


@pytest.mark.parametrize("name", RUNS)
def test_no_thread_of_a_process_group_outlives_its_run(name):
    assert run_ranks(threads_left_by, 2, name, backend=None) == [([], [])] * 2


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_a_thread_that_lets_go_late_does_not_abort_the_process(strategy):
    done = run_script(LATE_THREADS + RUN.replace("STRATEGY", strategy))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_fails_keeps_its_exit_code():
    done = run_script(LATE_THREADS + FAILURES, timeout=600)
    assert "terminate called" not in done.stderr
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stderr
    assert "WRONG" not in done.stdout, done.stdout + done.stderr


def test_an_interrupt_ends_the_process_by_sigint_whatever_its_end_runs():
    done = run_script(INTERRUPTED, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("(")]) == 8, done.stderr
    assert "WRONG" not in done.stdout, done.stdout + done.stderr
    # Exit functions ran, and what they printed was written.  Two ranks write at once: one's text and line end may be apart.
    assert done.stdout.count("left") == 12, done.stdout
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_many_complete_runs_end_well(strategy):
    done = run_script(MANY, os.environ.get("FABRICAMP_TEST_RUNS", "50"), strategy, timeout=280)
    assert done.returncode == 0, done.stderr
