import os

# One thread per process: the suite runs several processes on two cores, and sums are the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch looks up the name of each end of a TCPStore's connection.  Where the name server does not answer, each process that
# starts would wait 10 s for it; no test needs a name that is not in /etc/hosts (resolv.conf(5): no attempts, no query).
os.environ.setdefault("RES_OPTIONS", "attempts:0")

import gc
import random
import signal
import sys
import threading
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.large_pages import use_large_pages

pytest_plugins = ["tests.skips", "tests.gpu_turns"]

_MODULES = pytest.StashKey[int]()
"""Number of loaded modules when memory was last moved to large pages."""

torch.set_num_threads(1)

# If a torch for CUDA sees no GPU, the first FakeTensorMode of a process would register a guard with eight fake devices: the next
# backward would start a thread for each, and autograd would refuse to work in processes forked after that.
if torch.version.cuda and not torch.cuda.device_count():
    torch._C._ensureCUDADeviceGuardSet = lambda: None

# Without a device torch.manual_seed would queue calls that nobody makes, each with the formatted stack: milliseconds within pytest.
for _device in (torch.cuda, torch.xpu):
    if not _device.device_count():
        _device.random._lazy_call = lambda call, **kinds: None

# No deadline, because the machine may be busy.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Otherwise each process that a test starts would compile the package's sources again, and this process the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Interpreters that tests start need half the time (tests/startup/sitecustomize.py).
_STARTUP = str(Path(__file__).with_name("startup"))
if _STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))

# A shell that starts the tests in the background ignores SIGINT, and processes started here would inherit that; tests of Ctrl-C
# need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Default folders (logs, checkpoints) are created in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _leaves_nothing_that_later_tests_meet():
    """Fails if a test leaves two threads or a process group.

    Every later test of this process would be ten times slower beside another process; ranks that later tests fork would use the
    group, and fail or wait for each other.
    """
    found = dist.is_initialized()
    yield
    left = dist.is_initialized() and not found
    if left:
        dist.destroy_process_group()
    assert not left
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def _catches_what_its_own_threads_log(caplog):
    """Hides messages of threads from earlier tests: a client may report at any time that its server is gone."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}

    def is_this_tests(record):
        return threading.current_thread() not in earlier  # a handler is called by the thread that logs

    caplog.handler.addFilter(is_this_tests)
    yield
    caplog.handler.removeFilter(is_this_tests)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Starts each test and its fixtures with the same random numbers, whatever ran before it."""
    for name in ("FABRICAMP_GLOBAL_SEED", "FABRICAMP_SEED_WORKERS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)  # an earlier seed_everything may have set them, and runs of this test would use them
    sys.excepthook = sys.__excepthook__  # each process group wraps the present hook and does not restore it
    random.seed(0)
    np.random.seed(0)  # the generator that libraries draw from
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Freezes imported and collected objects: they stay to the end, and would add half a second to each garbage collection."""
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
    """Freezes objects that a file's tests imported, too: otherwise collections and forks of later tests would become slower."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()
            if len(sys.modules) - item.session.stash[_MODULES] > 100:
                item.session.stash[_MODULES] = len(sys.modules)
                use_large_pages()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    """Freezes what has lived to the end: pytest collects garbage ten times there, for the warnings of what is left."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("gpu2") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
