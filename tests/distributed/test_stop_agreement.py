"""All ranks stop after the same micro-batch, whichever rank asks and wherever the others are."""

from __future__ import annotations

import _thread
import os
import random
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from fabricamp.errors import DistributedError
from fabricamp.state import INTERRUPTIONS, NOT_VALIDATING, RunState
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import StopAgreement, Watchdog, interrupts, signals, stop, watch
from tests.distributed.ranks import run_ranks, side_by_side
from tests.distributed.test_stop_phases import AtLine
from tests.small import Classifier, loader, quiet_trainer


class Several(Strategy):
    """A minimal strategy of several processes, for the agreement."""

    def __init__(self):
        super().__init__()
        self.environment = Environment(rank=dist.get_rank(), world_size=dist.get_world_size())

    def broadcast(self, value, source=0):
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def reduce(self, value, op="mean"):
        assert op == "max"
        value = value.int()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value


def watched(answer_seconds=100.0):
    """Returns the state and a started watchdog with long limits, so a slow thread is not taken for dead."""
    stop.ANSWER_SECONDS = answer_seconds
    watch._CLOSE_SECONDS = 100.0
    state = RunState()
    watchdog = Watchdog(state, Several())
    watchdog.agreement.begin()
    watchdog.start()
    return state, watchdog


def train(state, agreement, batches, pause, *, validate_every=0, validation_batches=0, in_validation=None):
    """A minimal fit loop; the exchange of every micro-batch keeps the ranks within one micro-batch of each other."""
    for batch in range(batches):
        pause(batch)
        dist.all_reduce(torch.ones(1))
        state.batches_done += 1
        if (
            validate_every
            and state.batches_done % validate_every == 0
            and validate(state, agreement, validation_batches + dist.get_rank() % 2, in_validation)
        ):
            break
        if state.batches_done >= state.hold_at:
            agreement.hold()
        if state.interrupted:
            break


def validate(state, agreement, batches, in_the_middle):
    """A validation without exchanges until its end; ranks have different numbers of batches."""
    state.evaluated, here = 0, False
    for batch in range(batches):
        time.sleep(0.001)
        state.evaluated += 1
        if in_the_middle is not None and batch == 2:
            in_the_middle()
        if state.evaluated >= state.hold_evaluated and agreement.hold():
            here = True
            break
    ended_early = agreement.ended_early(here=here)
    if not ended_early:
        dist.all_reduce(torch.ones(1))  # stands for the reduction of metrics
        state.evaluated = NOT_VALIDATING
    return ended_early


ENDLESS = 10**9


def rounds(number):
    """Stops at random times: by one or several ranks, early, late, at the end, in validation, while a rank waits for data."""
    shared = random.Random(7)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen = []
    for index in range(number):
        batches = shared.choice([1, 2, 3, 30, ENDLESS, ENDLESS])
        askers = shared.sample(range(world_size), shared.randint(1, world_size)) if index else []
        asked_at = {one: shared.choice([0.0, 0.0005, 0.02, 0.15]) for one in askers}
        slow = shared.choice([None, None, *range(world_size)])
        reason = shared.choice(INTERRUPTIONS)
        validation = {
            "validate_every": shared.choice([0, 2, 2, 5]),
            "validation_batches": shared.choice([1, 3, 300, 300]),
        }
        batches = min(batches, 5 if validation["validate_every"] else 30) if not askers else batches
        state, watchdog = watched()
        thread = watchdog._thread
        timer = threading.Timer(asked_at.get(rank, 0), watchdog.agreement.request, [reason])

        def ask_in_validation(state=state, watchdog=watchdog, asks=rank in askers, reason=reason):
            if asks:
                watchdog.agreement.request(reason)
            wait_for_promise(state)  # on every rank, so none reaches the end of its validation first

        in_validation = batches == ENDLESS and validation["validate_every"] > 0 and index % 2 == 1
        if in_validation:
            validation |= {"validation_batches": 300, "in_validation": ask_in_validation}
        elif rank in askers:
            timer.start()
        train(
            state,
            watchdog.agreement,
            batches,
            lambda batch, slow=slow: time.sleep(0.3) if rank == slow and batch == 2 else None,
            **validation,
        )
        watchdog.agreement.ended_early(here=state.interrupted)
        watchdog.close()
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # a cancelled timer's thread is listed until it ends
        assert state.hold_at == state.hold_evaluated == sys.maxsize
        assert state.interrupted or state.batches_done == batches
        assert not thread.is_alive()
        # By name, because libraries that an earlier test imported start their own threads in every forked process.
        assert not [one for one in threading.enumerate() if one.name.startswith("fabricamp")]
        stopped_in_validation = state.evaluated != NOT_VALIDATING
        assert stopped_in_validation or not in_validation
        seen.append((state.batches_done, stopped_in_validation, state.interrupted, state.interruption))
    return seen


