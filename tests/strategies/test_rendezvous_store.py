"""Ranks of a restarted run find each other in the agent's store, and read nothing of earlier attempts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fabricamp.errors import DistributedError
from fabricamp.strategies import DDP, Environment
from fabricamp.strategies.rendezvous_store import _attempt, _word_of
from fabricamp.torch_private import TCPStore
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


def join(timeout=100.0):
    rank = int(os.environ["RANK"])
    strategy = DDP(timeout=timeout)
    strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=int(os.environ["WORLD_SIZE"])), CPU)
    return strategy


def train_and_die():
    strategy = join()
    assert strategy.reduce(torch.ones(()), "sum").item() == strategy.world_size
    for key in ("left", f"done {strategy.rank}"):
        strategy.store.set(key, "1")
    strategy.store.wait([f"done {rank}" for rank in range(strategy.world_size)])
    os.kill(os.getpid(), signal.SIGKILL)


def wait_and_die():
    """Ends a rank that waits in vain for rank 0, once it has written its word to the store."""
    store, _, _ = next(dist.rendezvous("env://"))
    of_the_first_attempt = store.get(_word_of(1))
    child = multiprocessing.get_context("fork").Process(target=join)
    child.start()
    while store.get(_word_of(1)) == of_the_first_attempt:
        time.sleep(0.01)
    child.kill()
    child.join()
    os.kill(os.getpid(), signal.SIGKILL)


def attempts(folder):
    """Runs two attempts that are killed (the second one before rank 0 joins), and one that completes."""
    rank = int(os.environ["RANK"])
    context = multiprocessing.get_context("fork")
    for function in (train_and_die, *([wait_and_die] if rank else [])):
        process = context.Process(target=function)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (folder / str(rank)).touch()
    while not (folder / "1").exists():  # as with agents: all earlier workers have ended before new ones start
        time.sleep(0.01)
    # Each machine's agent counts separately: a failure counts as a restart, a restart because another machine joined does not.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 - rank)
    strategy = join()
    assert not strategy.store.check(["left"])
    total = strategy.reduce(torch.tensor(rank + 1), "sum").item()
    strategy.teardown()
    return total


def test_workers_that_are_restarted_meet_whatever_their_agents_count(tmp_path):
    assert run_ranks(attempts, 2, tmp_path, backend=None) == [3, 3]


def wait_in_vain():
    os.environ["WORLD_SIZE"] = "3"
    with pytest.raises(DistributedError, match="rank 0 waited 1 s for rank 1, 2 of 3 at the rendezvous"):
        join(timeout=1.0)


def test_rank_0_names_those_that_do_not_come():
    run_ranks(wait_in_vain, 1, backend=None)


def test_the_others_name_rank_0_where_it_does_not_come():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(DistributedError, match=r"rank 1 waited 0.1 s for rank 0 of 2 at the rendezvous"):
        _attempt(store, 1, 2, timedelta(seconds=0.1))
