"""The rows of a fused optimizer: each row is a parameter, its gradient, its state, its half copy; one table per device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.ops import Rows, Rule
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.draws import Source
from fabricamp.ops.layouts import addresses
from fabricamp.ops.remainders import is_remainder
from fabricamp.ops.rules import cells_of, chunk_size_for, numbers_of
from fabricamp.ops.shards import SharedRows, local
from fabricamp.ops.statistics import sum_squares
from fabricamp.ops.table import Table
from fabricamp.ops.uploads import is_capturing
from fabricamp.optimizers.refusals import is_wrapper
from fabricamp.torch_private import are_at

if TYPE_CHECKING:
    from fabricamp._utils.types import ParamGroup

Value = TypeVar("Value")
Column = Sequence[Tensor | None]
"""One entry per parameter; None where a parameter has no such tensor."""
LAST: Final[Column] = []
"""Default argument that means: the value of the last call."""


class DeviceParams:
    """The rows of one device.

    ``indices``: the positions of the rows' parameters among all parameters of the optimizer.  ``groups``: the group of each row.
    """

    def __init__(
        self,
        device: torch.device,
        indices: list[int],
        groups: list[int],
        *,
        parameters: list[Tensor],
        states: list[list[Tensor]],
        cells: list[list[Tensor]],
        copies: list[Tensor | None],
        flags: list[Tensor | None] | None,
        shared: SharedRows | None = None,
        sources: list[Source] | None = None,
        counts: list[Tensor] | None = None,
        scales: Sequence[list[Tensor | None]] = (),
    ) -> None:
        self.device = device
        self._shared = shared
        self.indices = indices
        self._of_group: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            self._of_group.setdefault(group, []).append(row)
        self._parameters = parameters
        self._states = states
        self._cells = cells
        self._copies = copies
        self._copied = any(copy is not None for copy in copies)  # half copies, or remainders
        self._flags = flags
        self._sources = sources
        self._counts = counts
        self._scales = scales
        self._plain = not scales and sources is None and not any(map(is_remainder, copies))
        self._gradients: Column = ()
        # Forward reads a master's half copy, and no backward goes through the master: autograd has to know about the copy.
        self._written = [
            parameter if copy is None or is_remainder(copy) else copy
            for parameter, copy in zip(parameters, copies, strict=True)
        ]
        self._own_scale: Tensor | None = None
        """The last scale, if it is on this device: nearly every step has the same one."""
        # For references (no table); a table records its own captures.
        self._captured = False
        self._holds_captured = False
        self.table: Table | None = None
        if runs_kernels(device):
            own = cells_of(cells, counts, scales)
            self.table = Table(
                [[None] * len(indices), parameters, *states, copies],
                device=device,
                cells=own if flags is None else [*own, flags],
                numbers=numbers_of(sources),
                flags=-1 if flags is None else len(own),
                groups=groups,
                chunk_size=chunk_size_for(parameters, compact=bool(scales or sources)),
                shared=shared,
            )

    @property
    def _beside(self) -> list[Column]:
        """What the state has beside tensors of the parameters' shapes."""
        return cells_of(self._cells, self._counts, self._scales)

    def has(self, row: int, target: Tensor, state: Column) -> bool:
        """Whether ``row`` consists of these tensors: its parameter ``target``, and its state tensors, cells and scales."""
        own = (column[row] for column in (*self._states, *self._beside))
        return target is self._parameters[row] and all(map(operator.is_, own, state))

    def written_by(self, row: int) -> list[Tensor]:
        """Returns what an update writes of ``row``: its parameter, its state tensors, cells and scales, and its copy."""
        columns: list[Column] = [self._parameters, *self._states, *self._beside, self._copies]
        return [tensor for column in columns if (tensor := column[row]) is not None]

    def take(self, values: Sequence[Value]) -> Sequence[Value]:
        """Returns the values for these rows, from ``values`` with one entry per parameter of the optimizer."""
        return values if len(values) == len(self.indices) else [values[index] for index in self.indices]

    def refresh(self, gradients: Column) -> None:
        """Sets the gradients of a step of the reference; a table has its own :meth:`~fabricamp.ops.table.Table.refresh`."""
        for gradient in gradients:
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or (type(gradient) is not Tensor and is_wrapper(gradient)):
                raise ValueError("a gradient is sparse, or a wrapper tensor")
        self._gradients = gradients
        self._holds_captured = is_capturing(self.device)
        self._captured |= self._holds_captured

    @property
    def captured(self) -> bool:
        """Whether a step of these rows was captured in a CUDA graph."""
        return self._captured if self.table is None else bool(self.table.captured)

    @property
    def holds_captured(self) -> bool:
        """Whether the last :meth:`refresh` was during a capture."""
        return self._holds_captured if self.table is None else self.table.holds_captured

    def release(self) -> None:
        """Drops the references to the gradients."""
        self._gradients = ()
        if self.table is not None and self.table.has_dense_copies:
            self.table.release()

    def statistics(self, scale: Tensor, divisor: float) -> Tensor:
        """Returns sums of squares of the gradients divided by ``scale * divisor``; :attr:`entries` numbers."""
        if scale is not self._own_scale:
            given = scale
            scale = scale.to(self.device, non_blocking=True)
            self._own_scale = scale if scale is given else None
        table = self.table
        if table is not None and table.shared is not None:
            return sum_squares(table, scale, divisor)
        if table is not None:
            table.launch("statistics", "sum_squares", scale, divisor, table.partial)
            return table.partial
        nothing = torch.zeros((), dtype=torch.float32, device=self.device)
        gradients = [nothing if gradient is None else gradient for gradient in self._present()]
        return ops.gradient_statistics(gradients, scale, divisor, shared=self._shared)

    def _present(self) -> Column:
        """Returns the gradients, None for rows whose flag is 0; the host reads the flags here, which only a reference may do."""
        if self._flags is None:
            return self._gradients
        pairs = zip(self._gradients, self._flags, strict=True)
        return [None if flag is not None and not flag.item() else gradient for gradient, flag in pairs]

    def of_group(self, group: int) -> Rows:
        """Returns the rows of one group that have a gradient."""
        present = self._present()
        chosen = []
        gradients = []
        for row in self._of_group.get(group, []):
            gradient = present[row]
            if gradient is not None:
                chosen.append(row)
                gradients.append(gradient)
        if len(chosen) == len(self.indices):  # all of them, as in most steps of most optimizers
            copies = self._copies if self._copied else None
            own = self._states, self._cells, copies, self._shared, self._sources, self._counts, self._scales
            return Rows(gradients, self._parameters, *own, self._plain)
        return Rows(
            gradients,
            [self._parameters[row] for row in chosen],
            [[state[row] for row in chosen] for state in self._states],
            [[cell[row] for row in chosen] for cell in self._cells],
            [self._copies[row] for row in chosen],
            None if self._shared is None else self._shared.chosen(chosen),
            None if self._sources is None else [self._sources[row] for row in chosen],
            None if self._counts is None else [self._counts[row] for row in chosen],
            [[scales[row] for row in chosen] for scales in self._scales],
            self._plain,
        )

    def mark_written(self, table: Table) -> None:
        """Tells autograd which tensors a kernel has written, so that a backward through their older values raises an error."""
        rows = table.present
        torch.autograd.graph.increment_version(self._written if rows is None else [self._written[row] for row in rows])

    def index_of_statistic(self, index: int) -> int:
        """Returns the position, among the optimizer's parameters, of the parameter of entry ``index`` of :meth:`statistics`."""
        row = index if self._one_a_row else cast("Table", self.table).row_of_chunk(index)
        return self.indices[row]

    @property
    def _one_a_row(self) -> bool:
        """Whether :meth:`statistics` has one entry per row, else one per chunk."""
        return self.table is None or self._shared is not None

    @property
    def entries(self) -> int:
        """The number of entries of :meth:`statistics`."""
        return len(self.indices) if self._one_a_row else cast("Table", self.table).chunks