def all_stop_at_the_same_micro_batch(world_size):
    everyone = run_ranks(rounds, world_size, 32)
    assert all(seen == everyone[0] for seen in everyone)
    # At least the endless rounds are stopped, some of them in a validation; other rounds may end before.
    assert sum(stopped for _, _, stopped, _ in everyone[0]) >= 8
    assert sum(in_validation for _, in_validation, _, _ in everyone[0]) >= 3
    assert everyone[0][0][1:] == (False, False, "")  # no rank asked in the first round


def test_two_and_three_stop_at_the_same_micro_batch():
    side_by_side(*(partial(all_stop_at_the_same_micro_batch, world_size) for world_size in (2, 3)))


def signals_before_lines(lines):
    """In each round a SIGTERM comes to a rank before a line of its poll or hold; returns where the ranks stop, and if it came.

    The round ends without it too: the other rank gets a SIGTERM of its own.
    """
    watch._POLL_SECONDS = 0.01
    seen = []
    for index, (function, number) in enumerate(lines):
        state, watchdog = watched()
        agreement = watchdog.agreement
        at_line = AtLine(number, partial(os.kill, os.getpid(), signal.SIGTERM))
        on = index % 2
        if dist.get_rank() == on:
            setattr(agreement, function, partial(at_line, getattr(agreement, function)))

        def pause(batch, at=5 if function == "hold" else 40, on=on):
            if batch == at and dist.get_rank() != on:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)

        with interrupts(agreement):  # until no poll can send itself a signal
            train(state, agreement, ENDLESS, pause)
            agreement.ended_early(here=state.interrupted)
            watchdog.close()
        seen.append((state.batches_done, state.interruption, dist.get_rank() != on or at_line.called))
    return seen


def test_a_signal_before_a_line_stops_both_ranks_at_one_micro_batch():
    lines = [("poll", number) for number in range(1, 100, 7)] + [("hold", number) for number in range(1, 30, 3)]
    one, other = run_ranks(signals_before_lines, 2, lines)
    assert [end[:2] for end in one] == [end[:2] for end in other]
    assert {reason for _, reason, _ in one} == {"SIGTERM"}
    assert sum(both[0][2] and both[1][2] for both in zip(one, other, strict=True)) >= len(lines) / 3


def asked_between_batches():
    """All ranks promise a position before the batch that precedes a validation; returns where they stop."""
    state, watchdog = watched()

    def pause(batch):
        if batch == 1:
            watchdog.agreement.request("SIGTERM")
            wait_for_promise(state)

    train(state, watchdog.agreement, 5, pause, validate_every=2, validation_batches=3)
    watchdog.close()
    return state.batches_done, state.evaluated, state.interruption


def test_the_next_validation_is_cut():
    assert run_ranks(asked_between_batches, 2) == [(2, 1, "SIGTERM")] * 2


def one_ends_and_one_holds():
    """A rank that has ended or died does not keep the others waiting forever."""
    rank = dist.get_rank()
    state, watchdog = watched()
    state.batches_done = 5
    if rank == 1:
        watchdog.close()
    dist.barrier()
    if rank == 0:
        watchdog.agreement.request("SIGUSR1")
        state.batches_done = wait_for_promise(state)
        assert watchdog.agreement.hold()
        assert state.interrupted
    watchdog.close()

    state, watchdog = watched(answer_seconds=1.0)
    thread = watchdog._thread
    dead, go_on = threading.Event(), threading.Event()
    message = ""
    if rank == 1:

        def stand_still(_seconds):
            dead.set()
            go_on.wait()
            return True

        watchdog._closing.wait = stand_still
        dead.wait()
    dist.barrier()
    if rank == 0:
        watchdog.agreement.request("interrupted")
        state.batches_done = wait_for_promise(state)
        while watchdog.agreement.missing(watchdog._store) != [1]:
            time.sleep(0.01)
        with pytest.raises(DistributedError) as caught:
            watchdog.agreement.hold()
        message = str(caught.value)
        watchdog.close()  # waits for no other rank
    dist.barrier()
    go_on.set()
    watchdog.close()
    assert not thread.is_alive()
    return message


