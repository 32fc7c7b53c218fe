"""Profiles each action with Python's cProfile, and prints which functions took the time."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from typing import TYPE_CHECKING

from fabricamp.errors import ConfigError
from fabricamp.profilers.profiler import Profiler

if TYPE_CHECKING:
    from pathlib import Path

    from fabricamp._utils.types import StateDict


class AdvancedProfiler(Profiler):
    """Profiles the functions that each action calls, with Python's ``cProfile``.

    An action within another one counts for itself alone: one profile is recorded at a time, so that times are counted once.

    Args:
        dirpath: the folder of its files; None means the folder of the run's logs.
        filename: writes the report to this file, with the entry point's name before it and ".txt" after it; None prints it.
        line_count_restriction: the functions in each table: a whole number, or a fraction of them.
        dump_stats: also writes each action's profile, for ``python -m pstats`` and its like: ``fit-run_training_batch.prof``.

    Raises:
        ConfigError: if an action stops without having started.

    Example:
        >>> trainer = Trainer(profiler=AdvancedProfiler(filename="functions", line_count_restriction=20))
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        """The profile of each action."""
        self._running: list[str] = []  # the actions that were started and not stopped, outer ones first

    def start(self, action_name: str) -> None:
        """Records the functions called from here on, for this action."""
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """Ends the recording for this action, and goes on with that of the action around it."""
        if action_name not in self._running:
            raise ConfigError(f"the action {action_name!r} is stopped and was not started; call start first")
        self.profiled_actions[self._running[-1]].disable()
        last = len(self._running) - 1 - self._running[::-1].index(action_name)
        del self._running[last]
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        """Returns a table for each action, longest cumulative time first."""
        parts = [f"Profile of {self._stage or 'the run'}, by function"]
        for action_name, profiled in self.profiled_actions.items():
            if self.dump_stats:
                name = re.sub(r"[^\w.-]+", "_", action_name)
                profiled.dump_stats(self._file(f"{name}.prof"))
            text = io.StringIO()
            stats = pstats.Stats(profiled, stream=text).strip_dirs().sort_stats("cumulative")
            stats.print_stats(self.line_count_restriction)
            parts.append(f"{action_name}\n{text.getvalue().strip()}")
        return "\n\n".join(parts)

    def teardown(self, stage: str | None) -> None:
        """Ends the recording; the next run begins anew."""
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running = []
        self.profiled_actions = {}

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "profiled_actions": {}, "_running": []}
