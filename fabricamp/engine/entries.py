"""The entries of a fit's agenda, in the order in which they act after a micro-batch.

:class:`Flush` delivers logged values, :class:`Deadline` asks to stop at ``max_time``, :class:`Validation` validates, :class:`Stop`
ends training at a limit or a request, :class:`Interruption` ends it for a signal.  :class:`CallbackHolds` bounds launches of
several steps, and does nothing else, so its place does not matter.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from fabricamp.agenda import Entry, PassEnd, Position
from fabricamp.arguments.cadence import Cadence, Every, validation_times
from fabricamp.errors import ConfigError
from fabricamp.habits import habits, say_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import Update
    from fabricamp.trainer.arguments import Settings


class Flush(Entry):
    """Takes logged values that have arrived, and starts a flush every ``log_every_n_steps`` steps.

    Values that the host has anyway are looked at earlier, after 1, 2, 4, 8, ... steps: a loss that is nan from the first step on is
    told.
    """

    within_launch = True

    def __init__(self, parts: FitParts, update: Update) -> None:
        self._state = parts.state
        self._settings = parts.settings
        self._metrics = parts.metrics
        self._update = update
        self._look = 0
        """The step of the next look, and below the steps between it and the one after."""
        self._between = 1

    def next(self) -> Position:
        """Returns the step of the next flush or look, or the one at which an earlier flush is old enough to be read."""
        step = self._state.global_step
        flush = step + _to_multiple(step, self._settings.log_every_n_steps)
        return Position(steps=min(self._metrics.due, flush, max(self._look, step + 1)))

    def act(self, *, last: bool) -> PassEnd | None:
        """Works after each step, not within an accumulation."""
        if self._update.stepped:
            self.work()
        return None

    def work(self) -> None:
        """Takes values that have arrived, and starts a flush if this step is one of its steps."""
        step = self._state.global_step
        every = self._settings.log_every_n_steps
        if step >= self._look:
            self._metrics.look_at_numbers(step)
            self._look = step + self._between
            self._between *= 2
        self._metrics.poll(step)
        if every and step % every == 0:
            self._metrics.flush(step)
            if self._update.overflow_policy is not None:
                self._update.overflow_policy.report()

    def free_steps(self, ahead: int) -> float:
        """Returns the steps to the next flush."""
        return _to_multiple(self._state.global_step + ahead, self._settings.log_every_n_steps)


class Deadline(Entry):
    """Asks to stop when ``max_time`` is over on this rank's clock; local, as :class:`Stop` makes the ranks agree."""

    within_launch = True

    def __init__(self, parts: FitParts, update: Update) -> None:
        self._state = parts.state
        self._update = update
        longest = parts.settings.max_time
        self._deadline = math.inf if longest is None else parts.state.started + longest

    def next(self) -> Position:
        """Returns the next step: the clock is read after each one."""
        return Position() if self._deadline == math.inf else Position(steps=self._state.global_step + 1)

    def act(self, *, last: bool) -> PassEnd | None:
        """Reads the clock after a step."""
        if self._update.stepped:
            self.work()
        return None

    def work(self) -> None:
        """Asks to stop if the time is over."""
        if time.monotonic() >= self._deadline:
            self._state.ask("max_time")


