"""Measures the phases of a batch: reading, forward, backward, exchange, update, and the remaining time on the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PHASES: Final = ("data", "host", "forward", "backward", "exchange", "update", "graph")
_BY_ACTION: Final = {
    "train_dataloader_next": "data",
    "training_step": "forward",
    "backward": "backward",
    "reduce_gradients": "exchange",
    "optimizer_step": "update",
    "run_training_epoch": "host",
}
"""Phase by the last component of an action's name; time outside all other phases counts as "host"."""
_VALIDATION: Final = "[_EvaluationLoop].run"
_BATCH: Final = "run_training_batch"
_WIDTH: Final = 40


class Breakdown(NamedTuple):
    """The mean seconds of one batch by phase, over ``batches`` measured batches."""

    title: str
    seconds: dict[str, float]
    batches: int


class _OpenAction(NamedTuple):
    action: str
    phase: str
    begin: Any


class _Interval(NamedTuple):
    """The time of an action of ``phase``; ``outer`` is the phase that it is nested in."""

    phase: str
    outer: str | None
    begin: Any
    end: Any


class PhaseClock:
    """Adds up the time of each phase, without that of the phases nested in it.

    ``mark`` returns a time mark, and ``between`` the seconds between two marks; None: their difference.  With ``graph`` a batch is
    the replay of a CUDA graph, in which phases cannot be distinguished.
    """

    def __init__(
        self,
        mark: Callable[[], Any] = time.perf_counter,
        between: Callable[[Any, Any], float] | None = None,
        *,
        graph: bool = False,
    ) -> None:
        self.batches = 0
        self._mark = mark
        self._between = between or _difference
        self._names = {"train_dataloader_next": "data", "run_training_epoch": "host"} if graph else _BY_ACTION
        self._graph = graph
        self._open: list[_OpenAction] = []
        self._intervals: list[_Interval] = []

    def start(self, action: str) -> None:
        """Notes the start of an action."""
        phase = self._phase_of(action)
        if phase is not None:
            self._open.append(_OpenAction(action, phase, self._mark()))

    def stop(self, action: str) -> None:
        """Notes the end of an action."""
        self.batches += action == _BATCH
        if self._open and self._open[-1].action == action:
            ended = self._open.pop()
            outer = self._open[-1].phase if self._open else None
            self._intervals.append(_Interval(ended.phase, outer, ended.begin, self._mark()))

    def restart(self) -> None:
        """Drops all measurements; open actions count from now on."""
        now = self._mark()
        self._open = [one._replace(begin=now) for one in self._open]
        self._intervals.clear()
        self.batches = 0

    def breakdown(self, title: str) -> Breakdown | None:
        """Returns the mean batch; None if there was no batch."""
        if not self.batches:
            return None
        totals = dict.fromkeys((*PHASES, _VALIDATION), 0.0)
        for interval in self._intervals:
            seconds = self._between(interval.begin, interval.end)
            totals[interval.phase] += seconds
            if interval.outer is not None:
                totals[interval.outer] -= seconds
        seen = {interval.phase for interval in self._intervals}
        return Breakdown(title, {name: totals[name] / self.batches for name in PHASES if name in seen}, self.batches)

    def _phase_of(self, action: str) -> str | None:
        if action == _VALIDATION:
            return _VALIDATION
        if self._graph and action == _BATCH:
            return "graph"
        return None if action.startswith("[Callback]") else self._names.get(action.rpartition(".")[2])


def _difference(begin: float, end: float) -> float:
    # A function of the module: worker processes get a profiler as a pickle.
    return end - begin


def bars(breakdowns: Sequence[Breakdown]) -> str:
    """Returns a bar for each phase of each breakdown; the longest of all fills the width.

    >>> print(bars([Breakdown("eager", {"data": 0.001, "forward": 0.003}, 50)]))
    eager: 4.000 ms a batch (mean of 50)
      data         1.000 ms   25.0 %  █████████████
      forward      3.000 ms   75.0 %  ████████████████████████████████████████
    """
    longest = max((seconds for breakdown in breakdowns for seconds in breakdown.seconds.values()), default=0.0)
    lines = []
    for breakdown in breakdowns:
        whole = sum(breakdown.seconds.values())
        lines.append(f"{breakdown.title}: {1e3 * whole:.3f} ms a batch (mean of {breakdown.batches})")
        for name, seconds in breakdown.seconds.items():
            length = round(_WIDTH * seconds / longest) if longest > 0 else 0
            share = 100 * seconds / whole if whole else 0.0
            lines.append(f"  {name:<8} {1e3 * seconds:>9.3f} ms  {share:>5.1f} %  {'█' * length}".rstrip())
    return "\n".join(lines)
