"""The base class of profilers: called at the start and stop of each action, and reports at the end of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabricamp._utils.keywords import NamesKeywords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_LOG = logging.getLogger("fabricamp")

BATCHES: Final = {
    "fit": "run_training_batch",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""The action of one batch, by entry point."""


class Profiler(NamesKeywords):
    """Base class of profilers: override ``start``, ``stop`` and ``summary``.  It is called only if it is given to the Trainer.

    Args:
        dirpath: the folder of its files; None means the folder of the run's logs.
        filename: writes the report to this file, with the entry point's name before it and ".txt" after it; None prints it.

    Example:
        >>> class Count(Profiler):
        ...     calls = 0
        ...
        ...     def start(self, action_name):
        ...         self.calls += 1
        ...
        ...     def summary(self):
        ...         return f"{self.calls} calls"
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None

    def start(self, action_name: str) -> None:
        """Called at the start of an action, such as ``"run_training_batch"`` or ``"[Callback]ModelCheckpoint.on_train_end"``."""

    def stop(self, action_name: str) -> None:
        """Called at the end of an action, also after an exception."""

    def summary(self) -> str:
        """Returns the report."""
        return ""

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Profiles a block as one action: ``with self.trainer.profiler.profile("loss"):`` in your own step."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called at the start of a run of ``stage`` ("fit", "validate", "test" or "predict"); the rank is None with one process."""
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def watch(self, module: nn.Module) -> None:
        """Called with the module of the run, before the first action."""

    def teardown(self, stage: str | None) -> None:
        """Called at the end of a run, also after an exception."""

    def describe(self) -> None:
        """Writes the summary to the file, or logs it on the first rank of each machine."""
        text = self.summary()
        if text and self.filename:
            path = self._file(f"{self.filename}.txt")
            with path.open("a") as file:
                file.write(text + "\n")
        elif text and not self._local_rank:
            for line in text.splitlines():
                _LOG.info(line)
        self.teardown(self._stage)

    def _file(self, name: str) -> Path:
        """Returns the path of a file of this rank; creates the folder."""
        folder = Path(self.dirpath or ".")
        folder.mkdir(parents=True, exist_ok=True)
        stem, dot, ending = name.partition(".")
        rank = None if self._local_rank is None else str(self._local_rank)
        parts = [part for part in (self._stage, stem, rank) if part]
        return folder / ("-".join(parts) + dot + ending)
