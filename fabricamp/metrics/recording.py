"""The hot side of ``self.log``: from the user's call into a slot, without a host read.

First :class:`Recording`, then the rules by which a call is checked and its values are named; they run once per call site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fabricamp.errors import ConfigError, nearest
from fabricamp.habits import say_difference
from fabricamp.metrics.slots import NO_LOADER, Arguments, MetricTable, Published, Slot
from fabricamp.metrics.values import (
    Dtypes,
    as_weight,
    batch_weight,
    dtype_of,
    is_metric,
    parts_of,
    plain_value,
    tell_of_lengths,
)
from fabricamp.state import Scope, UserCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.metrics.values import MetricCollection, TorchMetric
    from fabricamp.strategies.base import Strategy


_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "sync_dist", "add_dataloader_idx", "rank_zero_only")
_MODES = ("mean", "sum", "min", "max")
_OTHER_NAMES = {"avg": "mean"}
LOADER_MARK = "/dataloader_idx_"


class Recording:
    """Finds the slot of each ``self.log`` call and stores the value there; with ``muted`` it stores nothing."""

    def __init__(self, user_call: UserCall, strategy: Strategy) -> None:
        self.muted = False
        # Reading a CPU tensor does not wait, and storing a number costs a tenth of a copy into a tensor.
        self.reads_cpu_tensors = True
        self._user_call = user_call
        self._strategy = strategy
        self._tables: dict[str, MetricTable] = {}
        self._known: dict[tuple[Any, ...], Slot] = {}
        self._dtypes = Dtypes()
        self._asynchronous = False
        self._keep_outside_graphs: Callable[..., None] | None = None
        self._collections: dict[int, MetricCollection] = {}

    def keep(self, call: tuple[Any, ...], value: object, batch_size: int | None = None) -> None:
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
        user_call = self._user_call
        try:
            slot = self._known.get(call)
        except TypeError:  # not hashable: an argument is wrong, and _find_slot reports it
            slot = None
        if slot is None or slot.scope is not user_call.scope or slot.loader != user_call.dataloader_idx:
            slot = self._find_slot(Arguments(*call), value, batch_size)
            self._known[call] = slot
        if type(value) is not Tensor or value.ndim or slot.metric is not None:
            self._keep_other(slot, value, batch_size)
        elif value.is_cpu and self.reads_cpu_tensors:
            number = value.item()
            cell = slot.step
            if slot.epoch is not None:
                self._keep_number(slot, number, batch_size)
            elif cell is not None:  # _keep_number inlined, as most training steps log this way
                cell.number = number
                cell.weight = -1
        else:
            self._keep_tensor(slot, value.detach(), batch_size)

    def note_collection(self, collection: MetricCollection) -> None:
        """Notes a torchmetrics collection that is logged: it names the values of a metric that computes several."""
        if is_dynamo_compiling():
            torch.compiler.disable(self.note_collection)(collection)
            return
        self._collections[id(collection)] = collection

    def _collection_of(self, metric: TorchMetric) -> MetricCollection | None:
        for collection in self._collections.values():
            if any(member is metric for member in collection.values(copy_state=False)):
                return collection
        return None

    def _table_name(self) -> str:
        trains = self._user_call.scope in (Scope.TRAIN_STEP, Scope.TRAIN_EPOCH)
        return MetricTable.TRAINING if trains else MetricTable.EVALUATION

    def table(self, name: str) -> MetricTable:
        """Returns the table of training or of evaluation values."""
        table = self._tables.get(name)
        if table is None:
            table = MetricTable(self._strategy.device)
            self._tables[name] = table
            self._asynchronous = table.device.type == "cuda"
        return table

    def _find_slot(self, arguments: Arguments, value: object, batch_size: int | None) -> Slot:
        """Returns the slot of a new call, or of a call from another hook or dataloader than before."""
        user_call = self._user_call
        check_arguments(arguments, user_call)
        slot = self.table(self._table_name()).slots.get((user_call.scope, full_name(arguments, user_call)))
        if slot is None:
            slot = self._new_slot(arguments, value)
        elif slot.loader not in (user_call.dataloader_idx, NO_LOADER) and user_call.scope is Scope.EVAL_STEP:
            raise ConfigError(
                f"{arguments} was called for the dataloaders {slot.loader} and {user_call.dataloader_idx}, whose values would mix; "
                "use add_dataloader_idx=True, or a name for each loader"
            )
        elif not slot.follow(published_values(arguments, user_call, metric=slot.metric is not None)):
            raise ConfigError(
                f"one key is logged with different arguments in {user_call.scope.value}: {slot.arguments} and {arguments}; "
                "use the same arguments, or two names"
            )
        slot.loader = user_call.dataloader_idx
        if batch_size is None and slot.weighs and self._strategy.rank == 0:
            tell_of_lengths(arguments.name, user_call.batch)
        return slot

    def _new_slot(self, arguments: Arguments, value: object) -> Slot:
        """Returns a new slot for a call, with its cells in the table; raises :class:`ConfigError` for a value that is refused."""
        user_call = self._user_call
        strategy = self._strategy
        metric = value if is_metric(value) else None
        published = published_values(arguments, user_call, metric=metric is not None)
        if metric is None:
            plain_value(arguments.name, value)
        elif strategy.world_size > 1 and not all(part.sync_on_compute for part in parts_of(metric)):
            raise ConfigError(
                f"self.log({arguments.name!r}, ...) was given a {type(metric).__name__} with sync_on_compute=False, "
                "but an epoch's values are those of all ranks; build it with sync_on_compute=True"
            )
        elif strategy.tensor_parallel > 1:
            raise ConfigError(
                f"self.log({arguments.name!r}, ...) was given a {type(metric).__name__} with tensor_parallel="
                f"{strategy.tensor_parallel}: it would count each sample {strategy.tensor_parallel} times; log numbers, or its "
                "compute()"
            )
        slot = Slot(arguments, user_call.scope, published)
        slot.metric = metric
        for step_or_epoch in published:
            if step_or_epoch is not None:
                self._dtypes.note(step_or_epoch, dtype_of(value))
                if isinstance(value, Tensor) and not (value.is_cpu and self.reads_cpu_tensors):
                    self._dtypes.note_on_device(step_or_epoch, value.dtype)
        table = self.table(self._table_name())
        # With rank_zero_only the slots of other ranks get no cells, so their calls store nothing.
        if not (arguments.rank_zero_only and strategy.rank):
            of_step, of_epoch = published
            slot.step = None if of_step is None else table.add(of_step, slot)
            slot.epoch = None if of_epoch is None else table.add(of_epoch, slot)
            if slot.epoch is not None:
                slot.epoch.metric = metric
        table.slots[user_call.scope, full_name(arguments, user_call)] = slot
        return slot

    def _keep_tensor(self, slot: Slot, value: Tensor, batch_size: int | None) -> None:
        cell = slot.step
        if cell is not None:
            cell.tensor.copy_(value, self._asynchronous)
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

    def _keep_other(self, slot: Slot, value: object, batch_size: int | None) -> None:
        plain: Tensor | float
        if type(value) is float or type(value) is int:
            plain = value
        elif is_metric(value):
            self._keep_metric(slot, value)
            return
        else:
            plain = plain_value(slot.arguments.name, value)
        if slot.metric is not None:
            raise _mixed(slot, type(value))
        if isinstance(plain, Tensor):
            self._keep_tensor(slot, plain, batch_size)
        else:
            self._keep_number(slot, plain, batch_size)

    def _keep_metric(self, slot: Slot, metric: TorchMetric) -> None:
        if metric is not slot.metric:
            raise _mixed(slot, type(metric))
        if slot.step is not None:
            name = slot.arguments.name
            # torchmetrics has no public name for the value of the last forward().
            latest = getattr(metric, "_forward_cache", None)
            if isinstance(latest, Mapping) or (latest is None and len(parts_of(metric)) > 1):
                raise ConfigError(
                    f"self.log({name!r}, ..., on_step=True) was given a {type(metric).__name__}, which has no single value of a "
                    "step; log it with on_step=False, on_epoch=True, and the steps by the dict that its collection returns: "
                    "self.log_dict(self.metrics(...))"
                )
            if latest is None:
                raise ConfigError(
                    f"self.log({name!r}, ..., on_step=True) takes the value of the metric's forward, but only its update() "
                    "was called; call the metric itself, or log it with on_step=False, on_epoch=True"
                )
            value = plain_value(name, latest)
            cell = slot.step
            if isinstance(value, Tensor):
                cell.tensor.copy_(value, self._asynchronous)
                cell.weight = 1
            else:
                cell.number = value
                cell.weight = -1
        if slot.epoch is not None:
            slot.epoch.weight = 1

    def _weight(self, slot: Slot, batch_size: int | None) -> int:
        if not slot.weighs:
            return 1
        name = slot.arguments.name
        return batch_weight(name, self._user_call.batch) if batch_size is None else as_weight(name, batch_size)


def _mixed(slot: Slot, kind: type) -> ConfigError:
    before = f"one {type(slot.metric).__name__} object" if slot.metric is not None else "tensors or numbers"
    return ConfigError(
        f"self.log({slot.arguments.name!r}, ...) was given {before}, now something else ({kind.__name__}); "
        "log each under a name of its own"
    )


# -- the rules, which are Lightning's: once per call site ------------------------------------------------------------------------


def full_name(arguments: Arguments, user_call: UserCall) -> str:
    """Returns the name within its table, with the loader's suffix if there are several evaluation loaders."""
    return arguments.name + _suffix(arguments, user_call)


