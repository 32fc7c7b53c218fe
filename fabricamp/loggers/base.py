"""The base class of loggers, and a guard for the run's random numbers, which logging packages must not consume."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.loggers.logger_errors import LoggerErrors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fabricamp._utils.types import StateDict


class Logger(NamesKeywords):
    """Logs the values of each flush; called on rank 0 only (:meth:`join` on every rank), never in the middle of a step.

    If a method raises ``OSError`` (a full disk, a server that cannot be reached), the values are lost and the run continues: one
    warning names the error, and another one at the end reports what was lost.  Other errors end training.
    """

    private = False
    """Whether only this user may read the hyper-parameters: files that contain them are created with mode 0600."""
    name: str | None = None
    """The name of the run's experiment."""
    version: Any = None
    """The number or name of the run."""
    save_dir: str | None = None
    """The folder of all runs, if the logger writes files."""

    _prefix = ""
    _step = 0

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, if the logger writes files."""
        return None

    def run_folders(self) -> list[Path]:
        """Returns the folders of this run and earlier runs, newest first; ``ckpt_path="last"`` searches them for checkpoints."""
        return [] if self.log_dir is None else [Path(self.log_dir)]

    def identity(self) -> Any:
        """Returns a value that identifies this run (its folder's number, its name on a server); chosen on the first call.

        Called on rank 0 before any other method.  The value must be plain: :meth:`join` gets it on every rank, and in the process
        that started the ranks.  An error here ends the run before it begins, on every rank.
        """
        return None

    def join(self, identity: Any) -> None:
        """Joins this logger to rank 0's run, by rank 0's ``identity``."""

    def give_back(self) -> None:
        """Releases what :meth:`identity` reserved, if the run failed before it began and nothing was logged."""

    @property
    def trouble(self) -> LoggerErrors:
        """The errors and lost values of this run."""
        errors: LoggerErrors = self.__dict__.setdefault("_trouble", LoggerErrors(type(self).__name__))
        return errors

    def begin(self) -> None:
        """Called once before the first step of a fit, on rank 0, for slow work such as waiting for a server."""

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the values with the logger's ``prefix`` before their names."""
        return {f"{self._prefix}-{name}": value for name, value in metrics.items()} if self._prefix else dict(metrics)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs the values of one flush, including ``epoch``; ``step`` is the number of their step, from 0.

        The Trainer always passes ``step``; None, in a manual call, means the step of the previous values.
        """

    def _at(self, step: int | None) -> int:
        """Returns ``step``, or the previous call's step for None."""
        if step is not None:
            self._step = step
        return self._step

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Logs the run's hyper-parameters; called once, before the first step."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Draws the module, before the first step of a fit; does nothing here."""

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Logs a histogram: counts of equal bins between two limits, sum and sum of squares of the values; ignored here."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called on rank 0 after a ModelCheckpoint wrote a file and updated its paths; may upload the file, for instance."""

    def save(self) -> None:
        """Writes the values that are still in memory."""

    def barrier(self, step: int) -> None:
        """Returns once all values so far are on disk; only then does a checkpoint of ``step`` get its name.

        Called from another thread than the methods above, and concurrently.  Does nothing here, so a logger need not handle
        threads.  A checkpoint waits for at most 30 seconds, then is written anyway.
        """

    def state_dict(self) -> StateDict:
        """Returns the position in the log, for a checkpoint, as plain values."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Removes the values logged after that position, if ``state_dict`` is from this log."""

    def finalize(self, status: str) -> None:
        """Called once at the end of a run, before :meth:`close`; ``status`` is "success" or "failed"."""

    def close(self) -> None:
        """Closes the logger after ``fit``; a later ``fit`` may use the logger again."""


_NUMBERS = random.SystemRandom()


def give_numbers_of_its_own(*packages: str) -> None:
    """Makes the loaded modules of these packages use the system's random generator instead of Python's.

    Their threads and ours consume random numbers at any time, for names and for the pauses between attempts.  Python's generator
    belongs to the run: each such draw would change the user's next random numbers.  A resumed or seeded run would also generate
    the names of the previous run again.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "__dict__", {}).get("random") is random:
            module.random = _NUMBERS  # type: ignore[attr-defined]
