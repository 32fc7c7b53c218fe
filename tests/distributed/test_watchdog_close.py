"""Rank 0 closes its watchdog only after the other ranks' last requests to the store, which its process may host."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fabricamp.state import RunState
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import Watchdog, watch

LONG = 100.0


@pytest.fixture
def two(monkeypatch):
    """Returns started watchdogs of two ranks that share a store; rank 0 would wait long for rank 1."""
    store = dist.HashStore()
    monkeypatch.setattr(watch, "_own_store", lambda _: store)
    monkeypatch.setattr(watch, "_HOST_SECONDS", LONG)
    monkeypatch.setattr(watch, "_CLOSE_SECONDS", LONG)
    both = []
    for rank in range(2):
        strategy = Strategy()
        strategy.environment = Environment(rank=rank, world_size=2)
        both.append(Watchdog(RunState(), strategy))
        both[-1].start()
    yield both
    both[1].close()


def seconds_to_close(watchdog):
    begun = time.monotonic()
    watchdog.close()
    return time.monotonic() - begun


def test_rank_zero_waits_for_the_others(two):
    closing = threading.Thread(target=two[0].close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    two[1].close()
    closing.join(LONG / 2)
    assert not closing.is_alive()


def test_no_other_rank_waits(two):
    assert seconds_to_close(two[1]) < LONG / 2
    assert seconds_to_close(two[0]) < LONG / 2


def test_rank_zero_waits_a_few_seconds_at_most(two, monkeypatch):
    monkeypatch.setattr(watch, "_HOST_SECONDS", 0.3)
    assert 0.3 <= seconds_to_close(two[0]) < LONG / 2


@pytest.mark.parametrize("failed", [0, 1])
def test_nobody_waits_after_a_failure(two, failed):
    two[failed].fail(ValueError("unwell"))
    assert seconds_to_close(two[0]) < LONG / 2


def test_nobody_waits_in_an_abandoned_run(two):
    two[0].agreement.abandon()
    assert seconds_to_close(two[0]) < LONG / 2
