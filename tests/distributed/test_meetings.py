"""Ranks wait for each other with their first batch, and at the end of their data: who waits goes on, leaves, or is told why not."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from fabricamp.errors import DistributedError
from fabricamp.state import RunState
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import Watchdog, watch


@pytest.fixture
def two(monkeypatch):
    """Returns started watchdogs of two ranks, which have reached their first batch."""
    store = dist.HashStore()
    monkeypatch.setattr(watch, "_own_store", lambda _: store)
    both = []
    for rank in range(2):
        strategy = Strategy()
        strategy.environment = Environment(rank=rank, world_size=2)
        both.append(Watchdog(RunState(), strategy))
        both[-1].agreement.begin()
        both[-1].start()
    yield both
    for watchdog in both:
        watchdog.close()


def started(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def first_of(watchdog):
    assert list(watchdog.together([7, 8])) == [7, 8]


LONG = 20.0
"""Seconds for what happens at once, on a slow machine."""
MEETINGS = [first_of, lambda watchdog: watchdog.meet_at_end_of_data(3)]


@pytest.mark.parametrize("meet", MEETINGS, ids=["first batch", "end of data"])
def test_a_rank_waits_for_the_other(two, meet):
    waiting = started(meet, two[0])
    waiting.join(0.4)
    assert waiting.is_alive()
    meet(two[1])
    waiting.join(LONG)
    assert not waiting.is_alive()


def test_a_stop_ends_the_wait_with_a_first_batch(two):
    waiting = started(first_of, two[0])
    two[1].agreement.request("SIGTERM")
    waiting.join(LONG)
    assert not waiting.is_alive()


def test_a_stop_does_not_end_the_wait_at_the_end_of_data(two):
    """The other rank may have to run more batches, to the position at which all stop: its exchanges need this rank no more."""
    waiting = started(two[0].meet_at_end_of_data, 3)
    two[1].agreement.request("SIGTERM")
    two[0].agreement.wait_for_answers()
    assert two[0].agreement.settled
    waiting.join(0.3)
    assert waiting.is_alive()
    two[1].meet_at_end_of_data(3)
    waiting.join(LONG)
    assert not waiting.is_alive()


def test_a_rank_with_its_first_batch_is_told_that_the_other_has_failed(two):
    two[1]._failure = "ValueError: unwell"
    two[1]._publish_failure(two[1]._store)
    with pytest.raises(
        DistributedError, match=r"rank 0 waited with its first batch for the others, and rank 1 failed .*: ValueError"
    ):
        first_of(two[0])


def test_a_rank_at_the_end_of_its_data_is_told_that_the_other_has_more(two, monkeypatch):
    monkeypatch.setattr(watch, "_STUCK_SECONDS", 0.0)
    two[1]._state.batch_idx = 3
    two[1]._publish_heartbeat(two[1]._store, two[1]._source.take(0.0, stack=False))
    with pytest.raises(
        DistributedError, match="rank 0 has reached the end of its loader after 3 batches of epoch 0, and rank 1"
    ):
        two[0].meet_at_end_of_data(3)
