"""No test depends on an earlier test of the same process: on its random numbers or on a thread that it left."""

from __future__ import annotations

import logging
import os
import random
import select
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.distributed.forked import start_forked
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_begins_with_the_same_random_numbers(turn):
    found = random.random(), np.random.random(), torch.rand(()).item()
    first = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert found == (random.Random(0).random(), np.random.RandomState(0).random(), first)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_begins_with_python_s_own_hook_for_errors(turn):
    """A process group installs a hook that adds the rank to each line, and does not remove it."""
    assert sys.excepthook is sys.__excepthook__
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert sys.excepthook is not sys.__excepthook__


def threads_of_autograd():
    torch.ones(1, requires_grad=True).sum().backward()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("pt_autograd") for name in names)


def test_what_is_forked_after_a_fake_tensor_has_no_more_threads_than_devices():
    with FakeTensorMode():
        torch.ones(1)
    assert run_ranks(threads_of_autograd, 1, backend=None) == [torch.cuda.device_count()]


class Late(threading.Thread):
    """A thread that logs when the test says so."""

    def __init__(self):
        super().__init__(daemon=True)
        self.now = threading.Event()

    def run(self):
        self.now.wait(60)
        logging.getLogger("client").warning("the server is gone")


@pytest.fixture(scope="module")
def left():
    """A thread that was there before the test."""
    thread = Late()
    thread.start()
    return thread


@pytest.mark.parametrize(
    "begin",
    [
        lambda folder, wait: start_forked(folder, "waits.py").communicate(600),
        lambda folder, wait: run_ranks(wait, 2, backend=None),
    ],
    ids=["a script", "ranks"],
)
def test_what_a_test_has_forked_ends_with_its_process(tmp_path, begin):
    """When pytest-timeout ends a worker, xdist waits for all processes that hold the worker's pipe open."""
    (tmp_path / "waits.py").write_text("from pathlib import Path\nimport time\nPath('here').touch()\ntime.sleep(600)")

    def wait():
        (tmp_path / "here").touch()
        time.sleep(600)

    read, write = os.pipe()
    if (worker := os.fork()) == 0:
        threading.Thread(target=ends_after, args=(tmp_path / "here",), daemon=True).start()
        try:
            begin(tmp_path, wait)
        finally:
            os._exit(1)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    assert select.select([read], [], [], 100)[0], "somebody still holds the pipe"
    assert os.read(read, 1) == b""
    os.close(read)


def ends_after(file):
    while not file.exists():
        time.sleep(0.01)
    os._exit(0)


def test_a_thread_that_was_left_logs_into_no_later_test(left, caplog):
    own = Late()
    own.start()
    for thread in (left, own):
        thread.now.set()
        thread.join(60)
    assert caplog.messages == ["the server is gone"]