def published_values(
    arguments: Arguments, user_call: UserCall, *, metric: bool
) -> tuple[Published | None, Published | None]:
    """Returns the step value and the epoch value of a call; None for a value that the call does not publish."""
    on_step, on_epoch = _cadence(arguments, user_call.scope)
    if on_step and user_call.scope is Scope.EVAL_STEP:
        say_difference(
            "on_step=True in an evaluation logs the last batch's value; Lightning logs each batch, on an axis of its own"
        )
    mode = _mode(arguments)
    suffix = _suffix(arguments, user_call)

    def value(*, per_step: bool) -> Published:
        fork = ""
        if on_step and on_epoch:  # two values, so each key says which
            fork = "_step" if per_step else "_epoch"
        return Published(
            key=f"{arguments.name}{fork}{suffix}",
            plain_key=f"{arguments.name}{suffix}",
            per_step=per_step,
            mode="metric" if metric and not per_step else mode,
            prog_bar=bool(arguments.prog_bar),
            logger=arguments.logger is None or bool(arguments.logger),
            sync_dist=bool(arguments.sync_dist),
            loader=user_call.dataloader_idx if user_call.scope is Scope.EVAL_STEP else NO_LOADER,
        )

    of_step = value(per_step=True) if on_step else None
    of_epoch = value(per_step=False) if on_epoch else None
    return of_step, of_epoch