class RowsCacheKey:
    """What rows were built from: they stay valid while parameters, copies and flags are the same objects in the same memory."""

    def __init__(
        self, parameters: Sequence[Tensor], parts: Sequence[DeviceParams], copies: Column | None, flags: Column | None
    ) -> None:
        # A tuple stays as it is, so that it is known again without a look at what it holds.
        self._parameters = parameters if isinstance(parameters, tuple) else list(parameters)
        self.count = len(self._parameters)
        """The number of the optimizer's parameters."""
        with_row = {index for part in parts for index in part.indices}
        self._without = [index for index in range(len(parameters)) if index not in with_row]
        # Only a table holds addresses; a reference finds the memory through the tensors.
        by_address = any(part.table is not None for part in parts)
        self._addressed: list[Tensor] = []
        self._of_parameters: list[int] = []
        self._all: list[int] = []
        if by_address:
            own = [local(parameter) for parameter in self._parameters]
            others = [local(copy) for copy in copies or () if copy is not None]
            self._addressed = [*own, *others]
            self._of_parameters = list(range(len(own)))
            self._all = list(range(len(self._addressed)))
        self._pointers = addresses(self._addressed)
        self._copies = copies
        self._flags = flags

    def are_parameters(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the rows are those of ``parameters``, in this order and in the same memory."""
        return self._are_same(parameters) and are_at(self._addressed, self._pointers, self._of_parameters)

    def _are_same(self, parameters: Sequence[Tensor]) -> bool:
        own = self._parameters
        return parameters is own or (len(parameters) == len(own) and all(map(operator.is_, parameters, own)))

    def holds(
        self, parameters: Sequence[Tensor], gradients: Column, copies: Column | None, flags: Column | None
    ) -> bool:
        """Whether the rows are still valid, and no parameter without a row has a gradient now."""
        return (
            copies is self._copies
            and flags is self._flags
            and self._are_same(parameters)
            and are_at(self._addressed, self._pointers, self._all)
            and (not self._without or all(map(operator.is_, map(gradients.__getitem__, self._without), repeat(None))))
        )


def zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Fills the gradients with zeros, one operation per device and dtype, and detaches them from their graph."""
    same: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.grad_fn is not None:
            gradient.detach_()
        elif gradient.requires_grad:
            gradient.requires_grad_(False)
        same.setdefault((gradient.device, gradient.dtype, gradient.layout), []).append(gradient)
    for (_, _, layout), gradients in same.items():
        if layout is torch.strided:
            torch._foreach_zero_(gradients)
        else:
            for gradient in gradients:
                gradient.zero_()


class GroupScalars:
    """The scalars of an optimizer's groups in the tables of its rows; after a change of a number they are computed and uploaded.

    ``make_rule`` is the method that returns the rule of a group, ``rule`` the class of the optimizer's rules.
    """

    def __init__(self, make_rule: Callable[..., Rule], rule: type[Rule]) -> None:
        # The package's rules read the group and the optimizer's options; a rule of another class may read anything.  A decorated
        # method has the decorator's globals, where its ``__module__`` is that of the wrapped one.
        module = getattr(make_rule, "__globals__", {}).get("__name__", "")
        self._compares = module.startswith("fabricamp.") and rule.__module__.startswith("fabricamp.")
        self.rules: list[Rule] = []
        """The rules of the groups, with their present numbers."""
        # Of the last call; empty if a value was no plain number, such as a tensor or a list, whose content may change in place.
        self._numbers: list[Any] = []
        self._types: list[type] = []

    def upload(
        self,
        parts: Sequence[DeviceParams],
        rule: Callable[[ParamGroup], Rule],
        groups: Sequence[ParamGroup],
        options: Iterable[Any],
    ) -> None:
        """Makes the rules and uploads their scalars, unless all numbers are those of the last call and every table still has them.

        ``options``: the optimizer's own numbers, which its rules read beside those of a group.
        """
        numbers = list(options)
        for group in groups:
            for name, value in group.items():
                if type(value) is tuple:
                    numbers += value
                elif name not in _NO_NUMBERS:
                    numbers.append(value)
        types = list(map(type, numbers))
        # Types first: a number equals a tensor of its value, and the host would wait for the tensor.
        unchanged = types == self._types and numbers == self._numbers
        for part in parts:
            unchanged = unchanged and (part.table is None or part.table.has_scalars)
        if unchanged:
            return
        self.rules = list(map(rule, groups))
        set_scalars(parts, self.rules)
        if self._compares and _PLAIN.issuperset(types):
            self._numbers = numbers
            self._types = types
        else:
            self._numbers = []
            self._types = []


_NO_NUMBERS: Final = frozenset({"params", "param_names"})
_PLAIN: Final = frozenset({float, int, bool, str, type(None)})


def set_scalars(parts: Sequence[DeviceParams], rules: Sequence[Rule]) -> None:
    """Uploads the scalars of the groups' ``rules`` to every device that has a table."""
    scalars: list[Any] | None = None
    for part in parts:
        if part.table is not None:
            scalars = scalars or [rule.scalars() for rule in rules]
            part.table.set_scalars(scalars)
