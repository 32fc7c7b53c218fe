"""When the host, the other ranks, the callbacks and the loggers see what was logged."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricamp.errors import DistributedError
from fabricamp.metrics import exchange
from fabricamp.metrics.glance import Glance
from fabricamp.metrics.recording import Recording
from fabricamp.metrics.saving import load_rows, load_table, save_rows, save_table
from fabricamp.metrics.slots import NO_LOADER, MetricTable
from fabricamp.metrics.values import plain_value
from fabricamp.state import RunningStage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fabricamp.metrics.slots import Published
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

_LAG = 2  # windows between a flush and its delivery (DESIGN.md 3.2)
_NOTHING_DUE = sys.maxsize


class _Arrived(NamedTuple):
    """A flush that was read before its time, for a checkpoint or from one."""

    step: int
    rows: Sequence[exchange.RankValues]


class Metrics(Recording):
    """The logged values of one Trainer, from ``self.log`` to callbacks, progress bar and loggers.

    ``callback_metrics`` are reduced over all ranks, whatever ``sync_dist`` says: callbacks decide by them, the same on every rank.
    ``logged_metrics``, ``progress_bar_metrics`` and what the ``sinks`` get (on rank 0: values and their ``global_step``) are the
    rank's own for a step's values without ``sync_dist``, else global.  With several processes a flush is one small collective.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        super().__init__(state, strategy)
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.sinks: list[Callable[[dict[str, float], int], None]] = []
        self._glance = Glance()
        self._evaluated: list[tuple[Published, float]] = []
        self._pending: deque[exchange.Snapshot | _Arrived] = deque()
        self.due = _NOTHING_DUE

    def flush(self, step: int) -> None:
        """Sends the latest value of each key logged since the last flush on its way; on a GPU nothing waits for it.

        On CPU it arrives here, on a GPU with :meth:`poll`.
        """
        table = self._table(MetricTable.TRAINING)
        if self._strategy.world_size == 1 and not any(cell.per_step and cell.weight for cell in table.cells.values()):
            return
        snapshot = exchange.take(table, self._strategy, step)
        table.clear_steps(snapshot.sent)
        if snapshot.event is not None:
            self._pending.append(snapshot)
            self.due = self._pending[0].step + _LAG
            return
        rows, complete = exchange.read(snapshot, table, self._strategy)
        self._deliver(rows, step)
        if not complete:
            self.flush(step)

    def poll(self, step: int) -> None:
        """Delivers the flushes that are two windows old; the loop calls it at every step boundary."""
        if step >= self.due:
            self._deliver_pending(step - _LAG)

    def drain(self) -> None:
        """Delivers every flush that is under way, waiting for it."""
        self._deliver_pending(_NOTHING_DUE)

    def glance(self) -> dict[str, float]:
        """The ``prog_bar`` values, those of steps as this rank last saw them, at any time: nothing waits, no other rank takes part.

        On a GPU they are as old as the last call or two; at an epoch's end all are exact.
        """
        return {**self.progress_bar_metrics, **self._glance.look(self._table(MetricTable.TRAINING))}

    def clear_evaluation(self) -> None:
        """Forgets the values of an evaluation that did not end; before each evaluation run."""
        self._evaluated = []
        self._table(MetricTable.EVALUATION).clear()

    def end_train_epoch(self, step: int) -> dict[str, float]:
        """Publishes and returns the training epoch's values, reduced over all ranks.

        Step values that no flush has taken yet go to ``callback_metrics``, so that a callback can monitor them after a short epoch.
        """
        self.drain()
        table = self._table(MetricTable.TRAINING)
        merged = exchange.merge(self._gather(table, step))
        self._glance = Glance()  # what is under way is older
        self._show(self._own_steps(merged))
        values = self._collect(table, merged)
        table.clear_epoch()
        for published, value in values:
            self._publish_to_callbacks(published, value)
        return self._publish([(published, value) for published, value in values if not published.per_step], step)

    def end_evaluation(self, step: int) -> dict[str, float]:
        """Publishes and returns an evaluation's values, all of them reduced over all ranks; of a step's values the last one.

        Those of the sanity check are reduced too, then dropped.
        """
        table = self._table(MetricTable.EVALUATION)
        values = self._collect(table, exchange.merge(self._gather(table, step)))
        table.clear()
        if self._state.stage is RunningStage.SANITY_CHECKING:
            return {}
        for published, value in values:
            self._publish_to_callbacks(published, value)
        self._evaluated = values
        return self._publish(values, step)

    def evaluation_results(self, num_dataloaders: int) -> list[dict[str, float]]:
        """The last evaluation's values, a dict for each dataloader; those of no single one are in every dict."""
        return [
            {published.key: value for published, value in self._evaluated if published.loader in (index, NO_LOADER)}
            for index in range(num_dataloaders)
        ]

    def _collect(self, table: MetricTable, merged: Sequence[exchange.Merged]) -> list[tuple[Published, float]]:
        """The values of all ranks, a step's before an epoch's: the later one takes the plain key."""
        return [
            (value.published, _computed(table, value) if value.reduced is None else value.reduced)
            for value in sorted(merged, key=lambda value: not value.published.per_step)
        ]

    def _own_steps(self, merged: Sequence[exchange.Merged]) -> list[tuple[Published, float]]:
        """The values of steps as this rank shows them: its own ones, with ``sync_dist`` those of all."""
        values: list[tuple[Published, float]] = []
        for published, reduced, parts in merged:
            own = parts[self._strategy.rank]
            if not published.per_step or reduced is None:
                continue
            if published.sync_dist:
                values.append((published, reduced))
            elif own is not None and own.weight:
                values.append((published, own.total))
        return values

    def _gather(self, table: MetricTable, step: int) -> list[exchange.RankValues]:
        """What each rank has now; goes a second time where a rank has more than fits into one exchange."""
        while True:
            rows, complete = exchange.read(exchange.take(table, self._strategy, step), table, self._strategy)
            if complete:
                return rows

    def _deliver_pending(self, until: int) -> None:
        """Delivers what was flushed at ``until`` or before."""
        while self._pending and self._pending[0].step <= until:
            flushed = self._read(self._pending.popleft())
            self._deliver(flushed.rows, flushed.step)
        self.due = self._pending[0].step + _LAG if self._pending else _NOTHING_DUE

    def _read(self, flushed: exchange.Snapshot | _Arrived) -> _Arrived:
        """What was flushed, after the wait for its copy."""
        if isinstance(flushed, _Arrived):
            return flushed
        rows, _ = exchange.read(flushed, self._table(MetricTable.TRAINING), self._strategy)
        return _Arrived(flushed.step, rows)

    def state_dict(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of what a checkpoint keeps; waits for flushes under way, which every rank then reads.

        ``objects`` are the torchmetrics objects of the module by name; their own states are saved apart.
        """
        self._pending = deque(map(self._read, self._pending))
        names = {id(metric): name for name, metric in objects.items()}
        return {
            "table": save_table(self._table(MetricTable.TRAINING), names),
            "pending": [{"step": one.step, "rows": save_rows(self._read(one).rows)} for one in self._pending],
            "callback_metrics": {key: float(value) for key, value in self.callback_metrics.items()},
            "logged_metrics": dict(self.logged_metrics),
            "progress_bar_metrics": dict(self.progress_bar_metrics),
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]], first: dict[str, Any], objects: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave on this rank, or on several ranks, or on none; ``first`` is rank 0's.

        Of several ranks at once, what a flush had under way is left out.
        """
        load_table(self._table(MetricTable.TRAINING), [state["table"] for state in states], objects)
        shown = states[0] if states else first
        for key, value in first["callback_metrics"].items():
            self.callback_metrics[key] = torch.tensor(value, dtype=torch.float64, device="cpu")
        self.logged_metrics.update(shown["logged_metrics"])
        self.progress_bar_metrics.update(shown["progress_bar_metrics"])
        if len(states) == 1:
            self._pending.extend(_Arrived(one["step"], load_rows(one["rows"])) for one in states[0]["pending"])
        self.due = self._pending[0].step + _LAG if self._pending else _NOTHING_DUE

    def _deliver(self, rows: Sequence[exchange.RankValues], step: int) -> None:
        merged = exchange.merge(rows)
        for published, reduced, _ in merged:
            if published.per_step and reduced is not None:
                self._publish_to_callbacks(published, reduced)
        self._publish(self._own_steps(merged), step)

    def _publish_to_callbacks(self, published: Published, value: float) -> None:
        if torch.is_inference_mode_enabled():  # such a tensor could not be used in training
            with torch.inference_mode(mode=False):
                tensor = torch.tensor(value, dtype=torch.float64, device="cpu")
        else:
            tensor = torch.tensor(value, dtype=torch.float64, device="cpu")
        self.callback_metrics[published.key] = tensor
        self.callback_metrics[published.plain_key] = tensor

    def _publish(self, values: Sequence[tuple[Published, float]], step: int) -> dict[str, float]:
        """Hands values to the progress bar and, on rank 0, to the loggers; returns them by key."""
        self._show(values)
        logged = {published.key: value for published, value in values if published.logger}
        self.logged_metrics.update(logged)
        if logged and self._strategy.rank == 0:
            for sink in self.sinks:
                sink(logged, step)
        return {published.key: value for published, value in values}

    def _show(self, values: Sequence[tuple[Published, float]]) -> None:
        """Hands values to the progress bar, in place of what was seen of them before."""
        shown = {published.key: value for published, value in values if published.prog_bar}
        self.progress_bar_metrics.update(shown)
        self._glance.forget(shown)


def _computed(table: MetricTable, value: exchange.Merged) -> float:
    """What a torchmetrics object computes over all ranks, which all have to ask for it at the same place."""
    key = value.published.key
    without = [rank for rank, part in enumerate(value.parts) if part is None or not part.total]
    if without:
        raise DistributedError(
            f"{key!r} is a torchmetrics object that the ranks {without} have not logged, so it cannot be computed over all; "
            "log it on every rank (each needs a batch, and rank_zero_only=False)"
        )
    return float(plain_value(key, table.cells[value.published.identity].metric.compute()))