def check_arguments(arguments: Arguments, user_call: UserCall) -> None:
    """Raises :class:`ConfigError` for a call with wrong arguments, or in a hook where it cannot work."""
    name = arguments.name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"self.log(name={name!r}, ...): a name is a string that is not empty")
    for flag in _FLAGS:
        value = getattr(arguments, flag)
        if not isinstance(value, bool | None):
            raise ConfigError(f"self.log({name!r}, {flag}={value!r}): give True or False")
    if LOADER_MARK in name:
        raise ConfigError(f"self.log({name!r}, ...): {LOADER_MARK!r} is added automatically; leave it out of the name")
    if user_call.scope in (Scope.NOWHERE, Scope.PREDICT):
        raise ConfigError(
            f"self.log({name!r}, ...) was called in {user_call.scope.value}; "
            "it works in training_step, validation_step, test_step and the hooks around them"
        )
    if arguments.sync_dist_group is not None:
        raise ConfigError(
            f"self.log({name!r}, sync_dist_group=...) is not supported: values are reduced over all ranks; leave it out"
        )
    _mode(arguments)
    _cadence(arguments, user_call.scope)


def _cadence(arguments: Arguments, scope: Scope) -> tuple[bool, bool]:
    """Returns ``on_step`` and ``on_epoch``; the defaults depend on the hook that calls."""
    in_train_step = scope is Scope.TRAIN_STEP
    step = in_train_step if arguments.on_step is None else bool(arguments.on_step)
    epoch = not in_train_step if arguments.on_epoch is None else bool(arguments.on_epoch)
    if step and scope in (Scope.TRAIN_EPOCH, Scope.EVAL_EPOCH):
        raise ConfigError(f"{arguments} was called in {scope.value}, where there is no step; use on_epoch=True alone")
    if not step and not epoch:
        raise ConfigError(f"{arguments} in {scope.value} would record nothing; set on_step=True or on_epoch=True")
    return step, epoch


def _mode(arguments: Arguments) -> str:
    reduce_fx = arguments.reduce_fx
    mode = getattr(reduce_fx, "__name__", reduce_fx) if callable(reduce_fx) else reduce_fx
    if isinstance(reduce_fx, str):
        mode = _OTHER_NAMES.get(reduce_fx.lower(), reduce_fx.lower())
    if mode not in _MODES:
        raise ConfigError(
            f"self.log({arguments.name!r}, reduce_fx={reduce_fx!r}): allowed are {', '.join(map(repr, _MODES))}"
            f"{nearest(mode, _MODES)}; for another reduction log a torchmetrics.Metric"
        )
    return str(mode)


def _suffix(arguments: Arguments, user_call: UserCall) -> str:
    several = user_call.scope is Scope.EVAL_STEP and user_call.num_dataloaders > 1
    return f"{LOADER_MARK}{user_call.dataloader_idx}" if several and arguments.add_dataloader_idx else ""
