"""The face of a profiler: it is told when an action starts and stops, and reports at the end of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabricamp.keywords import NamesKeywords

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
"""The action that is one batch, by entry point."""


class Profiler(NamesKeywords):
    """Derive from it, and override ``start``, ``stop`` and ``summary``.  It is called only if it is given to the Trainer.

    Args:
        dirpath: the folder of its files; None is that of the run's logs.
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
        """An action begins, such as ``"run_training_batch"`` or ``"[Callback]ModelCheckpoint.on_train_end"``."""

    def stop(self, action_name: str) -> None:
        """It is over, also by an exception."""

    def summary(self) -> str:
        """Returns the report."""
        return ""

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """A context that is one action: ``with self.trainer.profiler.profile("loss"):`` in a step of yours."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run of ``stage`` ("fit", "validate", "test" or "predict") begins; the rank is None where there is one process."""
        self._stage, self._local_rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir

    def watch(self, module: nn.Module) -> None:
        """The module that is run, before the first action."""

    def teardown(self, stage: str | None) -> None:
        """The run is over, perhaps by an exception."""

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
        """The path of a file of this rank, in a folder that is there."""
        folder = Path(self.dirpath or ".")
        folder.mkdir(parents=True, exist_ok=True)
        stem, dot, rest = name.partition(".")
        parts = (self._stage, stem, None if self._local_rank is None else str(self._local_rank))
        return folder / ("-".join(part for part in parts if part) + dot + rest)
