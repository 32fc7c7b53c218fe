"""The hot side of ``self.log``: from the user's call into a slot, without a host read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fabricamp.errors import ConfigError
from fabricamp.metrics.naming import check_arguments, full_name, published_values
from fabricamp.metrics.slots import NO_LOADER, Arguments, Cell, MetricTable, Slot
from fabricamp.metrics.values import as_weight, batch_length, is_metric, plain_value, tell_of_lengths
from fabricamp.metrics.views import Dtypes, dtype_of
from fabricamp.state import RunState, Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.strategies.base import Strategy


class Recording:
    """Finds the slot of each ``self.log`` call and stores the value there; with ``muted`` it stores nothing."""

    def __init__(self, state: RunState, strategy: Strategy) -> None:
        self.muted = False
        # Reading a CPU tensor does not wait, and storing a number costs a tenth of a copy into a tensor.
        self.reads_cpu_tensors = True
        self._state = state
        self._strategy = strategy
        self._tables: dict[str, MetricTable] = {}
        self._known: dict[tuple[Any, ...], Slot] = {}
        self._dtypes = Dtypes()
        self._asynchronous = False
        self._keep_outside_graphs: Callable[..., None] | None = None

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Stores ``value`` for the next flush, the end of the epoch, or both; ``call`` has the fields of :class:`Arguments`.

        The value is copied without its autograd graph, so it may change after the call.
        """
        if is_dynamo_compiling():  # a compiled step needs a graph break here: the code below changes Python state
            if self._keep_outside_graphs is None:
                self._keep_outside_graphs = torch.compiler.disable(self.keep)
            self._keep_outside_graphs(call, value, batch_size)
            return
        if self.muted:
            return
        state = self._state
        try:
            slot = self._known.get(call)
        except TypeError:  # not hashable: an argument is wrong, and _find_slot reports it
            slot = None
        if slot is None or slot.scope is not state.scope or slot.loader != state.dataloader_idx:
            slot = self._known[call] = self._find_slot(Arguments(*call), value, batch_size)
        if type(value) is not Tensor or value.ndim or slot.metric is not None:
            self._keep_other(slot, value, batch_size)
        elif value.is_cpu and self.reads_cpu_tensors:
            number, cell = value.item(), slot.step
            if slot.epoch is not None:
                self._keep_number(slot, number, batch_size)
            elif cell is not None:  # _keep_number inlined, as most training steps log this way
                cell.number, cell.weight = number, -1
        else:
            self._keep_tensor(slot, value.detach(), batch_size)

    def _table_name(self) -> str:
        return (
            MetricTable.TRAINING
            if self._state.scope in (Scope.TRAIN_STEP, Scope.TRAIN_EPOCH)
            else MetricTable.EVALUATION
        )

    def table(self, name: str) -> MetricTable:
        """Returns the table of training or of evaluation values."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = MetricTable(self._strategy.device)
            self._asynchronous = table.device.type == "cuda"
        return table

    def _find_slot(self, arguments: Arguments, value: Any, batch_size: int | None) -> Slot:
        """Returns the slot of a new call, or of a call from another hook or dataloader than before."""
        state = self._state
        check_arguments(arguments, state)
        slot = self.table(self._table_name()).slots.get((state.scope, full_name(arguments, state)))
        if slot is None:
            slot = self._new_slot(arguments, value)
        elif slot.loader not in (state.dataloader_idx, NO_LOADER) and state.scope is Scope.EVAL_STEP:
            raise ConfigError(
                f"{arguments} was called for the dataloaders {slot.loader} and {state.dataloader_idx}, whose values would mix; "
                "use add_dataloader_idx=True, or a name for each loader"
            )
        elif not slot.follow(published_values(arguments, state, metric=slot.metric is not None)):
            raise ConfigError(
                f"one key is logged with different arguments in {state.scope.value}: {slot.arguments} and {arguments}; "
                "use the same arguments, or two names"
            )
        slot.loader = state.dataloader_idx
        if batch_size is None and slot.weighs and self._strategy.rank == 0:
            tell_of_lengths(arguments.name, state.batch)
        return slot

    def _new_slot(self, arguments: Arguments, value: Any) -> Slot:
        state, strategy = self._state, self._strategy
        metric = value if is_metric(value) else None
        published = published_values(arguments, state, metric=metric is not None)
        if metric is None:
            plain_value(arguments.name, value)
        elif strategy.world_size > 1 and not metric.sync_on_compute:
            raise ConfigError(
                f"self.log({arguments.name!r}, ...) was given a {type(metric).__name__} with sync_on_compute=False, "
                "but an epoch's values are those of all ranks; build it with sync_on_compute=True"
            )
        elif strategy.tensor_parallel > 1:
            raise ConfigError(
                f"self.log({arguments.name!r}, ...) was given a {type(metric).__name__} with tensor_parallel="
                f"{strategy.tensor_parallel}: it would count each sample as often; log numbers, or its compute()"
            )
        slot = Slot(arguments, state.scope, published)
        slot.metric = metric
        for one in filter(None, published):
            self._dtypes.note(one, dtype_of(value))
        table = self.table(self._table_name())
        if not (arguments.rank_zero_only and strategy.rank):
            slot.step, slot.epoch = (table.add(one, slot) if one else None for one in published)
            if slot.epoch is not None:
                slot.epoch.metric = metric
        table.slots[state.scope, full_name(arguments, state)] = slot
        return slot

    def _keep_tensor(self, slot: Slot, value: Tensor, batch_size: int | None) -> None:
        cell = slot.step
        if cell is not None:
            cell.place.copy_(value, self._asynchronous)
            cell.weight = 1
        cell = slot.epoch
        if cell is not None:
            weight = self._weight(slot, batch_size)
            if weight:
                cell.add_tensor(value, weight)

    def _keep_number(self, slot: Slot, value: float, batch_size: int | None) -> None:
        cell = slot.step
        if cell is not None:
            cell.number = value
            cell.weight = -1
        cell = slot.epoch
        if cell is not None:
            weight = self._weight(slot, batch_size)
            if weight:
                cell.add_number(value, weight)

    def _keep_other(self, slot: Slot, value: Any, batch_size: int | None) -> None:
        kind = type(value)
        if kind is not float and kind is not int:
            if is_metric(value):
                self._keep_metric(slot, value)
                return
            value = plain_value(slot.arguments.name, value)
        if slot.metric is not None:
            raise _mixed(slot, kind)
        if isinstance(value, Tensor):
            self._keep_tensor(slot, value, batch_size)
        else:
            self._keep_number(slot, value, batch_size)

    def _keep_metric(self, slot: Slot, metric: Any) -> None:
        if metric is not slot.metric:
            raise _mixed(slot, type(metric))
        if slot.step is not None:
            name = slot.arguments.name
            # torchmetrics has no public name for the value of the last forward().
            latest = getattr(metric, "_forward_cache", None)
            if latest is None:
                raise ConfigError(
                    f"self.log({name!r}, ..., on_step=True) takes the value of the metric's forward, but only its update() "
                    "was called; call the metric itself, or log it with on_step=False, on_epoch=True"
                )
            self._keep_for_step(slot.step, plain_value(name, latest))
        if slot.epoch is not None:
            slot.epoch.weight = 1

    def _keep_for_step(self, cell: Cell, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            cell.place.copy_(value, self._asynchronous)
            cell.weight = 1
        else:
            cell.number = value
            cell.weight = -1

    def _weight(self, slot: Slot, batch_size: int | None) -> int:
        if not slot.weighs:
            return 1
        name = slot.arguments.name
        return batch_length(name, self._state.batch) if batch_size is None else as_weight(name, batch_size)


def _mixed(slot: Slot, kind: type) -> ConfigError:
    before = f"one {type(slot.metric).__name__} object" if slot.metric is not None else "tensors or numbers"
    return ConfigError(
        f"self.log({slot.arguments.name!r}, ...) was given {before}, now something else ({kind.__name__}); "
        "log each under a name of its own"
    )
