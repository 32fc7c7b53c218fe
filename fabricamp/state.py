"""The state of a run on the host; nothing is stored on the user's module.

:class:`RunState` has the counters.  Its parts have the rest: :class:`UserCall`, the user code that runs now, and
:class:`StopRequest`, why training ends; the agenda (``agenda.py``) says after which micro-batch the loop acts next.
"""

from __future__ import annotations

import enum
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from fabricamp.agenda import Agenda

if TYPE_CHECKING:
    from fabricamp._utils.types import Batch

REQUEUES = ("SIGUSR1", "SIGUSR2")
INTERRUPTIONS = ("interrupted", "SIGTERM", *REQUEUES)
"""Interruptions from outside: Ctrl-C and signals.  A run stops for them before ``min_steps`` and within a validation or epoch."""

NON_FINITE = "non-finite gradients"
"""The stop reason of ``nan_policy="stop"``; a run stops for it, too, before ``min_steps`` and within a validation or epoch."""

NOT_VALIDATING = sys.maxsize
"""The value of ``RunState.evaluated`` while no validation within ``fit`` runs."""


class TrainerFn(enum.StrEnum):
    """The entry point that was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(enum.StrEnum):
    """The stage that runs; ``fit`` has three: training, validation, and the sanity-check validation before training."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation (also the sanity check) or a test runs."""
        return self not in (RunningStage.TRAINING, RunningStage.PREDICTING)

    @property
    def dataloader_prefix(self) -> str:
        """The prefix of the loader's name: ``train`` in ``train_dataloader``, ``val`` in ``val_dataloader`` and so on."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class TrainerStatus(enum.StrEnum):
    """The progress of an entry point."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


_FIRST_STAGE = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


class Scope(enum.Enum):
    """The place that user code is called from; it decides the defaults of ``self.log`` and which arguments are refused.

    The loop sets it a few times per epoch, never per step, so a step pays nothing for it.
    """

    NOWHERE = "a hook outside the epochs, or before fit, validate and test"
    TRAIN_STEP = "training_step or a hook around it"
    TRAIN_EPOCH = "a train epoch hook"
    EVAL_STEP = "validation_step, test_step or a hook around them"
    EVAL_EPOCH = "an evaluation epoch hook"
    PREDICT = "predict_step"


Value = TypeVar("Value")


@dataclass(slots=True)
class UserCall:
    """The user code that runs now; ``self.log`` reads where it is called from, and on what."""

    scope: Scope = Scope.NOWHERE
    batch: Batch = None
    """The current micro-batch; ``self.log`` weighs values by its batch size."""
    dataloader_idx: int = 0
    num_dataloaders: int = 1
    ahead: bool = False
    """Whether transfer hooks run for a prefetched batch: the step that it belongs to is not known yet."""
    capturing: bool = False
    """Whether the step is being captured as a CUDA graph: a counter that it reads would stay constant."""


@dataclass(slots=True)
class StopRequest:
    """Why training ends; written by the methods of :class:`RunState`, and by the agreement of the ranks (``watchdog``)."""

    asks: bool = False
    """Whether this rank asks to end training (``should_stop``), for ``reason``."""
    agreed: bool = False
    """Whether all ranks end it at this boundary."""
    reason: str = ""
    explanation: str = ""
    error: Exception | None = None
    """Raised by ``fit`` at its end."""
    interruption: str = ""
    """The signal that interrupted the run."""


class _OfPart(Generic[Value]):
    """A descriptor for a value that a part of the state holds; callbacks read and write it by this name of :class:`RunState`."""

    def __init__(self, part: str, name: str) -> None:
        self._part = part
        self._name = name

    def __get__(self, state: RunState | None, owner: type | None = None) -> Value:
        return cast("Value", self if state is None else getattr(getattr(state, self._part), self._name))

    def __set__(self, state: RunState, value: Value) -> None:
        setattr(getattr(state, self._part), self._name, value)
        state.agenda.look()


