"""A process that hosts the store ends only after the other ranks' last requests to it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from fabricamp.state import RunState
from fabricamp.strategies import rendezvous_store
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import Watchdog, leaving, watch

LONG = 30.0


@pytest.fixture
def two(monkeypatch):
    """Returns started watchdogs of two ranks; this process hosts their store, and would wait long for a rank at its end."""
    store = dist.HashStore()
    monkeypatch.setattr(watch, "_own_store", lambda _: store)
    monkeypatch.setattr(leaving, "_HOST_SECONDS", LONG)
    # Not empty: host_at_exit registers nothing for the end of this process.
    monkeypatch.setattr(leaving, "_hosted", {0: bool})
    monkeypatch.setattr(rendezvous_store, "_hosts", {os.getpid()})
    both = []
    for rank in range(2):
        strategy = Strategy()
        strategy.environment = Environment(rank=rank, world_size=2)
        both.append(Watchdog(RunState(), strategy))
        both[-1].start()
    yield both
    for watchdog in both:
        watchdog.close()


def seconds_to_end():
    begun = time.monotonic()
    leaving._wait_until_unused()
    return time.monotonic() - begun


def end_run(watchdog):
    watchdog.close()
    watchdog.leave()


def test_the_host_waits_for_the_others(two):
    end_run(two[0])
    ending = threading.Thread(target=leaving._wait_until_unused)
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()
    end_run(two[1])
    ending.join(LONG / 2)
    assert not ending.is_alive()


def test_the_host_waits_for_some_seconds_at_most(two, monkeypatch):
    monkeypatch.setattr(leaving, "_HOST_SECONDS", 0.3)
    end_run(two[0])
    assert 0.3 <= seconds_to_end() < LONG / 2


def test_no_other_process_waits(two, monkeypatch):
    monkeypatch.setattr(rendezvous_store, "_hosts", {os.getppid()})  # as in a forked child
    end_run(two[0])
    assert seconds_to_end() < LONG / 2
    assert os.getpid() not in leaving._hosted


def test_a_forked_child_does_not_wait(two):
    end_run(two[0])
    leaving._hosted[os.getppid()] = leaving._hosted.pop(os.getpid())
    assert seconds_to_end() < LONG / 2


@pytest.mark.parametrize("why", ["failed", "diagnosed", "died"])
def test_the_host_does_not_wait_for_a_rank_that_will_not_leave(two, why):
    end_run(two[0])
    two[1].close()
    if why == "failed":
        two[1]._failure = "unwell"
        two[1]._publish_failure(two[1]._store)
    elif why == "diagnosed":
        two[1]._store.set("diagnosis", "{}")
    else:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        heartbeat = replace(two[1]._source.take(time.monotonic(), stack=False), pid=child)
        two[1]._publish_heartbeat(two[1]._store, heartbeat)
    assert seconds_to_end() < LONG / 2


def test_a_rank_whose_store_is_lost_makes_no_request(two):
    two[1].close()
    two[1].agreement.note_store_lost("connection reset")
    two[1]._store = object()  # any request would raise
    two[1].leave()


@pytest.mark.parametrize(("rank", "agent", "hosts"), [(0, "False", True), (1, "False", False), (0, "True", False)])
def test_rank_zero_hosts_the_store_unless_an_agent_does(monkeypatch, rank, agent, hosts):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(rendezvous_store, "_hosts", set())
    monkeypatch.setattr(rendezvous_store, "_attempt", lambda *_: "attempt")
    monkeypatch.setattr(rendezvous_store, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), rank, 2)]))
    rendezvous_store._rendezvous.__wrapped__(("localhost", "1", rank, 2, os.getpid()), timedelta(seconds=1))
    assert rendezvous_store.hosts_store() == hosts
