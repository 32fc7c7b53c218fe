"""The state of a run: plain counters and flags on the host, nothing stored on the user's module."""

from __future__ import annotations

import enum
import sys
import time
from typing import Any

REQUEUES = ("SIGUSR1", "SIGUSR2")
INTERRUPTIONS = ("interrupted", "SIGTERM", *REQUEUES)
"""What cuts a run from outside: Ctrl-C and signals.  They wait for no ``min_steps``, no end of a validation or an epoch."""

NON_FINITE = "non-finite gradients"
"""The reason to stop of a run that ``nan_policy="stop"`` ends; it waits for none of these either."""

NOT_VALIDATING = sys.maxsize
"""``RunState.evaluated`` outside the validation within ``fit``."""


class TrainerFn(enum.StrEnum):
    """Which of the four entry points was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(enum.StrEnum):
    """What runs: within ``fit`` training, its validation, or the validation batches before it."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation (that before training too) or a test runs."""
        return self not in (RunningStage.TRAINING, RunningStage.PREDICTING)

    @property
    def dataloader_prefix(self) -> str:
        """The word in ``train_dataloader``, ``val_dataloader`` and so on."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class TrainerStatus(enum.StrEnum):
    """How far an entry point has come."""

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
    """Where user code is being called from: decides the defaults of ``self.log`` and what it refuses.

    The loop changes it only where it changes (a few times per epoch), so a step pays nothing for it.
    """

    NOWHERE = "a hook outside the epochs, or before fit, validate and test"
    TRAIN_STEP = "training_step or a hook around it"
    TRAIN_EPOCH = "a train epoch hook"
    EVAL_STEP = "validation_step, test_step or a hook around them"
    EVAL_EPOCH = "an evaluation epoch hook"
    PREDICT = "predict_step"


class RunState:
    """Counters and the stop flag of one Trainer; known to the host without asking the GPU.

    ``fn`` is the entry point that runs or ran last, ``stage`` what runs within it, None outside, and ``status`` how it ended.

    ``global_step`` grows by one per attempted update window, ``batch_idx`` per micro-batch within the epoch, ``batches_done``
    per micro-batch of the whole run; ``open_batches`` of these belong to a window that is not updated yet, which a resumed run
    repeats.  ``epoch_ended`` is True while the callbacks that close an epoch run.  ``batch`` is the micro-batch being worked
    on (for the batch size that ``self.log`` weighs with).

    ``should_stop`` says that this rank asks training to end, for ``stop_reason``, and ``agreed`` that all do, here;
    ``interruption`` names the signal that cut it.
    """

    __slots__ = (
        "agreed",
        "ahead",
        "batch",
        "batch_idx",
        "batches",
        "batches_done",
        "capturing",
        "closed_at",
        "committed",
        "dataloader_idx",
        "epoch",
        "epoch_ended",
        "evaluated",
        "fn",
        "global_step",
        "hold_at",
        "hold_evaluated",
        "interruption",
        "num_dataloaders",
        "open_batches",
        "passed",
        "peak_bytes",
        "runs_as",
        "scope",
        "should_stop",
        "skipped_before",
        "stage",
        "started",
        "status",
        "stop_error",
        "stop_explanation",
        "stop_reason",
        "validated_at",
        "validations",
    )

    def __init__(self) -> None:
        self.fn: TrainerFn | None = None
        self.stage: RunningStage | None = None
        self.status = TrainerStatus.INITIALIZING
        self.scope = Scope.NOWHERE
        self.epoch, self.epoch_ended = 0, False
        self.global_step = 0
        self.skipped_before = 0  # of these, in the fits before this one
        self.batch_idx = 0
        self.batches_done = 0
        # The micro-batches of the epoch as the loop takes them, numbered; None outside of it.
        self.batches: enumerate[Any] | None = None
        self.open_batches = 0
        self.batch: Any = None
        self.ahead = False  # hooks run that move a batch ahead of its step
        self.capturing = False  # the step that runs is captured as a CUDA graph
        self.peak_bytes = 0  # the most that was allocated on the GPU before torch's own peak was last set back
        self.runs_as = ""  # "graph" or "eager" where a CUDA graph was asked for
        self.dataloader_idx = 0
        self.num_dataloaders = 1
        self.should_stop = False
        self.agreed = False
        self.stop_reason = ""
        self.stop_explanation = ""
        self.stop_error: Exception | None = None  # which fit raises once it is over
        self.interruption = ""
        self.validations = 0  # within fit, that came to their end
        # The ``batches_done`` at which the last validation within fit came to its end: a resumed run makes up for one that did not.
        self.validated_at = -1
        # The ``batches_done`` at which the hooks of an epoch's end ran last: a resumed run makes up for those that did not.
        self.closed_at = -1
        # So many micro-batches the run goes on in any case: a launch of several steps has been made, or they are read for one.
        self.committed = 0
        # Batches done of the validation within fit that is running.
        self.evaluated = NOT_VALIDATING
        # The main thread may not pass so many micro-batches, and then validation batches, before the ranks agreed where to stop
        # (watchdog/stop.py).
        self.hold_at = self.hold_evaluated = sys.maxsize
        # The last boundary that was passed without a request to stop (watchdog/requests.py).
        self.passed = -1.0
        self.started = time.monotonic()

    def __repr__(self) -> str:
        doing = ", ".join(str(one) for one in (self.fn, self.stage, self.status) if one is not None)
        ends = f", {self.stop_reason or self.interruption}" if self.stop_reason or self.interruption else ""
        return f"<RunState: {doing}, epoch={self.epoch}, global_step={self.global_step}{ends}>"

    def of_next_fit(self) -> RunState:
        """What another fit of the same Trainer begins with: it counts on, from an epoch's beginning."""
        state = RunState()
        # An epoch that a limit or a stop ended counts as one.
        within_ended = self.batch_idx > 0 and self.closed_at == self.batches_done
        state.epoch = self.epoch + within_ended
        state.global_step, state.validations = self.global_step, self.validations
        state.skipped_before = self.skipped_before
        state.batches_done = state.closed_at = state.validated_at = self.batches_done
        return state

    def begin(self, fn: TrainerFn) -> None:
        """An entry point begins."""
        self.fn, self.stage, self.status = fn, _FIRST_STAGE[fn], TrainerStatus.RUNNING

    def end(self) -> None:
        """It is over, however it came to that."""
        self.stage = None
        if self.status is TrainerStatus.RUNNING:
            self.status = TrainerStatus.INTERRUPTED if self.interrupted else TrainerStatus.FINISHED

    def fail(self) -> None:
        """It is over, by an exception."""
        self.status = TrainerStatus.INTERRUPTED

    @property
    def failed(self) -> bool:
        """Whether an exception has ended it, in the middle of anything."""
        return self.status is TrainerStatus.INTERRUPTED and not self.interrupted

    @property
    def fitting(self) -> bool:
        """Whether ``fit`` trains, or validates within its epochs."""
        return self.fn is TrainerFn.FITTING and self.stage in (RunningStage.TRAINING, RunningStage.VALIDATING)

    @property
    def validating_in_fit(self) -> bool:
        """Whether the validation within the epochs of ``fit`` runs."""
        return self.fn is TrainerFn.FITTING and self.stage is RunningStage.VALIDATING

    def place_of(self, done: int) -> int:
        """Where on the loggers' axis stands what is logged behind ``done`` steps.

        At the last one, or where none is over (before the first, within a window, outside of a fit) at the one that comes.
        """
        within_window = self.validating_in_fit and self.open_batches > 0
        last_is_over = self.fn is TrainerFn.FITTING and not within_window
        return max(done - last_is_over, 0)

    @property
    def finished(self) -> bool:
        """Whether the last entry point came to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether it ended, in any way."""
        return self.status in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or a signal cut the run."""
        return bool(self.interruption)

    @property
    def open_batch(self) -> bool:
        """Whether a micro-batch was begun that does not count as done yet; costs the loop nothing."""
        if self.batches is None:
            return False
        pickled: Any = self.batches.__reduce__()  # (enumerate, (batches, the next number))
        return bool(pickled[1][1] > self.batch_idx)

    @property
    def cut(self) -> bool:
        """Whether the run ends within its epoch, whose end is not to run: after a signal, or by ``nan_policy="stop"``."""
        return self.interrupted or self.stop_reason == NON_FINITE

    def ask(self, reason: str) -> None:
        """Asks all ranks to end training; from any thread."""
        if not self.should_stop:
            self.stop_reason = reason
            self.should_stop = True

    def stop(self, reason: str, explanation: str = "") -> None:
        """Ends training at the next step boundary; every rank has to call it at the same place."""
        if not self.should_stop or reason == NON_FINITE:
            self.stop_reason, self.stop_explanation = reason, explanation
        self.should_stop = self.agreed = True

    def forget_stop(self) -> None:
        """Before a run: what ended the one before does not end it."""
        self.should_stop = self.agreed = False
        self.stop_reason = self.stop_explanation = self.interruption = ""
        self.stop_error = None
        self.hold_at = self.hold_evaluated = sys.maxsize

    def interrupt(self, name: str) -> None:
        """Cuts the run here; every rank has to call it at the same place."""
        self.interruption = name