class RunState:
    """Counters and the stop flag of one Trainer; the host knows them without asking the GPU.

    ``fn`` is the entry point that runs or ran last, ``stage`` the stage within it (None outside), ``status`` its progress or end.

    ``global_step`` grows by one per step (an attempted update), ``batch_idx`` per micro-batch of the epoch, ``batches_done`` per
    micro-batch of the run.  ``open_batches`` of these belong to the accumulation in progress; a resumed run repeats them
    if their gradients could not be saved.
    ``epoch_ended`` is True while the callbacks at the end of an epoch run.

    ``user_call`` is the user code that runs now, ``stop_request`` says why training ends, and ``agenda`` after which micro-batch
    the loop has to act next.  Callbacks reach the values of these parts by the names below the slots, too.
    """

    __slots__ = (
        "agenda",
        "batch_idx",
        "batches",
        "batches_done",
        "batches_of_last_epoch",
        "closed_at",
        "epoch",
        "epoch_ended",
        "evaluated",
        "fn",
        "global_step",
        "open_batches",
        "peak_bytes",
        "runs_as",
        "skipped_before",
        "stage",
        "started",
        "status",
        "stop_request",
        "user_call",
        "validated_at",
        "validations",
    )

    scope = _OfPart[Scope]("user_call", "scope")
    batch = _OfPart["Batch"]("user_call", "batch")
    dataloader_idx = _OfPart[int]("user_call", "dataloader_idx")
    num_dataloaders = _OfPart[int]("user_call", "num_dataloaders")
    ahead = _OfPart[bool]("user_call", "ahead")
    capturing = _OfPart[bool]("user_call", "capturing")

    agreed = _OfPart[bool]("stop_request", "agreed")
    stop_reason = _OfPart[str]("stop_request", "reason")
    stop_explanation = _OfPart[str]("stop_request", "explanation")
    stop_error = _OfPart["Exception | None"]("stop_request", "error")
    interruption = _OfPart[str]("stop_request", "interruption")

    committed = _OfPart[int]("agenda", "committed")
    hold_at = _OfPart[int]("agenda", "hold_at")
    hold_evaluated = _OfPart[int]("agenda", "hold_evaluated")
    passed = _OfPart[float]("agenda", "passed")

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.stop_request = StopRequest()
        self.user_call = UserCall()
        self.fn: TrainerFn | None = None
        self.stage: RunningStage | None = None
        self.status = TrainerStatus.INITIALIZING
        self.epoch = 0
        self.epoch_ended = False
        self.global_step = 0
        self.skipped_before = 0  # skipped steps of earlier fits
        self.batch_idx = 0
        # Batches of the epoch that ended last, in this process: Lightning's loop shows them up to the next epoch's first batch.
        self.batches_of_last_epoch = 0
        self.batches_done = 0
        # The epoch's iterator of (batch_idx, micro-batch), as the loop reads it; None outside of an epoch.
        self.batches: enumerate[Batch] | None = None
        self.open_batches = 0
        self.peak_bytes = 0  # peak of allocated GPU memory before the last reset of torch's peak statistics
        self.runs_as = ""  # "graph" or "eager" if a CUDA graph was asked for, else empty
        self.validations = 0  # finished validations within fit
        # The ``batches_done`` at the end of the last finished validation within fit: a resumed run repeats an unfinished one.
        self.validated_at = -1
        # The ``batches_done`` when the hooks of an epoch's end last ran: a resumed run calls those that did not run.
        self.closed_at = -1
        # Finished batches of the running validation within fit.
        self.evaluated = NOT_VALIDATING
        self.started = time.monotonic()

    def __repr__(self) -> str:
        doing = ", ".join(str(part) for part in (self.fn, self.stage, self.status) if part is not None)
        reason = self.stop_request.reason or self.stop_request.interruption
        ends = f", {reason}" if reason else ""
        return f"<RunState: {doing}, epoch={self.epoch}, global_step={self.global_step}{ends}>"

    def of_next_fit(self) -> RunState:
        """Returns the state for another fit of the same Trainer: counters continue, at the beginning of an epoch."""
        state = RunState()
        # An epoch that a limit or a stop ended counts as a full epoch.
        within_ended = self.batch_idx > 0 and self.closed_at == self.batches_done
        state.epoch = self.epoch + within_ended
        state.global_step = self.global_step
        state.validations = self.validations
        state.skipped_before = self.skipped_before
        state.batches_done = self.batches_done
        # Nothing of the last fit is left to do.
        state.closed_at = self.batches_done
        state.validated_at = self.batches_done
        return state

    def begin(self, fn: TrainerFn) -> None:
        """Sets the state at the beginning of an entry point."""
        self.fn = fn
        self.stage = _FIRST_STAGE[fn]
        self.status = TrainerStatus.RUNNING

    def end(self) -> None:
        """Sets the state at the end of an entry point, for any kind of end."""
        self.stage = None
        if self.status is TrainerStatus.RUNNING:
            self.status = TrainerStatus.INTERRUPTED if self.interrupted else TrainerStatus.FINISHED

    def fail(self) -> None:
        """Sets the state of an entry point that an exception ended."""
        self.status = TrainerStatus.INTERRUPTED

    @property
    def ended_within_epoch(self) -> bool:
        """Whether a limit or a stop has ended the last fit within an epoch, whose end hooks have run."""
        is_over = self.fn is TrainerFn.FITTING and self.status is TrainerStatus.FINISHED
        return is_over and self.batch_idx > 0 and self.closed_at == self.batches_done

    @property
    def failed(self) -> bool:
        """Whether an exception ended the last entry point, at any point within it."""
        return self.status is TrainerStatus.INTERRUPTED and not self.interrupted

    @property
    def fitting(self) -> bool:
        """Whether ``fit`` trains, or validates within its epochs."""
        return self.fn is TrainerFn.FITTING and self.stage in (RunningStage.TRAINING, RunningStage.VALIDATING)

    @property
    def validating_in_fit(self) -> bool:
        """Whether the validation within the epochs of ``fit`` runs."""
        return self.fn is TrainerFn.FITTING and self.stage is RunningStage.VALIDATING

    def logger_step(self, done: int) -> int:
        """Returns the logger step of a value logged after ``done`` optimizer steps; logger steps are numbered from 0.

        That is the last step.  Before the first step, in a validation within an accumulation, or outside of a fit, it is the next.
        """
        within_accumulation = self.validating_in_fit and self.open_batches > 0
        if self.fn is not TrainerFn.FITTING or within_accumulation:
            return done
        return max(done - 1, 0)

    @property
    def finished(self) -> bool:
        """Whether the last entry point ran to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last entry point ended, in any way."""
        return self.status in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or a signal interrupted the run."""
        return bool(self.stop_request.interruption)

    @property
    def open_batch(self) -> bool:
        """Whether a micro-batch has begun that is not counted as done; costs the loop nothing."""
        if self.batches is None:
            return False
        pickled: Any = self.batches.__reduce__()  # (enumerate, (batches, the next number))
        return bool(pickled[1][1] > self.batch_idx)

    @property
    def cut(self) -> bool:
        """Whether the run ends without the hooks of its epoch's end: after a signal, or by ``nan_policy="stop"``."""
        return self.interrupted or self.stop_request.reason == NON_FINITE

    @property
    def should_stop(self) -> bool:
        """Whether this rank asks to end training; may be set in any thread."""
        return self.stop_request.asks

    @should_stop.setter
    def should_stop(self, asks: bool) -> None:
        self.stop_request.asks = asks
        self.agenda.look()

    def ask(self, reason: str) -> None:
        """Asks all ranks to end training; may be called from any thread."""
        if not self.should_stop:
            # The reason first: another thread reads it once the flag is set.
            self.stop_request.reason = reason
            self.should_stop = True

    def stop(self, reason: str, explanation: str = "") -> None:
        """Ends training at the next step boundary; every rank has to call it at the same boundary."""
        if not self.should_stop or reason == NON_FINITE:
            self.stop_request.reason = reason
            self.stop_request.explanation = explanation
        self.should_stop = True
        self.stop_request.agreed = True

    def forget_stop(self) -> None:
        """Clears the stop requests and the interruption of the run before."""
        self.stop_request = StopRequest()
        self.agenda.hold_at = sys.maxsize
        self.agenda.hold_evaluated = sys.maxsize
        self.agenda.look()

    def interrupt(self, name: str) -> None:
        """Interrupts the run here; every rank has to call it at the same position."""
        self.stop_request.interruption = name
