"""``should_stop`` on some or all ranks: training ends after the same step on all of them, whichever rank is late."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist

from fabricamp import Callback
from fabricamp.errors import DistributedError
from fabricamp.state import RunState
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.watchdog import LoopRequests
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

AT = 4


class Asks(Callback):
    """Sets ``should_stop`` in one hook when ``AT`` steps are done, after an optional wait; records the hooks at the end."""

    def __init__(self, hook, *, asks):
        self.asks, self.wait = asks, None
        self.ends = []
        setattr(self, hook, self.ask)

    def ask(self, trainer, module, *_):
        if trainer.global_step == AT and not trainer.sanity_checking:
            if self.wait is not None:
                self.wait(trainer)
            if self.asks:
                trainer.should_stop = True

    def on_train_end(self, trainer, module):
        self.ends.append("train")

    def on_fit_end(self, trainer, module):
        self.ends.append("fit")


class TellsOfNextStep(Callback):
    """Publishes that its rank is past the step at which the others ask to stop."""

    def __init__(self, key):
        self.key = key

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == AT:
            trainer.strategy.store.set(self.key, "1")


class WaitsForWord(Callback):
    """Waits until this rank has learned of another rank's request."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        while trainer.global_step == self.at and not trainer.should_stop:
            time.sleep(0.001)


HOOKS = ("on_train_batch_end", "on_before_zero_grad", "on_validation_end", "on_train_epoch_end")


def run(name, number):
    """Runs a fit; returns (last step, expected last step, weights, hooks of its end, stop reason)."""
    shared, rank = random.Random(number), dist.get_rank()
    late, pause, hook = shared.randrange(2), shared.choice([0, 0.03, 0.15]), shared.choice(HOOKS)
    options = {
        "log_every_n_steps": shared.choice([1, AT, 50]),
        "val_check_interval": shared.choice([AT, 2, 1.0]),
        "accumulate_grad_batches": shared.choice([1, 1, 2]),
    }
    expected, callback, more = AT, Asks("on_train_batch_end", asks=True), []
    if name == "all, one late":
        callback.wait = (lambda _: time.sleep(pause)) if rank == late else None
    elif name == "all, in other hooks":
        options |= {"val_check_interval": 1.0, "accumulate_grad_batches": 1}
        callback = Asks(hook if rank == late else "on_train_batch_end", asks=True)
    elif name.startswith("one, another"):
        # The other rank must not wait in a collective of this step for the rank that waits in a hook.
        options |= {"log_every_n_steps": 50, "val_check_interval": 1.0}
    if name == "one, another past it":
        expected, key = (AT + 1, f"past{number}")
        callback.asks = rank == late
        more = [] if callback.asks else [TellsOfNextStep(key)]
        callback.wait = (lambda trainer: trainer.strategy.store.wait([key])) if callback.asks else None
    elif name == "one, another before it":
        callback.asks = rank == late
        more = [] if callback.asks else [WaitsForWord(AT)]
    elif name.startswith("min_steps"):
        expected = options["min_steps"] = AT + 3
        callback.asks = rank == late or name == "min_steps, all ask"
        more = [WaitsForWord(AT + 1)]
    trainer = quiet_trainer(
        strategy="ddp", devices="auto", max_epochs=5, num_sanity_val_steps=0, callbacks=[*more, callback], **options
    )
    module = Classifier()
    # If a hook of the epoch's end asks, the epoch has to end at that step.
    length = AT if name == "all, in other hooks" else 8 * options["accumulate_grad_batches"]
    trainer.fit(module, loader(8 * length, 4), loader(8))
    weights = torch.cat([one.detach().flatten() for one in module.parameters()])
    return trainer.global_step, expected, weights, callback.ends, trainer.state.stop_reason


NAMES = (
    "all, one late",
    "all, in other hooks",
    "one, another past it",
    "one, another before it",
    "min_steps, all ask",
    "min_steps, one asks",
)


def runs(number):
    return [(name, *run(name, index)) for index, name in zip(range(number), itertools.cycle(NAMES), strict=False)]


def check(number):
    first, second = run_ranks(runs, 2, number, timeout=200 + 5 * number)
    for one, other in zip(first, second, strict=True):
        name, step, expected, weights, ends, reason = one
        assert (step, other[1]) == (expected, expected), name
        assert torch.equal(weights, other[3]), name
        assert ends == other[4] == ["train", "fit"], name
        assert reason == other[5] == "should_stop was set", name


def test_all_ranks_stop_behind_the_step_at_which_they_ask():
    check(2 * len(NAMES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_times():
    check(200)


def requests(rank=0, world_size=2):
    strategy = Strategy()
    strategy.environment = Environment(rank=rank, world_size=world_size)
    state = RunState()
    return LoopRequests(state, strategy), state


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    first, first_state = requests(0)
    second, second_state = requests(1)
    first._timeout = 0.2
    first_state.ask("max_time")
    first.spread()
    for one in (first, second, first):
        one.poll(store)
    assert second_state.should_stop
    with pytest.raises(
        DistributedError, match=r"rank 0 asked to stop \(max_time\).*rank 1 did not reach it: not within 0.2 s"
    ):
        first.all_ask(3.0)
    first.note_store_lost("connection reset\nby peer")
    with pytest.raises(DistributedError, match=r"the store of the process group is gone \(connection reset\)"):
        first.all_ask(3.0)


def test_a_rank_that_has_ended_is_past_everything_but_its_own_end():
    store = dist.HashStore()
    first, first_state = requests(0)
    second, second_state = requests(1)
    first_state.ask("because")
    first.spread()
    first.poll(store)
    second.leave(store)
    first.poll(store)
    assert not first.all_ask(3.0)
    assert not first_state.agreed
    # A rank that stopped at this boundary and left before this rank polled counts as asking.
    second_state.agreed, second._asks_at = True, 4.0
    second.leave(store)
    first.poll(store)
    assert first.all_ask(4.0)
    assert (first_state.agreed, first_state.stop_reason) == (True, "because")


def test_nobody_pays_for_what_nobody_asks():
    """A poll without requests makes one call to the store."""

    class Counting(dist.HashStore):
        asked = 0

        def check(self, keys):
            self.asked += 1
            return super().check(keys)

    store = Counting()
    one, _ = requests()
    one.poll(store)
    assert store.asked == 1
    assert not one.urgent
