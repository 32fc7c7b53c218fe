"""No thread of torch.distributed requests the GIL during interpreter shutdown, which would abort the process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.nn import BatchNorm1d, Linear, Sequential

from fabricamp.strategies import DDP, DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.distributed.scripts import PATHS, without_names
from tests.shared import once, shared_folder
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


# Each case runs in processes forked from one interpreter that has imported everything; each ends as an interpreter does.
ENDS = """
import atexit, os, sys

case = ("the parent",)

def left():  # runs last: registered before torch and the package are imported
    if case[0] == "exit function":
        exec("")
    if case[0] in INTERRUPTED:
        print("left")

atexit.register(left)

import collections, gc, socket, threading, time, types
import torch
import torch.distributed as dist
from tests.small import Classifier, loader, quiet_trainer
from fabricamp.errors import ConfigError
from fabricamp.watchdog import StopAgreement, leaving

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
        if self.how in ("early", "handled"):
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

# What runs after the package's own exit function; each calls exec, after which Python forgets the interrupt.
INTERRUPTED = ("exit function", "thread", "module", "caught", "caught, exit")

# torch's DDP imports a compiler; the end of an interpreter with it takes twice the time.  So DDP's cases come last.
CASES = {
    ("complete", "delayed_ddp", 2): 0,
    ("last word", "delayed_ddp", 2): 0,
    ("early", "delayed_ddp", 2): 1,
    ("handled", "delayed_ddp", 2): 7,
    ("before", "delayed_ddp", 2): 1,
    ("interrupt", "delayed_ddp", 2): -2,
    ("held, exit", "delayed_ddp", 2): 3,
    ("exit function", "auto", 1): -2,
    ("exit function", "delayed_ddp", 2): -2,
    ("thread", "auto", 1): -2,
    ("thread", "delayed_ddp", 2): -2,
    ("module", "auto", 1): -2,
    ("module", "delayed_ddp", 2): -2,
    ("caught", "auto", 1): 0,
    ("caught, exit", "auto", 1): 3,
    ("complete", "ddp", 2): 0,
    ("early", "ddp", 2): 1,
    ("step", "ddp", 2): 1,
    ("held", "ddp", 2): 1,
}

meeting = []
forked = []

def begin(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.clear()
    for rank in range(ranks):
        forked.append(os.fork())
        if forked[-1] == 0:
            if ranks > 1:
                # Not from tests.distributed.ranks, which imports the compiler.
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                os.environ["MASTER_PORT"] = str(port)
            return False
    return True

def begun():
    for case, expected in CASES.items():
        meeting[:] = os.pipe()
        if case[1] == "ddp":
            import torch._dynamo  # seconds that each process would spend
        gc.freeze()  # what is not looked at is not copied
        if not begin(case[-1]):
            return case
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked]
        print(case, codes, "" if codes == [expected] * len(codes) else "WRONG", flush=True)
        print("END OF", *case[:2], file=sys.stderr, flush=True)
    return ("the parent",)

def fit(how, strategy, ranks):
    if how == "complete":
        trainer = quiet_trainer(strategy=strategy, devices=ranks, max_steps=2, callbacks=[LateThreads()])
        return trainer.fit(Classifier(), loader(16))
    if how == "last word":
        leaving._HOST_SECONDS = 60
        if os.environ["RANK"] == "1":
            StopAgreement.leave = leave_late
        trainer = quiet_trainer(strategy=strategy, devices=ranks, max_steps=2)
        return trainer.fit(Classifier(), loader(16))
    if how in INTERRUPTED:
        module = Interrupted()
    else:
        dist.destroy_process_group = destroy_and_import
        module = Unwell() if how == "before" else Fails(how)
    quiet_trainer(strategy=strategy, devices=ranks, max_steps=3).fit(module, loader(16))

leave = StopAgreement.leave

def leave_late(self, store):
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and lives(forked[0]):  # rank 0's process, which hosts the store
        time.sleep(0.01)
    time.sleep(0.3)  # a process's sockets close only after its last thread
    leave(self, store)

def lives(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"

destroy = dist.destroy_process_group

def destroy_and_import(*groups):
    collections.namedtuple("Made", "late")  # a text that runs: torch imports modules with such, one time or another
    return destroy(*groups)

torch.set_num_threads(1)
case = begun()
if case[0].startswith("held"):
    lingers = Lingers()
if case[0] == "thread":
    threading.Thread(target=texts, daemon=True).start()
if case[0] == "module":
    sys.modules["held"] = types.ModuleType("held")
    sys.modules["held"].released = Released()
if case[0] != "the parent":
    try:
        fit(*case)
    except ConfigError:
        if case[0] == "handled":
            sys.exit(7)
        raise
    except KeyboardInterrupt:
        if not case[0].startswith("caught"):
            raise
    if case[0] == "caught, exit":
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


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Returns the lines of the cases that ENDS ran, what their processes printed, and the errors of each case."""

    def run():
        done = run_script(LATE_THREADS + ENDS, timeout=600)
        assert done.returncode == 0, done.stderr
        parts = re.split(r"END OF (.*)\n", done.stderr)
        return done.stdout, dict(zip(parts[1::2], parts[0::2], strict=False))

    return once(shared_folder(tmp_path_factory, "ends"), run)


def check_codes(ends, names):
    """Checks the exit codes of the cases with these first words; returns their errors."""
    out, errors = ends
    lines = [line for line in out.splitlines() if line.startswith(tuple(f"('{name}'," for name in names))]
    errors = [without_names(text) for case, text in errors.items() if case.rpartition(" ")[0] in names]
    assert len(lines) == len(errors) >= len(names), ends
    assert not [line for line in lines if "WRONG" in line], (lines, errors)
    return errors


def test_a_thread_that_lets_go_late_does_not_abort_the_process(ends):
    assert check_codes(ends, ["complete"]) == ["", ""]


def test_rank_zero_ends_only_when_no_rank_needs_its_store(ends):
    # A failed request is handled, but torch writes a warning with a C++ stack to the terminal.
    assert check_codes(ends, ["last word"]) == [""]


def test_a_run_that_fails_keeps_its_exit_code(ends):
    errors = check_codes(ends, ["early", "handled", "before", "step", "interrupt", "held", "held, exit"])
    assert len(errors) == 8
    assert "terminate called" not in "".join(errors)


def test_an_interrupt_ends_the_process_by_sigint_whatever_its_end_runs(ends):
    errors = check_codes(ends, ["exit function", "thread", "module", "caught", "caught, exit"])
    assert len(errors) == 8
    # Exit functions ran, and what they printed was written.  Two ranks write at once: one's text and line end may be apart.
    assert ends[0].count("left") == 11, ends[0]
    assert "Exception ignored" not in "".join(errors)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_many_complete_runs_end_well(strategy):
    done = run_script(MANY, os.environ.get("FABRICAMP_TEST_RUNS", "50"), strategy, timeout=280)
    assert done.returncode == 0, done.stderr
