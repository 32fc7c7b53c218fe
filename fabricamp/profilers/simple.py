"""Counts and times actions, and prints a table at the end of the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fabricamp.errors import ConfigError
from fabricamp.profilers.phases import PhaseClock, bars
from fabricamp.profilers.profiler import Profiler

if TYPE_CHECKING:
    from pathlib import Path


class SimpleProfiler(Profiler):
    """Adds up the time of each action on the host: the GPU's time counts for the action that waits for its result.

    Actions are nested (a batch contains its hooks), so the shares do not add up to 100.  The phases of a training batch follow the
    table; they do not overlap.

    Args:
        dirpath: the folder of the report; None means the folder of the run's logs.
        filename: writes the report to this file, with the entry point's name before it and ".txt" after it; None prints it.
        extended: also shows the number of calls and the share of the total time.

    Raises:
        ConfigError: if an action starts within itself, or stops without having started.

    Example:
        >>> trainer = Trainer(profiler=SimpleProfiler(filename="report"))
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = {}
        """The seconds of each call, by action."""
        self.start_time = time.monotonic()
        self.phases = PhaseClock()

    def start(self, action_name: str) -> None:
        """Notes the start time of an action."""
        if action_name in self.current_actions:
            raise ConfigError(f"the action {action_name!r} is started within itself; give the inner one another name")
        self.current_actions[action_name] = time.monotonic()
        self.phases.start(action_name)

    def stop(self, action_name: str) -> None:
        """Notes the duration of an action."""
        end = time.monotonic()
        self.phases.stop(action_name)
        if action_name not in self.current_actions:
            raise ConfigError(f"the action {action_name!r} is stopped and was not started; call start first")
        seconds = end - self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(seconds)

    def summary(self) -> str:
        """Returns the table, longest total time first, and the phases of a batch."""
        whole = time.monotonic() - self.start_time
        totals = {name: sum(seconds) for name, seconds in self.recorded_durations.items()}
        rows = [("action", "mean ms", "total s", "calls", "% of the time")]
        for name in sorted(totals, key=totals.__getitem__, reverse=True):
            calls = len(self.recorded_durations[name])
            total = totals[name]
            share = f"{100 * total / whole:.1f}" if whole else ""
            rows.append((name, f"{1e3 * total / calls:.3f}", f"{total:.3f}", str(calls), share))
        shown = [row if self.extended else row[:3] for row in rows]
        widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
        lines = [f"Profile of {self._stage or 'the run'}: {whole:.3f} s"]
        for row in shown:
            numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *numbers]).rstrip())
        breakdown = self.phases.breakdown("Training, as the host sees it")
        if breakdown is not None:
            lines.append(bars([breakdown]))
        return "\n".join(lines)
