"""The agenda of a fit: acting only where an entry is due equals acting after every micro-batch, and no change is lost."""

from __future__ import annotations

import copy
import math
import pickle
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp import Callback
from fabricamp.agenda import Agenda, Entry, PassEnd, Position
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import Logger
from fabricamp.state import RunState
from tests.inside import session
from tests.small import Classifier, loader, quiet_trainer


class Notes(Logger):
    """Keeps what is logged, and the step under which it is."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    name = "notes"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.notes.append(("logged", step, tuple(sorted(metrics.items()))))

    def log_hyperparams(self, params, *args, **options):
        pass


class Diary(Callback):
    """Notes each micro-batch, validation and end, with the counters."""

    def __init__(self, notes):
        self.notes = notes

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.notes.append(("batch", trainer.current_epoch, batch_idx, trainer.global_step, trainer.validation_follows))

    def on_validation_end(self, trainer, module):
        self.notes.append(("validated", trainer.current_epoch, trainer.global_step, trainer.state.batches_done))

    def on_train_epoch_end(self, trainer, module):
        self.notes.append(("epoch ended", trainer.current_epoch, trainer.global_step))

    def on_train_end(self, trainer, module):
        self.notes.append(("ended", trainer.current_epoch, trainer.global_step))


class Manual(Classifier):
    """Steps by itself, in two of three batches."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 < 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Silent(Classifier):
    """Returns no loss for some batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Asks(Callback):
    """Asks to stop at a micro-batch."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.at:
            trainer.should_stop = True


