"""What a run knows of itself: plain counters and flags on the host, nothing stored on the user's module."""

from __future__ import annotations

import enum
import sys
import time
from typing import Any

__all__ = ["INTERRUPTIONS", "NON_FINITE", "NOT_VALIDATING", "RunState", "Scope", "Stage"]

INTERRUPTIONS = ("interrupted", "SIGTERM", "SIGUSR1")
"""The reasons to stop that come from outside: Ctrl-C and signals.  They do not wait for ``min_steps`` or a validation's end."""

NON_FINITE = "non-finite gradients"
"""The reason to stop of a run that ``nan_policy="stop"`` ends; it does not wait for ``min_steps`` either."""

NOT_VALIDATING = sys.maxsize
"""``RunState.evaluated`` outside the validation within ``fit``."""


class Stage(enum.Enum):
    """Which of the four entry points is running, or the sanity check inside ``fit``."""

    IDLE = "idle"
    FIT = "fit"
    SANITY = "sanity_check"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"


class Scope(enum.Enum):
    """Where user code is being called from: decides the defaults of ``self.log`` and what it refuses.

    The loop changes it only where it changes (a few times an epoch), so a step pays nothing for it.
    """

    NOWHERE = "a hook outside the epochs, or before fit, validate and test"
    TRAIN_STEP = "training_step or a hook around it"
    TRAIN_EPOCH = "a train epoch hook"
    EVAL_STEP = "validation_step, test_step or a hook around them"
    EVAL_EPOCH = "an evaluation epoch hook"
    PREDICT = "predict_step"


class RunState:
    """Counters and the stop flag of one Trainer; known to the host without asking the GPU.

    ``global_step`` grows by one per attempted update window, ``batch_idx`` per micro-batch within the epoch, ``batches_done``
    per micro-batch of the whole run; ``open_batches`` of these belong to a window that is not updated yet, which a resumed run
    repeats.  ``epoch_ended`` is True while the callbacks that close an epoch run.  ``batch`` is the micro-batch being worked
    on (for the batch size that ``self.log`` weighs with).
    """

    __slots__ = (
        "batch",
        "batch_idx",
        "batches_done",
        "dataloader_idx",
        "epoch",
        "epoch_ended",
        "evaluated",
        "global_step",
        "hold_at",
        "hold_evaluated",
        "num_dataloaders",
        "open_batches",
        "scope",
        "should_stop",
        "stage",
        "started",
        "stop_explanation",
        "stop_reason",
        "validated_at",
        "validating_in_fit",
    )

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self.scope = Scope.NOWHERE
        self.epoch = 0
        self.epoch_ended = False
        self.global_step = 0
        self.batch_idx = 0
        self.batches_done = 0
        self.open_batches = 0
        self.batch: Any = None
        self.dataloader_idx = 0
        self.num_dataloaders = 1
        self.should_stop = False
        self.stop_reason = ""
        self.stop_explanation = ""
        self.validating_in_fit = False
        # The ``batches_done`` at which the last validation within fit came to its end: a resumed run makes up for one that did not.
        self.validated_at = -1
        # Batches done of the validation within fit that is running.
        self.evaluated = NOT_VALIDATING
        # The main thread may not pass so many micro-batches, and then validation batches, before the ranks agreed where to stop
        # (watchdog/stop.py).
        self.hold_at = self.hold_evaluated = sys.maxsize
        self.started = time.monotonic()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or a signal ended the run."""
        return self.stop_reason in INTERRUPTIONS

    @property
    def stops_at_once(self) -> bool:
        """Whether the reason to stop lets no ``min_steps`` or ``min_epochs`` be waited for."""
        return self.interrupted or self.stop_reason == NON_FINITE

    def stop(self, reason: str, explanation: str = "") -> None:
        """Ends training at the next step boundary; every rank has to call it at the same place."""
        if not self.should_stop or (reason == NON_FINITE and not self.interrupted):
            self.should_stop = True
            self.stop_reason = reason
            self.stop_explanation = explanation
