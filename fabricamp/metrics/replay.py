"""What a captured step does on the host for ``self.log`` and torchmetrics objects: recorded once, repeated for each replay.

:class:`LogReplay` has the weights of logged values; launches of the graph copy the values.  :class:`MetricStates` has the states
and the update counts of torchmetrics objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import NotCapturableError
from fabricamp.metrics.slots import MetricTable
from fabricamp.metrics.values import is_metric, is_metric_collection
from fabricamp.ops.tensors import same_bits

if TYPE_CHECKING:
    from torch import nn

    from fabricamp.metrics.collection import Metrics
    from fabricamp.metrics.slots import Cell
    from fabricamp.metrics.values import TorchMetric


class LogReplay:
    """Records the weights that a step's ``self.log`` calls give to the values of ``table``, and repeats them for a replay.

    The values themselves are copied by launches of the graph.
    """

    def __init__(self, metrics: Metrics, name: str = MetricTable.TRAINING) -> None:
        self.table = metrics.table(name)
        self._before = {cell: cell.weight for cell in self.table.cells.values()}
        for cell in self._before:
            if _sets_weight(cell):
                cell.weight = 0
        self._set: list[Cell] = []
        self._added: list[tuple[Cell, int]] = []
        self._bank: Tensor | None = None

    def record(self) -> None:
        """Records the weights that the step has changed since this object was created."""
        self._bank = self.table.bank
        for cell in self.table.cells.values():
            before = self._before.get(cell, 0)
            if _sets_weight(cell):
                if cell.weight:
                    self._set.append(cell)
                else:
                    cell.weight = before
            elif cell.weight != before:
                self._added.append((cell, cell.weight - before))

    def undo(self) -> None:
        """Restores the weights from before the step, which did not run on the device."""
        for cell in self.table.cells.values():
            cell.weight = self._before.get(cell, 0)

    def is_valid(self) -> bool:
        """Whether the table still uses the tensor that the graph writes to."""
        return self.table.bank is self._bank

    def repeat(self) -> None:
        """Updates the weights on the host as ``self.log`` does in an eager step."""
        for cell in self._set:
            cell.weight = 1
        for cell, weight in self._added:
            cell.weight += weight

    @property
    def cells(self) -> list[Cell]:
        """The cells that the step has logged to."""
        return [*self._set, *(cell for cell, _ in self._added)]

    def accumulated_weights(self) -> list[int]:
        """Returns the weights of the cells that accumulate."""
        return [cell.weight for cell, _ in self._added]

    def next_accumulated_weights(self) -> list[int]:
        """Returns the weights of the cells that accumulate, as :meth:`repeat` will leave them."""
        return [cell.weight + weight for cell, weight in self._added]


def _sets_weight(cell: Cell) -> bool:
    """Whether a call sets the weight instead of adding to it: for a per-step value, and for a torchmetrics object."""
    return cell.per_step or cell.metric is not None


class MetricCopies(NamedTuple):
    """Copies of the states, and the update counts."""

    states: list[Tensor]
    counts: list[int]


class MetricStates:
    """The tensor states of the torchmetrics objects within ``module``.

    An update and ``reset`` bind new tensors to the states' attributes; a graph always reads and writes the same tensors, the
    ``fixed`` ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics: list[TorchMetric] = [one for one in module.modules() if is_metric(one)]
        self._states: list[tuple[TorchMetric, str, Tensor]] = [
            (metric, name, getattr(metric, name))
            for metric in self._metrics
            for name, default in metric._defaults.items()
            if isinstance(default, Tensor)
        ]
        self._counts_before = self._counts()
        self._updates: list[int] = []

    def _counts(self) -> list[int]:
        return [metric._update_count for metric in self._metrics]

    @torch.no_grad()
    def rebind_in_capture(self) -> None:
        """Copies states that an update has bound anew back to their fixed addresses, as part of the capture."""
        for metric, name, fixed in self._states:
            value = getattr(metric, name)
            if value is fixed:
                continue
            if value.shape != fixed.shape or value.dtype != fixed.dtype:
                raise NotCapturableError(
                    f"{type(metric).__name__} changes its state {name!r} from {fixed.dtype} {tuple(fixed.shape)} to {value.dtype} "
                    f"{tuple(value.shape)}, which a replay would not change; update it in on_train_batch_end"
                )
            fixed.copy_(value)
            setattr(metric, name, fixed)

    def record(self) -> None:
        """Records how often the step updated each metric."""
        self._updates = [after - before for after, before in zip(self._counts(), self._counts_before, strict=True)]

    @property
    def repeats(self) -> bool:
        """Whether :meth:`repeat` has anything to do: the step updated a metric."""
        return any(self._updates)

    def undo(self) -> None:
        """Restores counts and states from before the capture."""
        for metric, count in zip(self._metrics, self._counts_before, strict=True):
            metric._update_count = count
        for metric, name, fixed in self._states:
            setattr(metric, name, fixed)

    def rebind(self) -> bool:
        """Copies states at other addresses (after a reset, or an eager step) to the fixed ones; returns whether that succeeded."""
        for metric, name, fixed in self._states:
            value = getattr(metric, name)
            if value is fixed:
                continue
            if value.shape != fixed.shape or value.dtype != fixed.dtype or value.device != fixed.device:
                return False
            fixed.copy_(value)
            setattr(metric, name, fixed)
        return True

    def repeat(self) -> None:
        """Adds the updates of a replay to the metrics' counts."""
        for metric, updates in zip(self._metrics, self._updates, strict=True):
            if updates:
                metric._update_count += updates
                metric._computed = None

    # -- for the comparison of a replay with an eager step -----------------------------------------------------------------------

    def copy(self) -> MetricCopies:
        """Returns copies of the states, and the counts."""
        return MetricCopies([getattr(metric, name).clone() for metric, name, _ in self._states], self._counts())

    @torch.no_grad()
    def put_back(self, copies: MetricCopies) -> None:
        """Restores states and counts from ``copies``."""
        for (metric, name, fixed), values in zip(self._states, copies.states, strict=True):
            fixed.copy_(values)
            setattr(metric, name, fixed)
        for metric, count in zip(self._metrics, copies.counts, strict=True):
            metric._update_count = count

    def difference(self, copies: MetricCopies) -> str:
        """Returns the name of the first state that differs from ``copies`` in any bit; an empty string if none does."""
        for (metric, name, _), values in zip(self._states, copies.states, strict=True):
            if not same_bits(getattr(metric, name), values):
                return f"the state {name!r} of a {type(metric).__name__}"
        return ""


_METRIC_COUNTS: Final = frozenset({"_update_count", "_computed", "_forward_cache", "_cache"})
"""Attributes of a torchmetrics object that hold the host's data on its updates, beside its states; they have no public names."""
_COLLECTION: Final = frozenset({"_state_is_copy"})
"""Attribute of a MetricCollection: whether its metrics have copies of shared states, as after compute; addresses stay shared."""
_NO_NAMES: Final[frozenset[str]] = frozenset()


def managed_attributes(owner: object) -> frozenset[str]:
    """Returns the attributes of a torchmetrics object that :class:`MetricStates` manages; empty for other objects."""
    if is_metric(owner):
        return _METRIC_COUNTS.union(name for name, value in owner._defaults.items() if isinstance(value, Tensor))
    return _COLLECTION if is_metric_collection(owner) else _NO_NAMES
