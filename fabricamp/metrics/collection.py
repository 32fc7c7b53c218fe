"""Delivers logged values to the host, the other ranks, the callbacks and the loggers.

:class:`Metrics` extends :class:`Recording`, which stores the value of each ``self.log`` call.  In the order of the file: flushes
and their delivery, what users and progress bars see between them, the ends of epochs and evaluations, and checkpoints.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.habits import habits
from fabricamp.metrics import exchange
from fabricamp.metrics.recording import LOADER_MARK, Recording
from fabricamp.metrics.saving import load_rows, load_table, save_rows, save_table
from fabricamp.metrics.slots import NO_LOADER, MetricTable
from fabricamp.metrics.values import (
    USUAL,
    Dtypes,
    View,
    as_numbers,
    count_updates,
    filled,
    latest_of_hooks,
    latest_steps,
    parts_of,
    plain_value,
)
from fabricamp.state import RunningStage, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from fabricamp._utils.types import StateDict
    from fabricamp.metrics.slots import Cell, Published
    from fabricamp.metrics.values import TorchMetric
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy


_LAG = 2  # steps between a flush and its delivery; fixed, so every rank delivers at the same step
_NOTHING_DUE = sys.maxsize


class _Arrived(NamedTuple):
    """A flush whose values are on the host before delivery, because a checkpoint saved or restored it."""

    step: int
    rows: Sequence[exchange.RankValues]


class Metrics(Recording):
    """The logged values of one Trainer, from ``self.log`` to callbacks, progress bar and loggers.

    ``reduced`` holds values reduced over all ranks, whatever ``sync_dist`` is: monitors use them and decide the same on every rank.
    ``logged``, ``progress_bar_metrics`` and the arguments of ``sinks`` (called on rank 0 with values and their ``global_step``)
    hold this rank's own value for step values without ``sync_dist``, else the global value.  With several processes a flush is one
    small collective.  :meth:`callback_metrics` and :meth:`logged_metrics` return them as Lightning does, with the latest values of
    the current step.
    """

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        super().__init__(state.user_call, strategy)
        self._state = state
        self.reduced: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self._taken: dict[str, list[int]] = {}  # by key, the schedules that have stepped by its present value
        self.sinks: list[Callable[[dict[str, float], int], None]] = []
        self.watch: Callable[[str, float, int, bool], None] | None = None
        """Called on rank 0 with each value that the host has read: name, value, steps done by then, whether it is of training."""
        self._callback_view = View()
        self._logged_view = View()
        self._over = False
        self._progress_snapshot = ProgressSnapshot()
        self._shown_for_epoch: set[str] = set()  # the keys that the last epoch's own values have
        self._of_evaluations: set[str] = set()  # the keys that evaluations alone have published
        self._evaluated: list[tuple[Published, float]] = []
        self._evaluated_at: int | None = None
        self._pending: deque[exchange.Snapshot | _Arrived] = deque()
        self.due = _NOTHING_DUE
        self.before_look: Callable[[], None] | None = None
        """Called before values are shown, if several steps were launched together: restores those of the step whose hooks run."""

    # -- flushes and their delivery ----------------------------------------------------------------------------------------------

    def flush(self, step: int) -> None:
        """Starts the transfer of the latest value of each key logged since the last flush; on a GPU it does not wait.

        On the CPU values are delivered here, on a GPU by :meth:`poll`.
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
        """Delivers flushes that are at least two steps old; the loop calls it at every step boundary."""
        if step >= self.due:
            self._deliver_pending(step - _LAG)

    def drain(self) -> None:
        """Waits for all pending flushes and delivers them."""
        self._deliver_pending(_NOTHING_DUE)

    def _deliver_pending(self, until: int) -> None:
        """Delivers the flushes of step ``until`` or before."""
        while self._pending and self._pending[0].step <= until:
            flushed = self._read(self._pending.popleft())
            self._deliver(flushed.rows, flushed.step)
        self.due = self._pending[0].step + _LAG if self._pending else _NOTHING_DUE

    def _read(self, flushed: exchange.Snapshot | _Arrived) -> _Arrived:
        """Returns the flushed values, after waiting for their copy."""
        if isinstance(flushed, _Arrived):
            return flushed
        rows, _ = exchange.read(flushed, self.table(MetricTable.TRAINING), self._strategy)
        return _Arrived(flushed.step, rows)

    def _deliver(self, rows: Sequence[exchange.RankValues], step: int) -> None:
        merged = self._merged(rows)
        for one in merged:
            if one.published.per_step and one.reduced is not None:
                self._publish_to_callbacks(one.published, one.reduced, step, seen=one.seen)
        self._publish(self._own_steps(merged), step)

    def _own_steps(self, merged: Sequence[exchange.Merged]) -> list[tuple[Published, float]]:
        """Returns the step values that this rank shows: its own, or the reduced ones with ``sync_dist``."""
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

    def _publish_to_callbacks(
        self, published: Published, value: float, step: int, *, seen: bool, training: bool = True
    ) -> None:
        self._look_at(published, value, step, training=training)
        rounded = self._dtypes.rounded(published.key, value)
        for key in (published.key, published.plain_key):
            self.reduced[key] = rounded
            if not seen:
                self._taken.pop(key, None)

    def _look_at(self, published: Published, value: float, step: int, *, training: bool = True) -> None:
        if self.watch is not None and self._strategy.rank == 0:
            self.watch(published.plain_key, value, step, training)

    def look_at_numbers(self, step: int) -> None:
        """Lets :attr:`watch` see training's values that are numbers on the host already, as on the CPU."""
        for cell in self.table(MetricTable.TRAINING).cells.values():
            # Without numbers, that of a minimum or a maximum is inf.
            sums = not cell.per_step and cell.weight and cell.published.mode in ("mean", "sum")
            if sums or (cell.per_step and cell.weight < 0):
                self._look_at(cell.published, cell.number, step)

    def take_new(self, key: str, schedule: int) -> Any:
        """Returns the value of :meth:`monitored`; None if there is none, or if ``schedule`` has taken it before.

        Entries that user code put into ``callback_metrics`` are always new.
        """
        taken = self._taken.setdefault(key, [])
        if schedule in taken:
            return None
        value = self.monitored().get(key)
        if key in self.reduced:
            taken.append(schedule)
        return value

    def _publish(self, values: Sequence[tuple[Published, float]], step: int) -> dict[str, float]:
        """Passes values to the progress bar and, on rank 0, to the loggers; returns them by key."""
        self._show(values)
        logged = _for_loggers(values)
        self.logged.update(logged)
        if logged and self._strategy.rank == 0:
            for sink in self.sinks:
                sink(logged, step)
        return {published.key: value for published, value in values}

    def _show(self, values: Sequence[tuple[Published, float]]) -> None:
        """Passes values to the progress bar, where they replace earlier values of the same keys."""
        shown = {published.key: value for published, value in values if published.prog_bar}
        self.progress_bar_metrics.update(shown)
        self._progress_snapshot.forget(shown)

    # -- what users and progress bars see ----------------------------------------------------------------------------------------

    def progress_snapshot(self) -> dict[str, float]:
        """Returns the ``prog_bar`` values, with this rank's latest step values; never waits and uses no collective.

        Those of training come first, each in the order of its first value, so that they keep their places.
        On a GPU, step values lag by one or two calls; at an epoch's end all values are exact.
        """
        latest = {}
        for published, value in self._progress_snapshot.latest(self.table(MetricTable.TRAINING)).items():
            self._look_at(published, value, self._state.global_step)
            latest[published.key] = value
        # At an epoch's end the last step's values are older than the epoch's.
        if self._user_call.scope in (Scope.NOWHERE, Scope.TRAIN_EPOCH):
            latest = {key: value for key, value in latest.items() if key not in self._shown_for_epoch}
        return self._in_order({**self.progress_bar_metrics, **latest})

    def _in_order(self, shown: Mapping[str, float]) -> dict[str, float]:
        return dict(sorted(shown.items(), key=lambda item: item[0] in self._of_evaluations))

    def callback_metrics(self) -> dict[str, Any]:
        """Returns Lightning's dict: values reduced over all ranks, replaced by this rank's values of the current step or hook.

        The tensors are new; it does not wait and uses no collective.
        """
        fresh = filled(self.reduced, self._dtypes, self._device)
        for published, value in self._own_latest():
            fresh[published.key] = value
            fresh[published.plain_key] = value
        return self._callback_view.show(fresh)

    def logged_metrics(self) -> dict[str, Any]:
        """Returns Lightning's dict of the logged values, built like :meth:`callback_metrics`."""
        fresh = filled(self.logged, self._dtypes, self._device)
        fresh.update({published.key: value for published, value in self._own_latest() if published.logger})
        return self._logged_view.show(fresh)

    def monitored(self) -> dict[str, Any]:
        """Returns the values for monitors: those reduced over all ranks, on the host, and user entries of ``callback_metrics``."""
        return {**self._callback_view.user_entries, **filled(self.reduced, self._dtypes, torch.device("cpu"))}

    def known_names(self) -> set[str]:
        """Returns the names of :meth:`monitored`, and of what training has logged that is not read yet; reads no value."""
        logged = [cell.published for cell in self.table(MetricTable.TRAINING).cells.values()]
        names = {name for one in logged for name in (one.key, one.plain_key)}
        return names.union(self.reduced, self._callback_view.user_entries)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._over else self._strategy.device

    def _own_latest(self) -> Iterable[tuple[Published, Tensor]]:
        """Returns this rank's latest values: of the current step, or those that the current epoch hook has logged."""
        if self.before_look is not None:
            self.before_look()
        scope = self._user_call.scope
        table = self._tables.get(self._table_name())
        if table is None or scope in (Scope.NOWHERE, Scope.PREDICT):
            return ()
        if scope in (Scope.TRAIN_STEP, Scope.EVAL_STEP):
            return latest_steps(table, self._dtypes)
        return latest_of_hooks(table, self._dtypes, scope)

    # -- reductions over all ranks -----------------------------------------------------------------------------------------------

    def reduce_steps(self, step: int) -> None:
        """Shows the latest step values, and waits for them; every rank calls it; nothing goes to loggers."""
        table = self.table(MetricTable.TRAINING)
        merged = self._merged(self._gather(table, step))
        for one in merged:
            if one.published.per_step and one.reduced is not None:
                self._publish_to_callbacks(one.published, one.reduced, step, seen=one.seen)
        table.mark_seen()
        self.logged.update(_for_loggers(self._own_steps(merged)))

    def _gather(self, table: MetricTable, step: int) -> list[exchange.RankValues]:
        """Returns each rank's current values; repeats the exchange if a rank has more values than fit into one."""
        while True:
            rows, complete = exchange.read(exchange.take(table, self._strategy, step), table, self._strategy)
            if complete:
                return rows

    def _merged(self, rows: Sequence[exchange.RankValues]) -> list[exchange.Merged]:
        return exchange.merge(rows, self._strategy.tensor_parallel)

    def reduce_train_epoch(self, step: int) -> None:
        """Reduces the training epoch's values over all ranks and shows them to the epoch-end hooks, which may log more."""
        self.drain()
        self._reduce_and_show(self.table(MetricTable.TRAINING), step)

    def end_train_epoch(self, step: int) -> dict[str, float]:
        """Publishes and returns the training epoch's values, reduced over all ranks, including those of the epoch-end hooks.

        Step values that no flush has taken yet become available to monitors too: an epoch may be shorter than the flush interval.
        """
        self.drain()
        table = self.table(MetricTable.TRAINING)
        values = self._reduce_and_show(table, step)
        table.clear_epoch()
        self._shown_for_epoch = {published.key for published, _ in values if published.prog_bar}
        return self._publish(values, step)

    def clear_evaluation(self) -> None:
        """Drops the values of an unfinished evaluation; called before each evaluation run."""
        self._evaluated = []
        self.table(MetricTable.EVALUATION).clear()

    def reduce_evaluation(self, step: int) -> None:
        """Reduces an evaluation's values over all ranks and shows them to its end hooks, which may log more."""
        self._reduce_and_show(self.table(MetricTable.EVALUATION), step)

    def end_evaluation(self, step: int) -> dict[str, float]:
        """Publishes and returns an evaluation's values, all reduced over all ranks; for step values, the last step's.

        The sanity check publishes nothing and returns an empty dict.
        """
        table = self.table(MetricTable.EVALUATION)
        values = self._reduce_and_show(table, step)
        table.clear()
        if self._state.stage is RunningStage.SANITY_CHECKING:
            return {}
        self._evaluated = values
        self._evaluated_at = step
        keys_of_training = {cell.published.key for cell in self.table(MetricTable.TRAINING).cells.values()}
        self._of_evaluations.update({published.key for published, _ in values} - keys_of_training)
        return self._publish(values, step)

    def evaluation_results(self, num_dataloaders: int) -> list[dict[str, float]]:
        """Returns the last evaluation's values, one dict per dataloader; values of no single dataloader are in every dict."""
        shown = [one for one in self._evaluated if not (one[0].per_step and habits().results_are_of_the_epoch)]
        return [
            {published.key: value for published, value in shown if published.loader in (index, NO_LOADER)}
            for index in range(num_dataloaders)
        ]

    def _reduce_and_show(self, table: MetricTable, step: int) -> list[tuple[Published, float]]:
        """Reduces the values of ``table`` over all ranks and shows them to callbacks; returns the values to publish."""
        merged = self._merged(self._gather(table, step))
        training = table is self._tables.get(MetricTable.TRAINING)
        if training:
            self._progress_snapshot = ProgressSnapshot()  # a copy in flight would be older
            own = self._own_steps(merged)
            if step == self._evaluated_at:  # the evaluation's step values are newer than these
                evaluated = {published.key for published, _ in self._evaluated}
                own = [value for value in own if value[0].key not in evaluated]
            self._show(own)
            self.logged.update(_for_loggers(own))
        computed = self._compute_objects(table, [one for one in merged if one.reduced is None])
        values = []
        # Step values before epoch values: the last one takes the plain key.
        for one in sorted(merged, key=lambda one: not one.published.per_step):
            own = computed[one.published] if one.reduced is None else [(one.published, one.reduced)]
            values += own
            for published, value in own:
                # An evaluation's step value beside an epoch value is for loggers: callbacks keep the training step's of this name.
                if training or not published.per_step or published.key == published.plain_key:
                    self._publish_to_callbacks(published, value, step, seen=one.seen, training=training)
        table.mark_reduced()
        # Training step values are published by flushes.
        if training:
            values = [(published, value) for published, value in values if not published.per_step]
        self.logged.update(_for_loggers(values))
        return values

    def _compute_objects(
        self, table: MetricTable, objects: Sequence[exchange.Merged]
    ) -> dict[Published, list[tuple[Published, float]]]:
        """Returns the values that torchmetrics objects compute over all ranks; all ranks have to call it at the same point."""
        due = [table.cells[one.published.identity] for one in objects if _has_to_compute(table, one)]
        # compute() is a collective: a rank that kept a result which another computes anew would let that one wait.
        for cell in due:
            own, *within = parts_of(_metric_of(cell))
            if cell.computed is not None:
                own._computed = None
            for part in within:  # collections forget the results of their members, not of what these wrap
                part._computed = None
        answers = [_metric_of(cell).compute() for cell in due]
        for cell, answer in zip(due, answers, strict=True):
            named = self._named(table, cell, answer) if isinstance(answer, Mapping) else {cell.published.key: answer}
            numbers = {key: float(plain_value(key, value)) for key, value in named.items()}
            cell.computed = (count_updates(_metric_of(cell)), numbers)
            for key, value in named.items():
                dtype = value.dtype if isinstance(value, Tensor) else USUAL
                self._dtypes.note(_under(key, cell.published), dtype)
        values = {}
        for one in objects:
            known = table.cells[one.published.identity].computed
            assert known is not None
            values[one.published] = [(_under(key, one.published), number) for key, number in known[1].items()]
        return values

    def _named(self, table: MetricTable, cell: Cell, answer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the values of a metric that computes several, by the names that its collection gives them."""
        metric = _metric_of(cell)
        collection = self._collection_of(metric)
        if collection is None:
            raise ConfigError(
                f"self.log({cell.published.key!r}, ...) was given a {type(metric).__name__}, which computes a dict; put it into a "
                "torchmetrics.MetricCollection and log that with self.log_dict(...), which gives each value its own name"
            )
        _, mark, loader = cell.published.key.partition(LOADER_MARK)
        # Both in the order of the members, whose results are known by now.
        results = [member.compute() for member in collection.values(copy_state=False)]
        flat = collection.compute()
        before = 0
        for member, result in zip(collection.values(copy_state=False), results, strict=True):
            if member is metric:
                break
            before += len(result) if isinstance(result, Mapping) else 1
        names = list(flat)[before : before + len(answer)]
        named = {f"{name}{mark}{loader}": flat[name] for name in names}
        others = {one.published.key for one in table.cells.values() if one is not cell}
        for other in table.cells.values():
            if other is not cell and other.computed is not None:
                others.update(other.computed[1])
        both = others.intersection(named)
        if both or len(flat) < sum(len(result) if isinstance(result, Mapping) else 1 for result in results):
            raise ConfigError(
                f"{type(metric).__name__} {cell.published.key!r} computes {', '.join(sorted(both or named))}, and another value "
                "has such a name too; give the wrapper or its collection a prefix"
            )
        return named

    def forget(self) -> None:
        """Drops everything published; called after the sanity check."""
        self.reduced.clear()
        self.logged.clear()
        self._taken.clear()
        self._callback_view = View()
        self._logged_view = View()

    def show_earlier(self, published: dict[str, Any]) -> None:
        """Shows the values that the previous run had :meth:`published`, until :meth:`forget_earlier`."""
        self.take_published({**published, "progress_bar_metrics": {}}, published)

    def forget_earlier(self) -> None:
        """Drops the previous run's values, before this run publishes its own."""
        self.forget()
        self._dtypes = Dtypes()

    def close(self) -> None:
        """Moves the shown values to the host; the run is over."""
        self._over = True
        self._callback_view.leave_device()
        self._logged_view.leave_device()

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def published(self) -> dict[str, Any]:
        """Returns the values published last, as plain values; uses no collective."""
        taken = {key: list(schedules) for key, schedules in self._taken.items() if schedules}
        return {
            "callback_metrics": dict(self.reduced),
            "logged_metrics": dict(self.logged),
            "progress_bar_metrics": self._in_order(self.progress_bar_metrics),
            "user_entries": as_numbers(self._callback_view.user_entries),
            "dtypes": self._dtypes.state_dict(),
            **({"taken": taken} if taken else {}),
        }

    def take_published(self, shown: dict[str, Any], first: dict[str, Any]) -> None:
        """Restores ``shown`` from this rank's :meth:`published` and ``first`` from rank 0's."""
        self.reduced.update(first["callback_metrics"])
        self.logged.update(shown["logged_metrics"])
        self.progress_bar_metrics.update(shown["progress_bar_metrics"])
        self._callback_view.put(first.get("user_entries", {}))
        self._dtypes.load_state_dict(first.get("dtypes", {}))
        self._taken.update({key: list(schedules) for key, schedules in first.get("taken", {}).items()})

    def take_ended(self, shown: dict[str, Any], first: dict[str, Any]) -> None:
        """Restores the values published at the end of the previous run, and drops pending flushes: the end had delivered them."""
        self._pending.clear()
        self.due = _NOTHING_DUE
        self.take_published(shown, first)

    def state_dict(self, objects: dict[str, TorchMetric]) -> StateDict:
        """Returns this rank's values for a checkpoint; waits for pending flushes, which every rank reads here.

        ``objects`` are the torchmetrics objects of the module by name; their own states are saved separately.
        """
        pending = [self._read(flushed) for flushed in self._pending]
        self._pending = deque(pending)
        names = {id(metric): name for name, metric in objects.items()}
        return {
            "table": save_table(self.table(MetricTable.TRAINING), names),
            "pending": [{"step": flushed.step, "ranks": save_rows(flushed.rows)} for flushed in pending],
            **self.published(),
        }

    def load_state_dict(
        self, states: Sequence[StateDict], first: dict[str, Any], objects: dict[str, TorchMetric]
    ) -> None:
        """Restores :meth:`state_dict` of this rank, of several ranks together, or of none; ``first`` is rank 0's.

        With the states of several ranks, pending flushes are dropped.
        """
        load_table(self.table(MetricTable.TRAINING), [state["table"] for state in states], objects)
        self.take_published(states[0] if states else first, first)
        if len(states) == 1:
            for flushed in states[0]["pending"]:
                self._pending.append(_Arrived(flushed["step"], load_rows(flushed["ranks"])))
        self.due = self._pending[0].step + _LAG if self._pending else _NOTHING_DUE


def _for_loggers(values: Iterable[tuple[Published, float]]) -> dict[str, float]:
    return {published.key: value for published, value in values if published.logger}


def _has_to_compute(table: MetricTable, value: exchange.Merged) -> bool:
    """Returns whether any rank has new updates of a torchmetrics object; raises if a rank has no object."""
    key = value.published.key
    # Of each rank: 0.0 no object, 1.0 has to compute, 2.0 nothing new since the last computation.
    states = [0.0 if part is None else part.total for part in value.parts]
    without = [rank for rank, state in enumerate(states) if not state]
    if without:
        raise DistributedError(
            f"{key!r} is a torchmetrics object that the ranks {without} have not logged, so it cannot be computed over all; "
            "log it on every rank (each needs a batch, and rank_zero_only=False)"
        )
    return table.cells[value.published.identity].computed is None or min(states) < 2


def _metric_of(cell: Cell) -> TorchMetric:
    assert cell.metric is not None
    return cell.metric


def _under(key: str, published: Published) -> Published:
    """Returns the description of a metric's value under ``key``."""
    return published if key == published.key else published._replace(key=key, plain_key=key)


class ProgressSnapshot:
    """This rank's own ``prog_bar`` step values between two flushes, as of the last copy that has arrived; it never waits."""

    def __init__(self) -> None:
        self.values: dict[Published, float] = {}
        self._in_flight: exchange.Snapshot | None = None

    def latest(self, table: MetricTable) -> dict[Published, float]:
        """Returns the values of ``table`` that have arrived, and starts the next copy; on the CPU a copy arrives at once."""
        if self._in_flight is None or self._arrives(self._in_flight):
            self._in_flight = exchange.take_own(table, 0)
            if self._in_flight.event is None:
                self._arrives(self._in_flight)
        return self.values

    def forget(self, keys: Container[str]) -> None:
        """Drops the values of ``keys``, because newer ones were published."""
        self.values = {published: value for published, value in self.values.items() if published.key not in keys}

    def _arrives(self, snapshot: exchange.Snapshot) -> bool:
        if snapshot.event is not None and not snapshot.event.query():
            return False
        for published, own in exchange.read_own(snapshot).contributions():
            if published.prog_bar and published.per_step and own.weight:
                self.values[published] = own.total
        return True