class Stream:
    """A loader without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(loader(4 * self.batches))


class Eager(Agenda):
    """Looks at all entries after every micro-batch."""

    __slots__ = ()

    def renew(self, *, every=True):
        super().renew(every=every)
        self.look()


def run(options, *, kind=Classifier, batches=7, stream=False, asks=0, eager=False):
    """Returns the diary of a run, and its weights."""
    notes = []
    callbacks = [Diary(notes), *([Asks(asks)] if asks else [])]
    trainer = quiet_trainer(callbacks=callbacks, logger=Notes(notes), num_sanity_val_steps=0, **options)
    if eager:
        make = type(trainer.state).of_next_fit

        def of_next_fit():
            state = make(trainer.state)
            state.agenda = Eager()
            return state

        class First(RunState):
            __slots__ = ()

            def of_next_fit(self):
                return of_next_fit()

        trainer.state = First()
    module = kind()
    trainer.fit(module, Stream(batches) if stream else loader(4 * batches), loader(4))
    return notes, {name: value.tolist() for name, value in module.state_dict().items()}


@st.composite
def plans(draw):
    options = {
        "max_epochs": draw(st.integers(1, 3)),
        "max_steps": draw(st.just(-1) | st.integers(1, 12)),
        "min_steps": draw(st.just(None) | st.integers(1, 9)),
        "log_every_n_steps": draw(st.integers(1, 6)),
        "check_val_every_n_epoch": draw(st.sampled_from([1, 1, 2, None])),
    }
    if 0 < options["max_steps"] < (options["min_steps"] or 0):
        options["min_steps"] = None
    plan = {"batches": draw(st.integers(1, 9)), "asks": draw(st.integers(0, 12))}
    plan["kind"] = draw(st.sampled_from([Classifier, Classifier, Manual, Silent]))
    if plan["kind"] is not Manual:
        options["accumulate_grad_batches"] = draw(st.integers(1, 4))
        options["partial_window"] = draw(st.sampled_from(["step", "carry"]))
    intervals = st.integers(1, 9)
    if options["check_val_every_n_epoch"] is not None:
        intervals = st.integers(1, plan["batches"]) | st.sampled_from([1.0, 0.5])
    if options["check_val_every_n_epoch"] == 1:
        intervals |= st.sampled_from(["2 steps", "3 steps, 1 epoch", "2 epochs"])
    options["val_check_interval"] = draw(intervals)
    plan["stream"] = options["val_check_interval"] != 0.5 and draw(st.booleans())
    if draw(st.booleans()):
        options["max_time"] = {"hours": 1}
    return options, plan


@settings(max_examples=40, deadline=None)
@given(plans())
def test_acting_where_an_entry_is_due_equals_acting_everywhere(plan):
    options, others = plan
    assert run(options, **others) == run(options, **others, eager=True)


# -- what changes during a fit -----------------------------------------------------------------------------------------------------


class Sets(Callback):
    """Sets an attribute of the Trainer after a micro-batch."""

    def __init__(self, at, name, value):
        self.at, self.name, self.value = at, name, value

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.at:
            setattr(trainer, self.name, self.value)


def places(kind, callback, **options):
    """Returns the steps at which something was noted: ``validated`` or ``ended``, or ``logged`` for values of ``loss``."""
    notes = []
    trainer = quiet_trainer(
        callbacks=[callback, Diary(notes)], logger=Notes(notes), num_sanity_val_steps=0, **{"max_epochs": 1, **options}
    )
    trainer.fit(Classifier(), loader(40), loader(4))
    if kind == "logged":
        return [note[1] + 1 for note in notes if note[0] == kind and "loss" in dict(note[2])]
    return [note[2] for note in notes if note[0] == kind]


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        ("ended", "max_steps", 5, [5]),
        ("ended", "max_steps", 3, [4]),
        ("ended", "max_steps", -1, [10]),
        ("logged", "log_every_n_steps", 3, [6, 9]),
        ("logged", "log_every_n_steps", 4, [4, 8]),
        ("validated", "val_check_interval", 3, [6, 9]),
        ("validated", "val_check_interval", 2, [4, 6, 8, 10]),
        ("validated", "val_check_interval", 0.5, [5, 10]),
        ("validated", "val_check_interval", "3 steps", [6, 9]),
        ("validated", "check_val_every_n_epoch", 2, []),
    ],
)
def test_a_setting_changed_after_a_batch_counts_from_there(kind, name, value, expected):
    options = {"max_steps": 8} if name == "max_steps" else {}
    assert places(kind, Sets(4, name, value), log_every_n_steps=50, **options) == expected


def test_a_time_between_validations_that_is_set_within_a_fit_begins_there(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fabricamp.arguments.cadence.time.monotonic", lambda: clock[0])

    class Ticks(Sets):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            clock[0] += 1
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    assert places("validated", Ticks(4, "val_check_interval", {"seconds": 3})) == [7, 10]


def test_a_request_by_the_flag_of_the_state_counts_at_this_step():
    class Flags(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.state.should_stop = batch_idx == 5

    assert places("ended", Flags()) == [6]


# -- changes by other threads ------------------------------------------------------------------------------------------------------


class Fixed(Entry):
    def __init__(self, position=None, call=None):
        self.position, self.call, self.acted = position or Position(), call, []

    def next(self):
        if self.call is not None:
            self.call()
        return self.position

    def act(self, *, last):
        self.acted.append(last)


def agenda_of(*entries, kind=Agenda):
    state = RunState()
    state.agenda = kind()
    state.agenda.add(*entries)
    state.agenda.begin(state, lambda steps: 2 * steps)
    return state, state.agenda


def test_a_position_is_the_first_of_micro_batches_and_steps():
    for position, expected in {
        Position(batches=7): 7,
        Position(steps=3): 6,
        Position(7, 3): 6,
        Position(5, 3): 5,
        Position(): math.inf,
    }.items():
        _, agenda = agenda_of(Fixed(position))
        agenda.renew()
        assert agenda.next == expected


def test_entries_act_at_their_position_and_all_of_them_at_the_last_batch():
    first, second = Fixed(Position(batches=3)), Fixed(Position(batches=5))
    state, agenda = agenda_of(first, second)
    agenda.renew()
    state.batches_done = 3
    assert agenda.run(False) is None
    assert (first.acted, second.acted, agenda.next) == ([False], [], 3)
    first.position = Position(batches=8)
    agenda.run(True)
    assert (first.acted, second.acted, agenda.next) == ([False, True], [True], 5)


def test_an_entry_that_ends_the_pass_is_the_last_to_act():
    ends, after = Fixed(Position(batches=1)), Fixed(Position(batches=1))
    ends.act = lambda *, last: PassEnd.STOPPED
    state, agenda = agenda_of(ends, after)
    agenda.renew()
    state.batches_done = 1
    assert agenda.run(False) is PassEnd.STOPPED
    assert after.acted == []


def test_a_change_while_entries_are_asked_is_looked_at_after_the_next_micro_batch():
    def signal():
        if len(calls) < 1:
            calls.append(1)
            agenda.look()

    calls = []
    entry = Fixed(Position(batches=9), signal)
    _, agenda = agenda_of(entry)
    agenda.renew()
    assert agenda.next == 0
    agenda.run(False)
    assert (entry.acted, agenda.next) == ([False], 9)


def test_a_change_right_after_the_next_position_was_written_is_not_lost():
    class Racing(Agenda):
        """Simulates a thread that changes something between two lines of the main thread."""

        __slots__ = ("times",)

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "next" and value == 9 and not getattr(self, "times", 0):
                self.times = 1
                self.look()

    _, agenda = agenda_of(Fixed(Position(batches=9)), kind=Racing)
    agenda.renew()
    assert (agenda.next, agenda.times) == (0, 1)
    agenda.renew()
    assert agenda.next == 9


def test_a_promise_of_the_watchdog_is_looked_at():
    state, agenda = agenda_of(Fixed(Position(batches=9)))
    agenda.renew()
    state.hold_at, state.hold_evaluated = 5, 1
    assert agenda.next == 0
    assert (agenda.hold_at, agenda.hold_evaluated) == (5, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_the_positions_and_no_parts_of_a_run(copied):
    state, agenda = agenda_of(Fixed(call=lambda: None))
    state.hold_at, state.committed, state.should_stop = 5, 4, True
    other = copied(state)
    assert (other.hold_at, other.committed, other.passed, other.should_stop) == (5, 4, -1.0, True)
    with pytest.raises(ValueError, match="empty"):  # no entry
        other.agenda.free_steps()
    assert agenda.free_steps() == math.inf


def test_nothing_of_a_fit_is_held_after_it():
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader(8))
    with pytest.raises(ValueError, match="empty"):
        trainer.state.agenda.free_steps()


# -- resume ------------------------------------------------------------------------------------------------------------------------


class Signals(Callback):
    """Requests an interruption after a micro-batch, or in a validation batch behind it."""

    def __init__(self, at, hook):
        self.at = at
        setattr(self, hook, self.interrupt)

    def interrupt(self, trainer, module, *_):
        if trainer.state.batches_done == self.at:
            session(trainer).agreement.request("SIGTERM")


def resumable(folder, *, signals=None, ckpt_path=None, every=3):
    notes = []
    keeper = ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=-1)
    callbacks = [Diary(notes), keeper] if signals is None else [Diary(notes), keeper, signals]
    module = Classifier()
    trainer = quiet_trainer(
        callbacks=callbacks, logger=Notes(notes), enable_checkpointing=True, num_sanity_val_steps=0,
        max_epochs=-1, max_steps=7, log_every_n_steps=2, accumulate_grad_batches=2, val_check_interval="3 steps, 1 epoch",
    )  # fmt: skip
    if signals is None:
        trainer.fit(module, loader(20), loader(8), ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit):
            trainer.fit(module, loader(20), loader(8), ckpt_path=ckpt_path)
    return notes, module.state_dict(), keeper


@pytest.mark.parametrize(
    ("at", "hook"),
    # Steps end after the batches 2, 4, 5 (an epoch's end), 7, 9, 10, 12: flushes after 4, 7 and 10, saves and validations at 5 and
    # 10, the last step is 7.
    [
        *((at, "on_train_batch_end") for at in range(1, 12)),
        (5, "on_validation_batch_end"),
        (10, "on_validation_batch_end"),
    ],
)
def test_a_run_cut_at_any_entry_goes_on_as_the_straight_one(at, hook, tmp_path):
    straight, expected, _ = resumable(tmp_path / "straight")
    before, _, keeper = resumable(tmp_path / "cut", signals=Signals(at, hook))
    after, weights, _ = resumable(tmp_path / "cut", ckpt_path=keeper.best_model_path or None)
    assert [note[0] for note in before].count("batch") == at
    # What the cut run noted after its checkpoint is noted again.
    assert len(before) + len(after) >= len(straight)
    assert before == straight[: len(before)]
    assert after == straight[-len(after) :]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_flush_of_the_step_of_a_file_is_made_by_the_run_that_resumes_from_it(tmp_path):
    straight, expected, _ = resumable(tmp_path / "straight", every=2)
    (file,) = (tmp_path / "straight").glob("*step=4.ckpt")  # written in a hook, so before the flush of step 4
    after, weights, _ = resumable(tmp_path / "resumed", ckpt_path=file, every=2)
    assert after == straight[-len(after) :]
    assert ("logged", 3) in [note[:2] for note in after]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_deadline_that_is_over_ends_a_resumed_run_at_the_step_of_its_file(tmp_path):
    resumable(tmp_path / "straight", every=2)
    # Written in a hook, so before the clock was read after step 4.
    (file,) = (tmp_path / "straight").glob("*step=4.ckpt")
    trainer = quiet_trainer(max_epochs=3, max_time=timedelta(microseconds=1), accumulate_grad_batches=2)
    trainer.fit(Classifier(), loader(20), ckpt_path=file)
    assert trainer.global_step == 4
    assert trainer.state.stop_reason == "max_time"


class Acts(Callback):
    """Calls ``act(trainer, module)`` after the third micro-batch of a fit."""

    def __init__(self, act):
        self.act = act

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and trainer.state.fn == "fit":
            self.act(trainer, module)


@pytest.mark.parametrize("entry_point", ["validate", "test", "predict"])
def test_a_fit_goes_on_after_an_evaluation_in_one_of_its_hooks(entry_point):
    trainer = quiet_trainer(
        max_epochs=2, callbacks=[Acts(lambda trainer, module: getattr(trainer, entry_point)(module, loader()))]
    )
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == 2 * len(loader())


def test_limit_val_batches_set_in_a_fit_counts_from_the_next_one_on():
    def act(trainer, module):
        trainer.limit_val_batches = 1.0

    trainer = quiet_trainer(max_epochs=2, limit_val_batches=0, val_check_interval=1000, callbacks=[Acts(act)])
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == 2 * len(loader())


def test_a_look_while_the_entries_are_asked_anew_is_not_lost():
    """The look comes right after ``_changed`` was read: the only place where it could be cleared unread."""

    class Interrupted(Agenda):
        __slots__ = ("_flag", "looks")

        @property
        def _changed(self):
            if self.looks:
                self.looks = False
                found, self._flag = self._flag, True
                self.next = 0
                return found
            return self._flag

        @_changed.setter
        def _changed(self, value):
            self._flag = value

    state = RunState()
    agenda = Interrupted.__new__(Interrupted)
    agenda.looks = False
    Agenda.__init__(agenda)
    agenda.begin(state, lambda steps: steps)
    agenda.renew()
    agenda.looks = True
    agenda.renew(every=False)
    assert agenda._changed or agenda.next == 0