def wait_for_promise(state):
    while state.hold_at == sys.maxsize:
        time.sleep(0.01)
    return state.hold_at


def test_a_missing_rank_is_named():
    message, _ = run_ranks(one_ends_and_one_holds, 2)
    assert "no answer from rank 1 within 1 s" in message
    assert "rank 0 was asked to stop (interrupted)" in message


def test_a_lost_store_ends_the_hold_at_once(monkeypatch):
    class Lost(dist.HashStore):
        def check(self, keys):
            raise dist.DistNetworkError("connection reset")

    strategy = Strategy()
    strategy.environment = Environment(world_size=2)
    monkeypatch.setattr("fabricamp.watchdog.watch._own_store", lambda *_: Lost())
    watchdog = Watchdog(RunState(), strategy)
    watchdog.agreement.begin()
    watchdog.start()
    watchdog.agreement.request("interrupted")
    with pytest.raises(DistributedError, match=r"the store of the process group is gone \(connection reset\)"):
        watchdog.agreement.hold()
    watchdog.close()


def single():
    state = RunState()
    return state, StopAgreement(state, Strategy())


def test_single_process_stops_at_once():
    state, agreement = single()
    agreement.begin()
    state.batches_done = 3
    assert state.batches_done < state.hold_at
    agreement.request("SIGTERM")
    agreement.request("SIGUSR1")
    assert state.batches_done >= state.hold_at
    assert agreement.hold()
    assert (state.should_stop, state.interruption, state.hold_at) == (False, "SIGTERM", sys.maxsize)


def test_a_promise_that_the_main_thread_has_passed_is_made_anew():
    class Racing(RunState):
        """Simulates a main thread that increments its counter while the watchdog thread sets ``hold_at``."""

        __slots__ = ("racing",)

        def __setattr__(self, name, value):
            if name == "hold_at" and getattr(self, "racing", 0):
                object.__setattr__(self, "racing", self.racing - 1)
                self.batches_done += 3
            object.__setattr__(self, name, value)

    state = Racing()
    state.racing = 4
    agreement = StopAgreement(state, Strategy())
    assert agreement._promise() == (13, 1)
    assert (state.batches_done, state.hold_at, state.hold_evaluated) == (12, 13, 1)


def test_interrupts_in_the_main_thread():
    state, agreement = single()
    before = signal.getsignal(signal.SIGINT)
    with interrupts(agreement):
        agreement.begin()
        _thread.interrupt_main()
        assert state.hold_at == 0
        agreement.hold()
        assert state.interruption == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            _thread.interrupt_main()
    assert signal.getsignal(signal.SIGINT) is before


def test_before_the_first_batch_a_signal_ends_the_run_at_once():
    for number, name in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "SIGTERM")):
        state, agreement = single()
        before = signal.getsignal(number)
        with interrupts(agreement):
            agreement.guard()
            with pytest.raises(KeyboardInterrupt, match=name):
                os.kill(os.getpid(), number)
            assert agreement.abandoned
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)  # starters send several
        assert signal.getsignal(number) is before
        assert not state.interrupted


def test_a_signal_that_comes_before_anybody_could_catch_it_is_raised_then(monkeypatch):
    leave = signals._leave_group_after_fork
    monkeypatch.setattr(signals, "_leave_group_after_fork", lambda: (os.kill(os.getpid(), signal.SIGTERM), leave()))
    _, agreement = single()
    with interrupts(agreement):
        assert agreement.abandoned
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            agreement.guard()
    module = Classifier()
    with pytest.raises(SystemExit) as ended:
        quiet_trainer(max_epochs=1).fit(module, loader())
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_forked_children_outlive_an_interrupt():
    state, agreement = single()
    with interrupts(agreement):
        child = os.fork()
        if child == 0:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not state.should_stop


def test_interrupts_leaves_other_threads_and_ignored_signals_alone():
    _, agreement = single()
    before = signal.getsignal(signal.SIGINT)
    handlers = []

    def enter():
        with interrupts(agreement):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        enter()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [before, signal.SIG_IGN]
