import os

# One thread per process: the suite runs several processes on two cores, and sums have the same bits on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch looks up the host name of each end of a TCPStore's connection.  If the name server does not answer, each new process would
# wait 10 s for it; no test needs a name that is not in /etc/hosts (resolv.conf(5): with no attempts there is no query).
os.environ.setdefault("RES_OPTIONS", "attempts:0")

import gc
import random
import signal
import sys
import threading

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.large_pages import use_large_pages

pytest_plugins = ["tests.skips", "tests.gpu_turns"]

_MODULES = pytest.StashKey[int]()
"""The number of loaded modules at the last call of ``use_large_pages``."""

torch.set_num_threads(1)

# If a torch for CUDA sees no GPU, the first FakeTensorMode of a process replaces CUDA's device guard by one for eight devices.
# The next backward would then start a thread for each device, and autograd refuses to run in processes forked after that.
if torch.version.cuda and not torch.cuda.device_count():
    torch._C._ensureCUDADeviceGuardSet = lambda: None

# No limits on the time of an example or of its generation, because slow machines would exceed them.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Writes bytecode, because otherwise each process that a test starts would compile the package's sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores SIGINT in background jobs, and child processes would inherit that, but tests send Ctrl-C to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Runs each test in its own folder, so that default folders (logs, checkpoints) are created there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _leaves_one_thread():
    """With two threads, every later test of this process would be ten times slower if another process runs."""
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def _leaves_no_process_group():
    """Ranks that later tests fork would inherit a process group, and fail or wait for each other."""
    found = dist.is_initialized()
    yield
    left = dist.is_initialized() and not found
    if left:
        dist.destroy_process_group()
    assert not left


@pytest.fixture(autouse=True)
def _catches_what_its_own_threads_log(caplog):
    """Captures only logs of the test's own threads: a client left by an earlier test may log that its server is gone."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}

    def is_this_tests(record):
        return threading.current_thread() not in earlier  # the thread that logs calls the handler

    caplog.handler.addFilter(is_this_tests)
    yield
    caplog.handler.removeFilter(is_this_tests)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Seeds the random numbers before each test and its new fixtures, independently of earlier tests."""
    for name in ("FABRICAMP_GLOBAL_SEED", "FABRICAMP_SEED_WORKERS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)  # an earlier seed_everything set them, and this test's runs would use them
    sys.excepthook = sys.__excepthook__  # each process group wraps the current hook, and does not restore it
    random.seed(0)
    np.random.seed(0)  # the global generator, which libraries use
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Freezes imported and collected objects, which live to the end: each garbage collection would scan them for half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        use_large_pages()
        session.stash[_MODULES] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Freezes the imports of each test file too, which live to the end: collections and forks would scan ever more of them."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()
            if len(sys.modules) - item.session.stash[_MODULES] > 100:
                item.session.stash[_MODULES] = len(sys.modules)
                use_large_pages()


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("gpu2") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