class Validation(Entry):
    """Validates after a number of micro-batches, or by steps, epochs or minutes; ``validate`` returns whether it was cut short.

    Every rank gets the same answer; time is that of rank 0.  Steps and epochs are counted from the beginning of the run, time from
    the beginning of each fit.  A validation that is due by time waits for an epoch with a number divisible by
    ``check_val_every_n_epoch``.
    """

    def __init__(self, parts: FitParts, validate: Callable[[], bool]) -> None:
        self._parts = parts
        self._state = parts.state
        self._settings = parts.settings
        self._validate = validate
        self._validates = parts.validate is not None
        self._interval: object = None
        self._read: tuple[type, object, int | None, float] | None = None
        """The settings as they were read last."""
        self._times: Every | None = None
        self._every = 0.0
        """The number of micro-batches between two validations, unless there are ``_times``."""
        self._clock = Cadence(0, None)
        self._last_step = 0
        self.read_settings()

    def read_settings(self) -> None:
        """Reads ``val_check_interval``, which a hook may have changed, and the length of the epoch; raises if they do not fit.

        Settings that count from the next fit on, such as ``limit_val_batches``, are not looked at again for these.
        """
        interval = self._settings.val_check_interval
        read = (type(interval), interval, self._settings.check_val_every_n_epoch, self._parts.length)
        if read == self._read:
            return
        self._read = read
        # 1 is one batch and 1.0 is one epoch, although they are equal.
        changed = type(interval) is not type(self._interval) or interval != self._interval
        self._interval = interval
        if isinstance(interval, int | float):
            self._times = None
            self._every = batches_between_validations(self._settings, interval, self._parts.length)
        elif changed:
            self._times = validation_times(interval)
            self._clock = Cadence(0, self._times.interval)
            self._clock.start(self._state.global_step)

    def next(self) -> Position:
        """Returns the position of the next validation, or look at the clock; an epoch's last batch is one in any case."""
        self.read_settings()
        if not self._validates:
            return Position()
        step = self._state.global_step
        if self._times is None:
            return Position(batches=self._state.batches_done + self._batches_left(0))
        steps = step + _to_multiple(step, self._times.steps)
        if self._times.interval is not None and self._is_epoch_for_time:
            steps = min(steps, max(self._clock.next_look, step + 1))
        return Position(steps=steps)

    def act(self, *, last: bool) -> PassEnd | None:
        """Validates if it is due."""
        if self._validates and self.is_due(last=last) and self._validate():
            return PassEnd.CUT_SHORT  # a resumed run begins with this validation
        return None

    def is_due(self, *, last: bool) -> bool:
        """Returns whether a validation is due after this micro-batch; ``last``: it is the last one of its epoch."""
        self.read_settings()
        due = self._is_counted(last=last)
        if self._times is None:
            return due
        step = self._state.global_step
        if self._ends_step:
            self._last_step = step
            if step >= self._clock.next_look and self._is_epoch_for_time:
                # The clock is asked even if a validation is due already: an interval that is over has to begin again.
                due = self._clock.is_due(step, self._parts.strategy) or due
        return due

    def follows(self) -> bool:
        """Returns whether a validation follows the present micro-batch (for its hooks); leaves out those that are due by time."""
        return self._validates and self._is_counted(last=self._parts.feed.last)

    def free_steps(self, ahead: int) -> float:
        """Returns the steps to the next validation by count; those by time and at an epoch's end come between launches anyway."""
        if not self._validates:
            return math.inf
        if self._times is not None:
            return _to_multiple(self._state.global_step + ahead, self._times.steps)
        return self._batches_left(ahead)

    @property
    def _ends_step(self) -> bool:
        """Whether a step ended here.

        Within an accumulation, and after a micro-batch without a loss, the last step has been checked already.
        """
        return self._state.open_batches == 0 and self._state.global_step != self._last_step

    @property
    def _is_epoch_for_time(self) -> bool:
        return (self._state.epoch + 1) % (self._settings.check_val_every_n_epoch or 1) == 0

    def _is_counted(self, *, last: bool) -> bool:
        """Returns whether a number of batches, steps or epochs makes a validation due; reads no clock, and changes nothing."""
        state = self._state
        every = self._times
        if every is not None:
            ends_epochs = last and every.epochs > 0 and (state.epoch + 1) % every.epochs == 0
            return ends_epochs or (every.steps > 0 and state.global_step % every.steps == 0 and self._ends_step)
        every_epochs = self._settings.check_val_every_n_epoch
        if every_epochs is None:  # counted over the epochs
            return state.batches_done % self._every == 0
        if (state.epoch + 1) % every_epochs:
            return False
        if self._every == math.inf:  # the loader has no length
            return last
        return state.batch_idx % self._every == 0 or (last and self._is_owed())

    def _is_owed(self) -> bool:
        """Returns whether an epoch that ended before its length has missed a validation that a loader of that length has.

        A number of batches is meant as it is: such validations are only owed to an epoch without any.
        """
        if self._parts.length == math.inf:
            return False
        done = self._state.batch_idx // self._every
        expected = self._parts.length // self._every
        return done < expected and (done == 0 or isinstance(self._interval, float))

    def _batches_left(self, ahead: int) -> float:
        """Returns the micro-batches to the next validation, ``ahead`` micro-batches from here, if they are counted."""
        every_epochs = self._settings.check_val_every_n_epoch
        if every_epochs is None:
            return _to_multiple(self._state.batches_done + ahead, self._every)
        if (self._state.epoch + 1) % every_epochs:
            return math.inf
        return _to_multiple(self._state.batch_idx + ahead, self._every)


def batches_between_validations(settings: Settings, interval: float, length: float) -> float:
    """Returns the micro-batches from one validation to the next, for ``val_check_interval`` as a number or a share of an epoch.

    ``length``: the micro-batches of an epoch; inf if unknown.
    """
    if isinstance(interval, int):
        if settings.fast_dev_run:
            return min(interval, length)
        validates = settings.limit_val_batches > 0
        if validates and interval > length and settings.check_val_every_n_epoch is not None:
            raise ConfigError(
                f"val_check_interval={interval} is more than the {length} batches of an epoch, so validation would never run; "
                "give less, or check_val_every_n_epoch=None to count across epochs"
            )
        return interval
    if length == float("inf"):
        if interval != 1.0:
            raise ConfigError(
                f"val_check_interval={interval} is a share of a loader without a length; give a number of batches (int)"
            )
        return length
    return max(1, int(length * interval))


