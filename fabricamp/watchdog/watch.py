"""The watchdog thread: sends heartbeats and stop requests, and ends the process if the run cannot continue.

First what the main thread calls, then the thread: each poll of the store, and the ways in which it ends the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError

from fabricamp._utils.threads import start_thread
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.launch import PEER_FAILURE_NOTE, record_end
from fabricamp.state import RunState
from fabricamp.strategies.base import Strategy
from fabricamp.strategies.rendezvous_store import hosts_store
from fabricamp.torch_private import PrefixStore, Store, default_store
from fabricamp.watchdog.hang_diagnosis import Diagnosis, judge
from fabricamp.watchdog.heartbeat import Heartbeat, HeartbeatSource, position_of
from fabricamp.watchdog.leaving import exit_now, host_at_exit
from fabricamp.watchdog.requests import LoopRequests
from fabricamp.watchdog.signals import exit_code
from fabricamp.watchdog.stop import ANSWER_SECONDS, StopAgreement

if TYPE_CHECKING:
    from fabricamp._utils.types import Batch

_POLL_SECONDS = 0.1
_SHORTEST_SECONDS = 0.0005
_URGENT_SECONDS = 0.01
_CLOSE_SECONDS = 5.0
_BEAT_SECONDS = (0.2, 5.0)
# How long the main thread of a run that cannot continue may take to end by itself, with hooks, files and traceback.
_GRACE_SECONDS = 5.0
# Other ranks wait this long before they exit: after the first exit the starter ends all ranks, also the one that still reports.
_REPORT_SECONDS = 1.0

# After this long without progress in a batch that another rank does not have, a rank counts as waiting for that other rank.
_STUCK_SECONDS = 5.0
# Minimum time for loader workers to deliver the first batch, if the patience is shorter: they import packages, open files and copy
# the data set, on a machine where everything else starts at the same time.
_START_SECONDS = 300.0
# How long a rank that lost a peer looks for which rank it was.
_GONE_SECONDS = 0.5

# Keys of the store; the first rank that writes one keeps it.
_FAILURE = "failure"
_DIAGNOSIS = "diagnosis"
# Counts the ranks that make no further request.
_LEFT = "left"


def patience(timeout: float) -> float:
    """Returns the seconds without progress on any rank after which a run is ended: early enough to be over within ``timeout``."""
    return max(0.75 * timeout, timeout - 10.0)


class Watchdog:
    """Watches a run of several processes from a thread in each process; with one process it does nothing.

    The thread polls the process group's store ten times a second (a hundred times while a loop request is open) for stop requests
    of any rank (:class:`StopAgreement`, :class:`LoopRequests`), and publishes a heartbeat with its main thread's position every
    few seconds.  If another rank has failed or is gone, or no rank has made progress for almost the strategy's ``timeout``, it
    ends the process, by force if the main thread does not end within seconds.  Without progress it also reports which rank holds
    up the others, and where.

    Args:
        state: the run's counters.
        strategy: gives the number of ranks, and how long they wait for each other.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self.agreement = StopAgreement(state, strategy)
        self.requests = LoopRequests(state, strategy)
        self._state = state
        self._strategy = strategy
        self._patience = patience(strategy.timeout.total_seconds())
        self._beat_seconds = min(max(self._patience / 20, _BEAT_SECONDS[0]), _BEAT_SECONDS[1])
        self._next_beat = 0.0
        self._last_beats: dict[int, tuple[int, float]] = {}  # by rank: the last beat, and when it was first seen
        self._passes = 0  # over a loader, so that each has keys of its own in the store
        self._failure = ""  # of this rank
        self._failure_published = False
        self._abandoned_at = sys.float_info.max
        self._closing = threading.Event()
        self._store: Store | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; every rank calls it at the same point, after the strategy has created the process group."""
        if self._strategy.world_size == 1 or self._thread is not None:
            return
        token = self._strategy.broadcast(uuid.uuid4().hex)
        self._store = _own_store(f"fabricamp/watch/{token}")
        self._source = HeartbeatSource(self._state, self._strategy.rank)
        # Publish here, before the thread runs: other ranks need a heartbeat of every rank, even if one dies before its first beat.
        self._publish_heartbeat(self._store, self._source.take(time.monotonic(), stack=False))
        self._thread = start_thread(
            self._watch,
            name="fabricamp-watchdog",
            what="the watch over the other ranks",
            otherwise="train in one process",
        )

    def fail(self, error: BaseException) -> list[int]:
        """Reports this rank's failure to the others; returns ranks that failed or died before, and notes them on ``error``."""
        before = self._failed_before(error) if self._store is not None else {}
        if before:
            error.add_note(PEER_FAILURE_NOTE + "; ".join(before.values()))
        self._failure = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
        return list(before)

    def _failed_before(self, error: BaseException) -> dict[int, str]:
        """Returns ranks whose end may have caused ``error``, each with a description; polls, as a process takes a moment to die."""
        # A collective fails by a RuntimeError.  Some ConfigErrors are RuntimeErrors too, and no other rank causes them.
        may_be_caused = isinstance(error, RuntimeError) and not isinstance(error, ConfigError)
        deadline = time.monotonic() + (_GONE_SECONDS if may_be_caused else 0.0)
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # the store may be gone too
            while time.monotonic() < deadline:
                if self._store.check([_DIAGNOSIS]):
                    diagnosis = Diagnosis(**json.loads(self._store.get(_DIAGNOSIS)))
                    if diagnosis.reporter != self._strategy.rank:
                        exit_now(128 + signal.SIGTERM)  # the main thread failed only because the reporter is gone
                if self._store.check([_FAILURE]):
                    first = json.loads(self._store.get(_FAILURE))
                    return {first["rank"]: f"rank {first['rank']} failed {first['position']}: {first['what']}"}
                heartbeats = _heartbeats(self._store, self._strategy.world_size)
                gone = [heartbeat for heartbeat in heartbeats if heartbeat.gone]
                if gone:
                    return {
                        heartbeat.rank: f"the process of rank {heartbeat.rank} ended, last seen {heartbeat.position}"
                        for heartbeat in gone
                    }
                time.sleep(_POLL_SECONDS)
        return {}

    def together(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Returns ``batches``, but yields the first batch only when every rank has its first batch, or knows that it has none.

        Loader workers may start slowly on one rank.  The other ranks would wait in a collective, which fails after the strategy's
        timeout; here they wait as long as the watchdog finds nothing wrong.
        """
        if self._store is None:  # one process
            return iter(batches)
        return itertools.chain.from_iterable(self._first_and_rest(iter(batches)))

    def _first_and_rest(self, batches: Iterator[Batch]) -> Iterator[Iterable[Any]]:
        first = list(itertools.islice(batches, 1))
        self._passes += 1
        # Once the ranks agree on a stop position, it does not depend on who waits here.
        self._meet(f"first batch/{self._passes}", self._check_failed_meanwhile, leaves=lambda: self.agreement.answered)
        yield first
        first.clear()  # keep no reference to the first batch for the rest of the epoch
        yield batches  # the loader's own iterator: later batches pass through no code of this method

    def meet_at_end_of_data(self, batches: int) -> None:
        """Returns once every rank has run its last batch of the epoch; called before the next collective.

        Raises :class:`DistributedError` if another rank is in a batch that this rank does not have: that rank would wait there
        forever, or reduce its gradients with this rank's next collective.
        """
        if self._store is not None:
            self._meet(f"end of data/{self._state.epoch}", partial(self._check_even, batches=batches))

    def _meet(self, key: str, check: Callable[[Store], None], leaves: Callable[[], bool] = bool) -> None:
        """Returns once every rank has come to ``key``, or if ``leaves()``; ``check`` raises if the wait is in vain."""
        assert self._store is not None
        with contextlib.suppress(DistNetworkError):  # the store's owner process is gone: the next collective will fail
            if self._store.add(f"{key}/ranks", 1) == self._strategy.world_size:
                self._store.set(f"{key}/all", "")
            pause = _SHORTEST_SECONDS
            while not self._store.check([f"{key}/all"]) and not leaves():
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
                if pause == _POLL_SECONDS:
                    check(self._store)

    def _check_failed_meanwhile(self, store: Store) -> None:
        """Raises :class:`DistributedError` if another rank has failed before its first batch."""
        if store.check([_FAILURE]):
            failure = json.loads(store.get(_FAILURE))
            raise DistributedError(
                f"rank {self._strategy.rank} waited with its first batch for the others, and rank {failure['rank']} "
                f"failed {failure['position']}: {failure['what']}"
            )

    def _check_even(self, store: Store, batches: int) -> None:
        """Raises :class:`DistributedError` if another rank is in a batch of this epoch that this rank does not have."""
        heartbeats = _heartbeats(store, self._strategy.world_size)
        in_epoch = [heartbeat for heartbeat in heartbeats if heartbeat.epoch == self._state.epoch]
        ahead = [heartbeat for heartbeat in in_epoch if heartbeat.batch >= batches and heartbeat.idle >= _STUCK_SECONDS]
        if ahead:
            others = ", ".join(str(heartbeat.rank) for heartbeat in ahead)
            places = "".join(f"\n  rank {heartbeat.rank}: {heartbeat.position}" for heartbeat in heartbeats)
            raise DistributedError(
                f"rank {self._strategy.rank} has reached the end of its loader after {batches} batches of epoch "
                f"{self._state.epoch}, and rank {others} has more and waits in the next one:{places}\nevery rank needs as many "
                "batches: shard the samples evenly (torch's DistributedSampler; in an IterableDataset by rank and world_size), "
                f"or give limit_train_batches={batches}"
            )

    def close(self) -> None:
        """Stops the thread; waits for no other rank."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None
        self.agreement.forget()

    def leave(self) -> None:
        """Marks that this rank needs the store no longer; called last in a run that has not failed, without its process group.

        A process that hosts the store ends only when every rank has called it, or after some seconds.  To a rank that still makes
        requests, torch would print a warning, with a stack, about a run that ended well.
        """
        if self._store is None or self.agreement.lost:
            return
        with contextlib.suppress(RuntimeError):  # the process that hosts the store was killed meanwhile
            self._store.add(_LEFT, 1)
        if hosts_store():
            host_at_exit(partial(_in_use, self._store, self._strategy.world_size))

    # -- the thread --------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._store is not None
        try:
            while not self._closing.wait(_URGENT_SECONDS if self.requests.urgent else _POLL_SECONDS):
                self._poll(self._store)
            self._publish_failure(self._store)
            self.agreement.leave(self._store)
            self.requests.leave(self._store)
            self._publish_heartbeat(self._store, self._source.take(time.monotonic(), stack=False, ended=True))
        except RuntimeError as error:
            # The store is gone with its owner process.  A run that ends does not need it, but a waiting main thread must be woken.
            self.agreement.note_store_lost(str(error))
            self.requests.note_store_lost(str(error))
            self._watch_without_store()

    def _poll(self, store: Store) -> None:
        self.agreement.poll(store)
        self.requests.poll(store)
        self._publish_failure(store)
        now = time.monotonic()
        if self.agreement.abandoned:
            self._end_abandoned(now)
            return
        if now < self._next_beat:
            return
        self._next_beat = now + self._beat_seconds
        idle = self._source.idle(now)
        self._publish_heartbeat(store, self._source.take(now, stack=idle >= self._patience / 2))
        if self._failure:
            # The cleanup after this process's own failure takes too long: for example a hook that waits for other ranks.
            if idle >= self._patience:
                exit_now(1)
            return
        self._check_failure(store)
        self._check_answers(store, now)
        self._check_deaths(store)
        if idle >= self._patience / 2:
            self._check_progress(store, now, complete=idle >= self._patience)

    def _publish_failure(self, store: Store) -> None:
        """Publishes this rank's failure, once; the first failure of all ranks is kept."""
        if self._failure and not self._failure_published:
            self._failure_published = True
            failure = {"rank": self._strategy.rank, "what": self._failure, "position": position_of(self._state)}
            store.compare_set(_FAILURE, "", json.dumps(failure))

    def _publish_heartbeat(self, store: Store, heartbeat: Heartbeat) -> None:
        store.set(_heartbeat_key(heartbeat.rank), heartbeat.encode())

    def _check_failure(self, store: Store) -> None:
        """Ends this process soon after another rank has failed: the main thread would wait forever for that rank."""
        if not store.check([_FAILURE]):
            return
        failure = json.loads(store.get(_FAILURE))
        why = f"rank {failure['rank']} failed {failure['position']}: {failure['what']}"
        self._give_up(why, before=[failure["rank"]])

    def _check_answers(self, store: Store, now: float) -> None:
        """Ends this process if a stop was requested and a rank does not answer: no agreement is possible then."""
        agreement = self.agreement
        if agreement.settled or now < agreement.learned_at + ANSWER_SECONDS:
            return
        missing = agreement.missing(store)
        if missing:
            keys = [key for key in map(_heartbeat_key, missing) if store.check([key])]
            last = [Heartbeat.decode(store.get(key)).position for key in keys]
            self._give_up(f"{agreement.who_is_missing()} (last seen {'; '.join(last) or 'nowhere'})")

    def _check_deaths(self, store: Store) -> None:
        """Ends this process if another rank's process on this machine has died: not every collective notices a lost peer."""
        environment = self._strategy.environment
        first = environment.rank - environment.local_rank
        keys = [_heartbeat_key(rank) for rank in range(first, first + environment.local_world_size)]
        if not store.check(keys):
            return
        dead = {heartbeat.rank for heartbeat in map(Heartbeat.decode, store.multi_get(keys)) if heartbeat.gone}
        if not dead:
            return
        # Read again: a process may have published its last heartbeat after the first read, and before it was checked.
        for heartbeat in map(Heartbeat.decode, store.multi_get(keys)):
            if heartbeat.rank in dead and not heartbeat.ended:
                why = f"rank {heartbeat.rank} has died; last seen {heartbeat.position}"
                self._give_up(why, before=[heartbeat.rank])

    def _check_progress(self, store: Store, now: float, *, complete: bool) -> None:
        """Reads all ranks' heartbeats; with ``complete`` (all patience used up), ends the run if no rank makes progress."""
        heartbeats = _heartbeats(store, self._strategy.world_size)
        if not heartbeats:
            return
        for heartbeat in heartbeats:
            if self._last_beats.get(heartbeat.rank, (-1, now))[0] != heartbeat.beat:
                self._last_beats[heartbeat.rank] = (heartbeat.beat, now)
        running = [heartbeat for heartbeat in heartbeats if not heartbeat.ended]
        silent = {
            heartbeat.rank for heartbeat in running if now - self._last_beats[heartbeat.rank][1] > self._silent_seconds
        }
        # A published idle time is as of the last heartbeat, so two heartbeat intervals are added.
        stand_still = all(
            heartbeat.rank in silent or heartbeat.idle + 2 * self._beat_seconds >= self._patience_for(heartbeat)
            for heartbeat in running
        )
        if not (complete and stand_still):
            return
        diagnosis = judge(heartbeats, silent, self._patience)
        if diagnosis is not None:
            self._end_with_diagnosis(store, diagnosis)

    def _patience_for(self, heartbeat: Heartbeat) -> float:
        """Returns how long the rank of ``heartbeat`` may make no progress in its current state."""
        return max(self._patience, _START_SECONDS) if heartbeat.starts else self._patience

    @property
    def _silent_seconds(self) -> float:
        """The seconds without a new beat after which a rank counts as silent."""
        return max(1.0, min(3 * self._beat_seconds + 1.0, self._patience / 3))

    def _end_with_diagnosis(self, store: Store, diagnosis: Diagnosis) -> None:
        """Ends the process with the diagnosis of the rank that was first to make one."""
        store.compare_set(_DIAGNOSIS, "", json.dumps(asdict(diagnosis)))
        diagnosis = Diagnosis(**json.loads(store.get(_DIAGNOSIS)))
        if diagnosis.reporter == self._strategy.rank:
            stopped = [heartbeat for heartbeat in _heartbeats(store, self._strategy.world_size) if heartbeat.stopped]
            killed = [heartbeat.rank for heartbeat in stopped]
            record_end(f"DistributedError: {diagnosis.text}", diagnosis.stack, killed=killed)
            for heartbeat in stopped:
                # A stopped process does not react to SIGTERM, and its starter would wait for it.
                os.kill(heartbeat.pid, signal.SIGKILL)
            exit_now(1)
        time.sleep(_REPORT_SECONDS)
        exit_now(128 + signal.SIGTERM)

    def _end_abandoned(self, now: float) -> None:
        """Ends this process, interrupted before its first batch; by force if the main thread does not end within seconds."""
        if self._abandoned_at > now:
            self._abandoned_at = now
            self.agreement.interrupt_main_thread()
        if now > self._abandoned_at + _GRACE_SECONDS:
            exit_now(exit_code(self.agreement.reason))

    def _watch_without_store(self) -> None:
        """Watches only this rank, without the store, until the run ends."""
        while not self._closing.wait(_POLL_SECONDS):
            if self.agreement.abandoned:
                self._end_abandoned(time.monotonic())
            idle = self._source.idle(time.monotonic())
            if idle >= self._patience:
                heartbeat = self._source.take(time.monotonic(), stack=True)
                self._give_up(
                    f"the store of the process group is gone ({self.agreement.lost.splitlines()[0]}) and there was no progress for "
                    f"{idle:.0f} s", heartbeat.stack,
                )  # fmt: skip

    def _give_up(self, why: str, stack: str = "", before: Sequence[int] = ()) -> None:
        """Ends this process, whose run cannot continue, unless the main thread ends or fails first.

        ``before`` are the ranks whose end or failure is the cause.
        """
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and not self._closing.wait(_POLL_SECONDS):
            pass
        if self._closing.is_set() or self._failure:
            return
        stack = stack or self._source.take(time.monotonic(), stack=True).stack
        text = f"rank {self._strategy.rank} is ended {position_of(self._state)}: {why}"
        record_end(f"DistributedError: {text}", f"stack of rank {self._strategy.rank}:\n{stack}", before)
        exit_now(128 + signal.SIGTERM)


def _heartbeat_key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _heartbeats(store: Store, world_size: int) -> list[Heartbeat]:
    """Returns the last heartbeat of every rank; empty until all ranks have published one."""
    keys = [_heartbeat_key(rank) for rank in range(world_size)]
    if not store.check(keys):
        return []
    return [Heartbeat.decode(text) for text in store.multi_get(keys)]


def _in_use(store: Store, world_size: int) -> bool:
    """Returns whether another rank may still make requests, in a run where none has failed or died."""
    if store.add(_LEFT, 0) == world_size:  # adds nothing: returns the number
        return False
    if store.check([_FAILURE]) or store.check([_DIAGNOSIS]):
        return False
    return not any(heartbeat.gone for heartbeat in _heartbeats(store, world_size))


def _own_store(prefix: str) -> Store:
    """Returns a separate connection to the process group's store: on the original one the main thread may wait long for a key.

    The watchdog thread and the main thread share this connection: neither blocks on it, both only read keys that exist.
    """
    store = default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return PrefixStore(prefix, store)
