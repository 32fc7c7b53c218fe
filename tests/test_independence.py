"""No test depends on what ran before it in the same process: on the numbers it drew, or on a thread that it left."""

from __future__ import annotations

import logging
import random
import threading

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_begins_with_the_same_random_numbers(turn):
    found = random.random(), np.random.random(), torch.rand(()).item()
    first = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert found == (random.Random(0).random(), np.random.RandomState(0).random(), first)


class Late(threading.Thread):
    """Logs when it is told to."""

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


def test_a_thread_that_was_left_logs_into_no_later_test(left, caplog):
    own = Late()
    own.start()
    for thread in (left, own):
        thread.now.set()
        thread.join(60)
    assert caplog.messages == ["the server is gone"]