class Stop(Entry):
    """Ends training where a step or an epoch has ended: at ``max_steps``, or by a request (``should_stop``) of any rank.

    ``finish`` is called before training ends by a request.
    """

    at_every_look = True
    """It notes for the other ranks which boundary this rank has passed, before :class:`Interruption` may wait for them."""

    def __init__(self, parts: FitParts, update: Update, finish: Callable[[], None]) -> None:
        self._state = parts.state
        self._settings = parts.settings
        self._requests = parts.requests
        self._update = update
        self._finish = finish

    def next(self) -> Position:
        """Returns the last step; while this rank asks to stop, each micro-batch, any of which may end a step."""
        if self._state.should_stop:
            return Position(batches=0)
        last = self._settings.max_steps
        return Position() if last < 0 else Position(steps=last)

    def act(self, *, last: bool) -> PassEnd | None:
        """Ends training if a limit is reached or all ranks ask, at the end of a step or of an epoch."""
        state = self._state
        at_boundary = self._update.stepped or last
        # A checkpoint written before this line marks the work of Flush and Deadline after this step as not done: a resumed run
        # does it first.
        self._update.stepped = False
        if not at_boundary:
            return None
        at_max_steps = 0 <= self._settings.max_steps <= state.global_step
        if (at_max_steps or state.should_stop) and self.is_done(in_epoch=True):
            if not (at_max_steps or state.cut) and habits().stop_validates:
                self._finish()
            return PassEnd.STOPPED
        state.agenda.passed = state.batches_done
        return None

    def is_done(self, *, in_epoch: bool) -> bool:
        """Returns whether training ends at this boundary: after a step (``in_epoch``), or between two epochs.

        If not, notes that this rank has passed the boundary.
        """
        state = self._state
        settings = self._settings
        # The boundary between two epochs comes after that of the last step, and before the next step's.
        boundary = state.batches_done + (0.0 if in_epoch else 0.5)
        if 0 <= settings.max_steps <= state.global_step:
            return True
        # This limit ends no epoch, even if it was lowered within one.
        if not in_epoch and 0 <= settings.max_epochs <= state.epoch:
            return True
        if state.should_stop:
            if state.cut:  # a signal or nan_policy="stop": every rank stops here, without another agreement
                return True
            if state.global_step < settings.min_steps or state.epoch < settings.min_epochs:
                self._requests.spread()
                say_difference(
                    "steps while a stop waits for min_steps or min_epochs are logged every log_every_n_steps; Lightning logs each"
                )
            elif state.stop_request.agreed or self._requests.all_ask(boundary):
                return True
        state.agenda.passed = boundary
        return False

    def free_steps(self, ahead: int) -> float:
        """Returns the steps to the next limit; a request waits for ``min_steps``."""
        step = self._state.global_step + ahead
        limits = (self._settings.max_steps, self._settings.min_steps)
        return min((limit - step for limit in limits if limit > step), default=math.inf)


class Interruption(Entry):
    """Ends training for a signal, within an accumulation too: after the micro-batch that the ranks have agreed on."""

    def __init__(self, parts: FitParts) -> None:
        self._state = parts.state
        self._agreement = parts.agreement

    def next(self) -> Position:
        """Returns the position at which this rank has promised to wait for the others."""
        return Position(batches=self._state.agenda.hold_at)

    def act(self, *, last: bool) -> PassEnd | None:
        """Waits for the common position, and ends training if it is here."""
        return PassEnd.STOPPED if self.is_here() else None

    def is_here(self) -> bool:
        """Returns whether the ranks have agreed to stop here; also asked between two epochs."""
        return self._state.batches_done >= self._state.agenda.hold_at and self._agreement.hold()


class CallbackHolds(Entry):
    """Lets a launch of several steps end where a callback's batch hooks must run before another step (``Callback.holds_at``).

    The hooks run after each batch anyway, so nothing else is done here.
    """

    def __init__(self, parts: FitParts, holds: Sequence[Callable[[int], float]]) -> None:
        self._state = parts.state
        self._holds = holds

    def free_steps(self, ahead: int) -> float:
        """Returns the steps to the first of these places."""
        step = self._state.global_step + ahead
        return min((hold(step) - step for hold in self._holds), default=math.inf)


def _to_multiple(done: int, every: float) -> float:
    """Returns the distance from ``done`` to the next multiple of ``every``; inf if ``every`` is 0 or inf (never)."""
    return every - done % every if 0 < every < math.inf else math.inf
