"""The face of a logger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp.keywords import NamesKeywords
from fabricamp.loggers.trouble import Trouble

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


class Logger(NamesKeywords):
    """Takes the values of a flush; called on rank 0 only (:meth:`join` on every rank), never in the middle of a step.

    An ``OSError`` (a full disk, a server that cannot be reached) out of any method costs the values, not the run: one warning
    names it, and another one at the end says what was lost.  Other errors end training.
    """

    private = False
    """Whether the hyper-parameters are for the eyes of this user alone: files that show them are made with mode 0600."""
    name: str | None = None
    """The name of the run's experiment."""
    version: Any = None
    """The number or name of the run."""
    save_dir: str | None = None
    """The folder that all runs are in, where the logger writes files."""

    _prefix = ""
    _step = 0

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, where the logger writes files."""
        return None

    def run_folders(self) -> list[Path]:
        """The folders of this run and of those before it, newest first: ``ckpt_path="last"`` looks for checkpoints in them."""
        return [] if self.log_dir is None else [Path(self.log_dir)]

    def identity(self) -> Any:
        """Identifies this run to every process (the number of its folder, its name on a server); chosen on the first call.

        Asked for on rank 0 before anything else; a plain value, which :meth:`join` gets on every rank, and in the process that
        started the ranks.  An error here ends the run before it begins, on every rank.
        """
        return None

    def join(self, identity: Any) -> None:
        """Joins this logger to rank 0's run, by rank 0's ``identity``."""

    def give_back(self) -> None:
        """Releases what :meth:`identity` took, if nothing was logged: the run failed before it began."""

    @property
    def trouble(self) -> Trouble:
        """What could not be written in this run."""
        trouble: Trouble = self.__dict__.setdefault("_trouble", Trouble(type(self).__name__))
        return trouble

    def begin(self) -> None:
        """Called once before the first step of a fit, on rank 0: for what may take long, such as a server's answer."""

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The values by their names here, behind the logger's ``prefix``."""
        return {f"{self._prefix}-{name}": value for name, value in metrics.items()} if self._prefix else dict(metrics)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Takes the values of one flush, ``epoch`` among them; ``step`` is the number of the step they belong to, from 0.

        A run always says it; None, of a call by hand, stands for the step of the values before.
        """

    def _at(self, step: int | None) -> int:
        """The step, or that of the call before where none is given."""
        if step is not None:
            self._step = step
        return self._step

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Takes the run's hyper-parameters once, before the first step."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Takes the module to draw, before the first step of a fit; here nothing is drawn."""

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Takes a histogram: counts of equal bins between two limits, sum and sum of squares of the values; here ignored."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called on rank 0 when a ModelCheckpoint has written a file and its paths name it: to upload it, for instance."""

    def save(self) -> None:
        """Writes what is still in memory."""

    def barrier(self, step: int) -> None:
        """Returns once everything given so far is on disk; only then does a checkpoint of ``step`` get its name.

        Called from another thread than the methods above, and beside them: here it does nothing, so that a logger need not
        know of threads.  A checkpoint waits for 30 seconds, then it is written without.
        """

    def state_dict(self) -> dict[str, Any]:
        """Where the log stands, for a checkpoint: plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Removes what was logged after that place, if ``state_dict`` is from this log."""

    def finalize(self, status: str) -> None:
        """Called once at the end of a run, before :meth:`close`; ``status`` is "success" or "failed"."""

    def close(self) -> None:
        """Ends the logger after ``fit``; it may be used again by a later one."""
