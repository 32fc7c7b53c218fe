"""Records GPU allocations and their callers over some steps: a snapshot for pytorch.org/memory_viz."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fabricamp.arguments.checks import check_count, check_number
from fabricamp.profilers.profiler import BATCHES, Profiler
from fabricamp.torch_private import forget_memory, record_memory, write_memory

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger("fabricamp")


class MemoryProfiler(Profiler):
    """Records each allocation on the GPU with its Python frames, and writes a snapshot that https://pytorch.org/memory_viz shows.

    By default it records from the start of the run, including weights and optimizer states, to the end of the third batch.
    An error within the recorded window, such as out of memory, ends the recording: the file shows what led to the error.
    ``"fit-memory.pickle"`` is in the folder of the logs; with several processes there is one file each (``"fit-memory-0.pickle"``).

    Args:
        dirpath: the folder of the file; None means the folder of the run's logs.
        wait: number of batches before the window; 0 starts it with the run.
        active: number of batches in the window; None records up to the end of the run.
        max_entries: number of most recent allocations and frees to keep; each takes a few kB.

    Raises:
        ConfigError: for a number that is out of range; from the Trainer, on a CPU.

    Example:
        >>> profiler = MemoryProfiler(wait=10, active=2)  # Trainer(accelerator="gpu", profiler=profiler)
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        wait: int = 0,
        active: int | None = 3,
        max_entries: int = 100_000,
    ) -> None:
        super().__init__(dirpath)
        self.wait = check_number("wait", wait, least=0)
        self.active = check_count("active", active, least=1, optional=True)
        self.max_entries = check_number("max_entries", max_entries, least=1)
        self._batches = 0
        self._records = False
        self._written = ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Starts recording if ``wait`` is 0."""
        super().setup(stage, local_rank, log_dir)
        self._batches = 0
        self._written = ""
        if self.wait == 0:
            self._begin()

    def stop(self, action_name: str) -> None:
        """Counts batches; starts and ends the recording."""
        if not action_name.endswith(BATCHES[self._stage or "fit"]):
            return
        self._batches += 1
        if self._batches == self.wait:
            self._begin()
        elif self.active is not None and self._batches == self.wait + self.active:
            self._end()

    def summary(self) -> str:
        """Ends the recording; returns the snapshot's path, or why there is none."""
        self._end()
        return self._written or (
            f"no batch was recorded: the run had {self._batches}, and MemoryProfiler(wait={self.wait}) begins after them; "
            "give a smaller wait"
        )

    def teardown(self, stage: str | None) -> None:
        """Ends a recording that an error interrupted, and logs the snapshot's path."""
        if self._records:
            self._end()
            if not self._local_rank:
                _LOG.info(self._written)

    def _begin(self) -> None:
        record_memory(self.max_entries)
        self._records = True

    def _end(self) -> None:
        if not self._records:
            return
        self._records = False
        path = self._file("memory.pickle")
        try:
            write_memory(path)
        finally:
            forget_memory()
        self._written = f"memory of {self._batches - self.wait} batches: {path}, for https://pytorch.org/memory_viz"
