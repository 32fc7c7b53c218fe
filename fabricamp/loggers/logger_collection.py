"""Passes values to the loggers: if a logger's disk or server fails, only its values are lost, and checkpoints wait briefly."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fabricamp._utils.threads import start_thread
from fabricamp.errors import NoThreadError
from fabricamp.loggers.base import Logger

if TYPE_CHECKING:
    from torch import nn

    from fabricamp._utils.types import StateDict
    from fabricamp.loggers.uploads import SavesCheckpoints
    from fabricamp.state import RunState

BARRIER_SECONDS = 30.0
"""How long a checkpoint waits for the loggers."""


class LoggerCollection:
    """The loggers of one run; empty on ranks other than 0."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)
        self._waited_for: set[int] = set()  # the numbers of loggers; the thread of an abandoned one keeps running
        self._error: BaseException | None = None  # raised by a barrier, outside the training thread

    def begin(self, module: nn.Module) -> None:
        """Lets every logger do slow preparations and draw the module, before the first step."""
        for logger in self._loggers:
            with logger.trouble.guard():
                logger.begin()
                logger.log_graph(module)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Passes the values to every logger."""
        self._raise_error()
        for logger in self._loggers:
            with logger.trouble.guard(step):
                logger.log_metrics(metrics, step)

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Passes the histogram to every logger."""
        for logger in self._loggers:
            with logger.trouble.guard():
                logger.log_histogram(name, counts, limits, sums, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Passes the hyper-parameters to every logger."""
        for logger in self._loggers:
            with logger.trouble.guard():
                logger.log_hyperparams(params)

    def after_save_checkpoint(self, checkpoint_callback: SavesCheckpoints) -> None:
        """Notifies every logger of a ModelCheckpoint's new file."""
        for logger in self._loggers:
            with logger.trouble.guard():
                logger.after_save_checkpoint(checkpoint_callback)

    def state_dict(self) -> list[StateDict]:
        """Returns the position in each log."""
        states = []
        for logger in self._loggers:
            state: StateDict = {}
            with logger.trouble.guard():
                state = logger.state_dict()
            states.append({"logger": type(logger).__qualname__, "state": state})
        return states

    def load_state_dict(self, states: Sequence[StateDict]) -> None:
        """Resumes each logger from the saved state of a logger of its class; others keep their state."""
        unused = list(states)
        for logger in self._loggers:
            of_class = [saved for saved in unused if saved["logger"] == type(logger).__qualname__]
            if of_class:
                unused.remove(of_class[0])
                with logger.trouble.guard():
                    logger.load_state_dict(of_class[0]["state"])

    def barrier(self, step: int) -> None:
        """Waits, in any thread, until all loggers' values are on disk; abandons a logger that fails or is slow."""
        started = {}
        for number, logger in enumerate(self._loggers):
            # Later checkpoints do not wait for a logger that was abandoned and has not finished yet.
            if type(logger).barrier is not Logger.barrier and number not in self._waited_for:
                try:
                    started[number] = self._start(number, logger, step)
                except NoThreadError as error:
                    logger.trouble.tell(f"the checkpoint of step {step} does not wait for its values: {error}")
        deadline = time.monotonic() + BARRIER_SECONDS
        for number, thread in started.items():
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                self._loggers[number].trouble.tell(
                    f"its values up to step {step} are not on disk after {BARRIER_SECONDS:g} s; checkpoints no longer wait for "
                    "them"
                )

    def _start(self, number: int, logger: Logger, step: int) -> threading.Thread:
        def wait() -> None:
            try:
                with logger.trouble.guard():
                    logger.barrier(step)
            except BaseException as error:  # noqa: BLE001 - raised by the training thread; the checkpoint is written first
                self._error = error
            self._waited_for.discard(number)

        self._waited_for.add(number)
        try:
            return start_thread(wait, name="fabricamp-log-barrier", what="the wait", otherwise="give logger=False")
        except NoThreadError:
            self._waited_for.discard(number)
            raise

    def close(self, *, failed: bool, unused: bool = False) -> None:
        """Closes every logger and reports lost values; loggers release folders that are ``unused``: empty, if they are."""
        for logger in self._loggers:
            with logger.trouble.guard():
                logger.save()
            with logger.trouble.guard():
                logger.finalize("failed" if failed else "success")
            with logger.trouble.guard():
                logger.close()
            if unused:
                with logger.trouble.guard():
                    logger.give_back()
            logger.trouble.sum_up()
        if not failed:
            self._raise_error()

    def _raise_error(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error


def log_values(state: RunState, delivery: LoggerCollection, values: Mapping[str, float], step: int) -> None:
    """Logs the values of a flush, an epoch or an evaluation, as Lightning does: with the epoch, at the number of their step.

    ``step`` is the number of optimizer steps done; steps are numbered from 0.  A value called "step" sets the number instead.
    """
    others = {name: value for name, value in values.items() if name != "step"}
    if "step" in values:
        delivery.log_metrics(others, int(values["step"]))
    else:
        others.setdefault("epoch", state.epoch)  # the last, where the program logs none
        delivery.log_metrics(others, state.logger_step(step))
