"""The rendezvous of one attempt's processes, separate from those of earlier attempts."""

from __future__ import annotations

import functools
import os
import time
import uuid
from datetime import timedelta
from typing import cast

from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.strategies.base import Environment
from fabricamp.torch_private import PrefixStore, Store

_LOOK_SECONDS = 0.01

_hosts: set[int] = set()
"""Ids of the processes that host the store: a forked child is none of them."""


def store_of(environment: Environment, name: str, timeout: timedelta) -> Store:
    """Returns the store shared by all ranks of this attempt, found through ``MASTER_ADDR`` and ``MASTER_PORT``.

    ``name`` is the strategy's name, for the :class:`ConfigError` if one of these variables is missing.
    """
    missing = [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if variable not in os.environ]
    if missing:
        raise ConfigError(
            f"strategy={name!r} with {environment.world_size} processes needs MASTER_ADDR and MASTER_PORT for the rendezvous, but "
            f"{' and '.join(missing)} is not set; start with torchrun, or set the address of the first machine and a free port"
        )
    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], environment.rank, environment.world_size, os.getpid())
    return _rendezvous(key, timeout)


def hosts_store() -> bool:
    """Returns whether this process hosts the store of :func:`store_of`, until it ends; with torchrun, its agent does."""
    return os.getpid() in _hosts


@functools.cache
def _rendezvous(key: tuple[str, str, int, int, int], timeout: timedelta) -> Store:
    """Returns the store of these processes; cached, because its server could not restart on the same port at once.

    ``key`` is (address, port, rank, world size, process id).
    """
    _, _, rank, world_size, _ = key
    opened, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store = cast("Store", opened)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if rank == 0:
            _hosts.add(os.getpid())
        return PrefixStore("fabricamp", store)  # hosted by rank 0, so it ends with this attempt
    return PrefixStore(f"fabricamp/{_attempt(store, rank, world_size, timeout)}", store)


def _attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a unique name of this attempt, the same on all its ranks.

    The agent's store outlives restarted workers and keeps their keys.  The restart count does not identify an attempt: each
    machine's agent counts separately, and a machine that joins or leaves does not count as a restart.  So every rank writes a
    random word, and rank 0 answers each word with the name.  Rank 0 also answers a rank's later words, because the first word may
    be from a dead process.
    """
    if rank == 0:
        return _named_by_first(store, world_size, timeout)
    word = uuid.uuid4().hex
    store.set(_word_of(rank), word)
    try:
        store.wait([_answer_to(word)], timeout)
    except DistStoreError as error:
        raise _timed_out(rank, "0", world_size, timeout) from error
    attempt = store.get(_answer_to(word)).decode()
    store.set(_presence_of(rank, attempt), "1")
    return attempt


def _named_by_first(store: Store, world_size: int, timeout: timedelta) -> str:
    """Names the attempt on rank 0, and answers the other ranks' words until each rank has taken the name."""
    attempt = uuid.uuid4().hex
    answered = dict.fromkeys(range(1, world_size), b"")  # the last word of each rank that was answered
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [rank for rank in answered if not store.check([_presence_of(rank, attempt)])]:
        if time.monotonic() > deadline:
            raise _timed_out(0, ", ".join(map(str, missing)), world_size, timeout)
        for rank in missing:
            if not store.check([_word_of(rank)]):
                continue
            word = store.get(_word_of(rank))
            if word != answered[rank]:
                store.set(_answer_to(word.decode()), attempt)
                answered[rank] = word
        time.sleep(_LOOK_SECONDS)
    return attempt


def _timed_out(rank: int, others: str, world_size: int, timeout: timedelta) -> DistributedError:
    return DistributedError(
        f"rank {rank} waited {timeout.total_seconds():g} s for rank {others} of {world_size} at the rendezvous; see what ended "
        "that process or holds it up"
    )


def _word_of(rank: int) -> str:
    return f"fabricamp/word/{rank}"


def _answer_to(word: str) -> str:
    return f"fabricamp/answer/{word}"


def _presence_of(rank: int, attempt: str) -> str:
    return f"fabricamp/{attempt}/here/{rank}"
