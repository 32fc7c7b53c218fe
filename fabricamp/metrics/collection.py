"""When the host, the other ranks, the callbacks and the loggers see what was logged."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import DistributedError
from fabricamp.metrics import exchange
from fabricamp.metrics.glance import Glance
from fabricamp.metrics.recording import Recording
from fabricamp.metrics.saving import load_rows, load_table, save_rows, save_table
from fabricamp.metrics.slots import NO_LOADER, MetricTable
from fabricamp.metrics.values import plain_value
from fabricamp.metrics.views import USUAL, Dtypes, View, as_numbers, filled, latest_of_hooks, latest_steps
from fabricamp.state import RunningStage, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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

    ``reduced`` are those of all ranks, whatever ``sync_dist`` says: monitors decide by them, the same on every rank.
    ``logged``, ``progress_bar_metrics`` and what the ``sinks`` get (on rank 0: values and their ``global_step``) are the
    rank's own for a step's values without ``sync_dist``, else global.  With several processes a flush is one small collective.
    :meth:`callback_metrics` and :meth:`logged_metrics` show them as Lightning does, with the latest values of the running step.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        super().__init__(state, strategy)
        self.reduced: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.sinks: list[Callable[[dict[str, float], int], None]] = []
        self._callback_view = View()
        self._logged_view = View()
        self._over = False
        self._glance = Glance()
        self._evaluated: list[tuple[Published, float]] = []
        self._pending: deque[exchange.Snapshot | _Arrived] = deque()
        self.due = _NOTHING_DUE
        self.before_look: Callable[[], None] | None = None
        """Puts the values of the step that hooks run for in place, where later ones were launched together with it."""

    def flush(self, step: int) -> None:
        """Sends the latest value of each key logged since the last flush on its way; on a GPU nothing waits for it.

        On CPU it arrives here, on a GPU with :meth:`poll`.
        """
        table = self.table(MetricTable.TRAINING)
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
        return {**self.progress_bar_metrics, **self._glance.look(self.table(MetricTable.TRAINING))}

    def callback_metrics(self) -> dict[str, Any]:
        """Lightning's dict: the values of all ranks, in place of them this rank's own ones of the step or hook that runs.

        The tensors are new ones; nothing waits, and no other rank takes part.
        """
        fresh = filled(self.reduced, self._dtypes, self._device)
        for published, value in self._own_latest():
            fresh[published.key] = fresh[published.plain_key] = value
        return self._callback_view.show(fresh)

    def logged_metrics(self) -> dict[str, Any]:
        """Lightning's dict of what goes to the loggers, likewise."""
        fresh = filled(self.logged, self._dtypes, self._device)
        fresh.update({published.key: value for published, value in self._own_latest() if published.logger})
        return self._logged_view.show(fresh)

    def monitored(self) -> dict[str, Any]:
        """What monitors decide by: the values of all ranks, on the host, and what was put into ``callback_metrics``."""
        return {**self._callback_view.given, **filled(self.reduced, self._dtypes, torch.device("cpu"))}

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._over else self._strategy.device

    def _own_latest(self) -> Iterable[tuple[Published, Tensor]]:
        """This rank's latest values: of the step that runs, or what the hook of an epoch that runs has logged itself."""
        if self.before_look is not None:
            self.before_look()
        scope = self._state.scope
        table = self._tables.get(self._table_name())
        if table is None or scope in (Scope.NOWHERE, Scope.PREDICT):
            return ()
        if scope in (Scope.TRAIN_STEP, Scope.EVAL_STEP):
            return latest_steps(table, self._dtypes)
        return latest_of_hooks(table, self._dtypes, scope)

    def reduce_steps(self, step: int) -> None:
        """Brings ``reduced`` up to the latest values of steps, waiting for it; every rank calls it, loggers see nothing of it."""
        merged = self._merged(self._gather(self.table(MetricTable.TRAINING), step))
        for published, value, _ in merged:
            if published.per_step and value is not None:
                self._publish_to_callbacks(published, value)

    def forget(self) -> None:
        """Drops all that was published: behind the sanity check."""
        self.reduced.clear()
        self.logged.clear()
        self._callback_view, self._logged_view = View(), View()

    def show_earlier(self, published: dict[str, Any]) -> None:
        """Shows what the run before had :meth:`published`, until :meth:`forget_earlier`."""
        self.take_published({**published, "progress_bar_metrics": {}}, published)

    def forget_earlier(self) -> None:
        """Drops that: this run's own values begin."""
        self.forget()
        self._dtypes = Dtypes()

    def close(self) -> None:
        """Brings what is shown to the host; nothing is reduced any more."""
        self._over = True
        self._callback_view.leave_device()
        self._logged_view.leave_device()

    def clear_evaluation(self) -> None:
        """Forgets the values of an evaluation that did not end; before each evaluation run."""
        self._evaluated = []
        self.table(MetricTable.EVALUATION).clear()

    def reduce_train_epoch(self, step: int) -> None:
        """Makes the training epoch's values, reduced over all ranks, known to the hooks of its end, which may log more."""
        self.drain()
        self._make_known(self.table(MetricTable.TRAINING), step)

    def end_train_epoch(self, step: int) -> dict[str, float]:
        """Publishes and returns the training epoch's values, reduced over all ranks, with what the hooks of its end have logged.

        Step values that no flush has taken yet can be monitored too, after a short epoch.
        """
        self.drain()
        table = self.table(MetricTable.TRAINING)
        values = self._make_known(table, step)
        table.clear_epoch()
        return self._publish(values, step)

    def reduce_evaluation(self, step: int) -> None:
        """Makes an evaluation's values, reduced over all ranks, known to the hooks of its end, which may log more."""
        self._make_known(self.table(MetricTable.EVALUATION), step)

    def end_evaluation(self, step: int) -> dict[str, float]:
        """Publishes and returns an evaluation's values, all of them reduced over all ranks; of a step's values the last one.

        Those of the sanity check go to no logger.
        """
        table = self.table(MetricTable.EVALUATION)
        values = self._make_known(table, step)
        table.clear()
        if self._state.stage is RunningStage.SANITY_CHECKING:
            return {}
        self._evaluated = values
        return self._publish(values, step)

    def evaluation_results(self, num_dataloaders: int) -> list[dict[str, float]]:
        """The last evaluation's values, a dict for each dataloader; those of no single one are in every dict."""
        return [
            {published.key: value for published, value in self._evaluated if published.loader in (index, NO_LOADER)}
            for index in range(num_dataloaders)
        ]

    def _make_known(self, table: MetricTable, step: int) -> list[tuple[Published, float]]:
        """Reduces what ``table`` has over all ranks, for callbacks to see; returns what is to be published."""
        merged = self._merged(self._gather(table, step))
        training = table is self._tables.get(MetricTable.TRAINING)
        if training:
            self._glance = Glance()  # what is under way is older
            self._show(self._own_steps(merged))
        values = self._collect(table, merged)
        table.note_reduced()
        for published, value in values:
            self._publish_to_callbacks(published, value)
        # In training, flushes bring those of steps.
        kept = [one for one in values if not (training and one[0].per_step)]
        self.logged.update({published.key: value for published, value in kept if published.logger})
        return kept

    def _merged(self, rows: Sequence[exchange.RankValues]) -> list[exchange.Merged]:
        return exchange.merge(rows, self._strategy.tensor_parallel)

    def _collect(self, table: MetricTable, merged: Sequence[exchange.Merged]) -> list[tuple[Published, float]]:
        """The values of all ranks, a step's before an epoch's: the later one takes the plain key."""
        return [
            (value.published, self._computed(table, value) if value.reduced is None else value.reduced)
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
        rows, _ = exchange.read(flushed, self.table(MetricTable.TRAINING), self._strategy)
        return _Arrived(flushed.step, rows)

    def _computed(self, table: MetricTable, value: exchange.Merged) -> float:
        """What a torchmetrics object computes over all ranks, which all have to ask for it at the same place."""
        key, totals = value.published.key, [0.0 if part is None else part.total for part in value.parts]
        without = [rank for rank, total in enumerate(totals) if not total]
        if without:
            raise DistributedError(
                f"{key!r} is a torchmetrics object that the ranks {without} have not logged, so it cannot be computed over all; "
                "log it on every rank (each needs a batch, and rank_zero_only=False)"
            )
        cell = table.cells[value.published.identity]
        if cell.computed is None or min(totals) < 2:
            if cell.computed is not None:
                cell.metric._computed = None  # a rank has more of it: all compute it again, together
            answer = cell.metric.compute()
            number = float(plain_value(key, answer))
            cell.computed = cell.metric.update_count, number
            self._dtypes.note(value.published, answer.dtype if isinstance(answer, Tensor) else USUAL)
        return cell.computed[1]

    def published(self) -> dict[str, Any]:
        """Returns what was published last, as plain values; none of it needs another rank."""
        return {
            "callback_metrics": dict(self.reduced),
            "logged_metrics": dict(self.logged),
            "progress_bar_metrics": dict(self.progress_bar_metrics),
            "given": as_numbers(self._callback_view.given),
            "dtypes": self._dtypes.state_dict(),
        }

    def take_published(self, shown: dict[str, Any], first: dict[str, Any]) -> None:
        """Takes back what :meth:`published` gave on this rank, ``first`` on rank 0."""
        self.reduced.update(first["callback_metrics"])
        self.logged.update(shown["logged_metrics"])
        self.progress_bar_metrics.update(shown["progress_bar_metrics"])
        self._callback_view.put(first.get("given", {}))
        self._dtypes.load_state_dict(first.get("dtypes", {}))

    def take_ended(self, shown: dict[str, Any], first: dict[str, Any]) -> None:
        """Takes back what had been published when the run before had ended: all that was under way, too."""
        self._pending.clear()
        self.due = _NOTHING_DUE
        self.take_published(shown, first)

    def state_dict(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of what a checkpoint keeps; waits for flushes under way, which every rank then reads.

        ``objects`` are the torchmetrics objects of the module by name; their own states are saved apart.
        """
        self._pending = deque(map(self._read, self._pending))
        names = {id(metric): name for name, metric in objects.items()}
        return {
            "table": save_table(self.table(MetricTable.TRAINING), names),
            "pending": [{"step": one.step, "rows": save_rows(self._read(one).rows)} for one in self._pending],
            **self.published(),
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]], first: dict[str, Any], objects: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave on this rank, or on several ranks, or on none; ``first`` is rank 0's.

        Of several ranks at once, what a flush had under way is left out.
        """
        load_table(self.table(MetricTable.TRAINING), [state["table"] for state in states], objects)
        self.take_published(states[0] if states else first, first)
        if len(states) == 1:
            self._pending.extend(_Arrived(one["step"], load_rows(one["rows"])) for one in states[0]["pending"])
        self.due = self._pending[0].step + _LAG if self._pending else _NOTHING_DUE

    def _deliver(self, rows: Sequence[exchange.RankValues], step: int) -> None:
        merged = self._merged(rows)
        for published, reduced, _ in merged:
            if published.per_step and reduced is not None:
                self._publish_to_callbacks(published, reduced)
        self._publish(self._own_steps(merged), step)

    def _publish_to_callbacks(self, published: Published, value: float) -> None:
        rounded = self._dtypes.rounded(published.key, value)
        self.reduced[published.key] = self.reduced[published.plain_key] = rounded

    def _publish(self, values: Sequence[tuple[Published, float]], step: int) -> dict[str, float]:
        """Hands values to the progress bar and, on rank 0, to the loggers; returns them by key."""
        self._show(values)
        logged = {published.key: value for published, value in values if published.logger}
        self.logged.update(logged)
        if logged and self._strategy.rank == 0:
            for sink in self.sinks:
                sink(logged, step)
        return {published.key: value for published, value in values}

    def _show(self, values: Sequence[tuple[Published, float]]) -> None:
        """Hands values to the progress bar, in place of what was seen of them before."""
        shown = {published.key: value for published, value in values if published.prog_bar}
        self.progress_bar_metrics.update(shown)
        self._glance.forget(shown)
