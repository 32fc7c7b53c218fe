"""The way to the loggers: one whose disk or server fails costs its values, not the run, and holds no checkpoint up for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fabricamp.loggers.base import Logger

if TYPE_CHECKING:
    from torch import nn

BARRIER_SECONDS = 30.0
"""How long a checkpoint waits for the loggers."""


class Delivery:
    """The loggers of one run; on ranks other than 0 there are none."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)
        self._waits: dict[int, threading.Thread] = {}
        self._error: BaseException | None = None

    def begin(self, module: nn.Module) -> None:
        """Lets every logger do before the first step what may take long, and draw the module."""
        for one in self._loggers:
            with one.trouble.guard():
                one.begin()
                one.log_graph(module)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Gives every logger these values."""
        self._raise_error()
        for one in self._loggers:
            with one.trouble.guard(step):
                one.log_metrics(metrics, step)

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Gives every logger this histogram."""
        for one in self._loggers:
            with one.trouble.guard():
                one.log_histogram(name, counts, limits, sums, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Gives every logger the hyper-parameters."""
        for one in self._loggers:
            with one.trouble.guard():
                one.log_hyperparams(params)

    def after_save_checkpoint(self, checkpoint_callback: object) -> None:
        """Lets every logger know that a ModelCheckpoint has a new file."""
        for one in self._loggers:
            with one.trouble.guard():
                one.after_save_checkpoint(checkpoint_callback)

    def state_dict(self) -> list[dict[str, Any]]:
        """Where each log stands."""
        states = []
        for one in self._loggers:
            state: dict[str, Any] = {}
            with one.trouble.guard():
                state = one.state_dict()
            states.append({"logger": type(one).__qualname__, "state": state})
        return states

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Lets each logger go on where one of its kind stood; others begin as they are."""
        left = list(states)
        for one in self._loggers:
            found = next((saved for saved in left if saved["logger"] == type(one).__qualname__), None)
            if found is None:
                continue
            left.remove(found)
            with one.trouble.guard():
                one.load_state_dict(found["state"])

    def barrier(self, step: int) -> None:
        """Waits until the disk has what all loggers were given, from any thread; gives a logger up that fails or is slow."""
        started = {
            number: self._start(number, one, step)
            for number, one in enumerate(self._loggers)
            if type(one).barrier is not Logger.barrier and number not in self._waits
        }
        deadline = time.monotonic() + BARRIER_SECONDS
        for number, thread in started.items():
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                self._loggers[number].trouble.tell(
                    f"what it was given by step {step} is not on disk after {BARRIER_SECONDS:g} s, so checkpoints are written "
                    "without waiting for it"
                )

    def close(self, *, failed: bool) -> None:
        """Ends every logger, and says what was lost; a run that failed before it began gives its folder back."""
        for one in self._loggers:
            with one.trouble.guard():
                one.save()
            with one.trouble.guard():
                one.finalize("failed" if failed else "success")
            with one.trouble.guard():
                one.close()
            if failed:
                with one.trouble.guard():
                    one.give_back()
            one.trouble.sum_up()
        if not failed:
            self._raise_error()

    def _start(self, number: int, logger: Logger, step: int) -> threading.Thread:
        def wait() -> None:
            try:
                with logger.trouble.guard():
                    logger.barrier(step)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that trains; the checkpoint is written first
                self._error = error
            self._waits.pop(number, None)

        thread = threading.Thread(target=wait, name="fabricamp-log-barrier", daemon=True)
        self._waits[number] = thread
        thread.start()
        return thread

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
