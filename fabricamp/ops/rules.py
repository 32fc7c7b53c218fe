"""Update rules of optimizers: a rule names the tensors of its rows and updates them; :func:`update` runs any rule.

An element-wise optimizer is a subclass of :class:`Rule` and a kernel.  An optimizer that needs norms also overrides ``launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops import codes, draws
from fabricamp.ops import table as tables
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.layouts import elements_of
from fabricamp.ops.reference import prepared, rounded, unless_skipped, widened
from fabricamp.ops.remainders import wide_values, write_values
from fabricamp.ops.shards import SharedRows
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from fabricamp.ops.step_state import StepState


_LARGE: Final = 2**28
"""Elements of a table whose chunks may be longer: there are enough for all processors."""
_LONGER: Final = 4
Tensors = list[Tensor]
Cells = Sequence[Sequence[Tensor]]
"""For each name in a rule's ``cells``, the numbers of the rows."""


class Rows(NamedTuple):
    """Rows of one group, as lists of equal length.  ``states`` and ``cells`` have one list for each of the rule's names."""

    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]
    states: Sequence[Sequence[Tensor | None]] = ()
    cells: Cells = ()
    copies: Sequence[Tensor | None] | None = None
    """Tensors into which the rounded parameters are written; or remainders (int16) of bf16 parameters, which are read too."""
    shared: SharedRows | None = None
    """The ranks that hold the other shards of these rows, for rules that need norms of rows."""
    sources: Sequence[draws.Source] | None = None
    """Where the bits come from by which bf16 states are rounded; None: they are rounded to nearest."""
    counts: Sequence[Tensor] | None = None
    """The numbers of steps (fp32) for these bits, where the rule's cells have none."""
    scales: Sequence[Sequence[Tensor | None]] = ()
    """For each of the rule's states the scales (fp32, 1 x blocks of 256) of rows whose state is codes; empty: no row's is."""
    plain: bool = False
    """Whether it is known that no row has a remainder, codes, or states that are rounded at random."""


class Steering(NamedTuple):
    """How an update scales its gradients: times ``state.multiplier``, each value then clamped to +-``limit``.

    If ``state.found_inf`` is set, the update changes nothing, unless ``skips`` is False.  ``norm`` (0-dim, fp64) is the norm of
    all gradients, for rules that need it.
    """

    state: StepState | None = None
    limit: float | None = None
    skips: bool = True
    norm: Tensor | None = None

    def arguments(self) -> tuple[Tensor | None, float, int]:
        """Returns state, limit and skips as kernel arguments; limit is -1.0 for none."""
        words = None if self.state is None else self.state.words
        limit = -1.0 if self.limit is None else float(self.limit)
        return words, limit, int(self.skips)


class Rule:
    """How an optimizer updates its rows; a subclass is a dataclass of one group's options.

    The columns of a table are gradient, parameter, ``states``, half copy or remainder.  State is fp32 for half and fp32 parameters,
    else fp64.
    """

    kernel: ClassVar[str]
    """The name of the rule's ``.cu`` file, and of the kernel in the file that updates a table."""
    states: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors with the parameter's shape."""
    cells: ClassVar[tuple[str, ...]] = ()
    """Names of the single numbers in the state, fp32."""
    squares: ClassVar[tuple[str, ...]] = ()
    """Names of the states that are never negative."""
    wide_cells: ClassVar[tuple[str, ...]] = ()
    """Names of the cells with the state's dtype: fp64 for fp64 parameters."""
    shared: SharedRows | None = None
    """Set during :meth:`reference` if its rows are shards: the ranks that hold the others."""

    def scalars(self) -> tuple[float | Tensor, ...]:
        """Returns the rule's numbers for its kernel, in the order of the kernel's ``enum Scalar``."""
        raise NotImplementedError

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates everything but the gradients in place, in torch's operations.

        The tensors are fp32, or fp64 for fp64 parameters.
        """
        raise NotImplementedError

    @classmethod
    def launch(cls, table: Table, steering: Steering) -> None:
        """Updates every row of ``table``; the scalars of its groups have been set."""
        table.launch(cls.kernel, cls.kernel, *steering.arguments())

    def measure(self, rows: Table | Rows, steering: Steering) -> Tensor | None:
        """Returns ``steering.norm`` if ``rows`` are all rows of the step; None for rules that do not need the norm."""
        return None

    def gradients(self, rows: Rows, parameters: Sequence[Tensor], steering: Steering) -> list[Tensor]:
        """Returns the scaled and clamped gradients for :meth:`step`, in the dtypes of ``parameters``."""
        return prepared(rows.gradients, parameters, steering.state, steering.limit)

    def _read_states(self, number: int, narrow: Tensors, rows: Rows) -> Tensors:
        """Returns the states ``number`` of rows that may not be plain, for :meth:`step`."""
        if not rows.scales or not any(map(codes.is_coded, narrow)):
            return widened(narrow)
        squares = self.states[number] in self.squares
        return [
            widened((state,))[0] if scales is None else codes.decoded(state, scales, squares=squares)
            for state, scales in zip(narrow, rows.scales[number], strict=True)
        ]

    def _write_states(self, number: int, wide: Tensors, narrow: Tensors, rows: Rows) -> None:
        """Writes the states ``number`` of rows that may not be plain, after the step has been counted."""
        if rows.scales and wide is not narrow:
            squares = self.states[number] in self.squares
            for value, state, scales in zip(wide, narrow, rows.scales[number], strict=True):
                if scales is not None:
                    codes.encode_into(value, state, scales, squares=squares)
                elif state is not value:
                    state.copy_(value)
            return
        if rows.sources is None or wide is narrow:
            rounded(wide, narrow)
            return
        counts = rows.counts or rows.cells[self.cells.index("step")]
        for row, (value, state) in enumerate(zip(wide, narrow, strict=True)):
            if state.dtype is torch.bfloat16:
                draws.round_into(value, state, rows.sources[row], counts[row], number, rows.parameters[row])
            elif state is not value:
                state.copy_(value)

    def reference(self, rows: Rows, steering: Steering) -> None:
        """Updates the rows of one group as a launch does, in torch's operations; call it with gradients disabled."""
        if not rows.parameters:
            return
        states = [[tensor for tensor in column if tensor is not None] for column in rows.states]
        self.shared = rows.shared

        def update() -> None:
            if rows.plain:
                values = widened(rows.parameters)
                wide_states = list(map(widened, states))
                self.step(self.gradients(rows, values, steering), values, wide_states, rows.cells)
                for wide, narrow in zip((values, *wide_states), (rows.parameters, *states), strict=True):
                    rounded(wide, narrow)
                if rows.copies is not None:
                    rounded(values, rows.copies)
                return
            values = wide_values(rows.parameters, rows.copies)
            wide_states = [self._read_states(number, column, rows) for number, column in enumerate(states)]
            self.step(self.gradients(rows, values, steering), values, wide_states, rows.cells)
            if rows.counts is not None:
                torch._foreach_add_(list(rows.counts), 1.0)
            for number, (wide, narrow) in enumerate(zip(wide_states, states, strict=True)):
                self._write_states(number, wide, narrow, rows)
            write_values(values, rows.parameters, rows.copies)

        if steering.state is None or not steering.skips:
            update()
            return
        columns = (rows.parameters, *states, *rows.cells, rows.counts or (), *rows.scales, rows.copies or ())
        written = (tensor for column in columns for tensor in column if tensor is not None)
        unless_skipped(steering.state, written, update)


@torch.no_grad()
def update(
    rule: Rule, rows: Rows, state: StepState | None = None, *, limit: float | None = None, norm: Tensor | None = None
) -> None:
    """Updates ``rows``, all on one device, in place by ``rule``: by its kernel where kernels run, else in torch's operations.

    Gradients are multiplied by ``state.multiplier``, then clamped to +-``limit``; nothing changes if ``state.found_inf`` is set.
    ``norm`` is the norm that LAMB clips by; None: the norm of these gradients.
    """
    if not rows.parameters:
        return
    device = rows.parameters[0].device
    steering = Steering(state, limit, norm=norm)
    if not runs_kernels(device):
        if norm is None:
            steering = steering._replace(norm=rule.measure(rows, steering))
        rule.reference(rows, steering)
        return
    columns = rows.gradients, rows.parameters, *rows.states, rows.copies or [None] * len(rows.parameters)
    table = Table(
        columns,
        cells=cells_of(rows.cells, rows.counts, rows.scales),
        numbers=numbers_of(rows.sources),
        device=device,
        chunk_size=chunk_size_for(rows.parameters, compact=bool(rows.scales or rows.sources)),
    )
    table.set_scalars([rule.scalars()])
    if norm is None:
        steering = steering._replace(norm=rule.measure(table, steering))
    rule.launch(table, steering)


def numbers_of(sources: Sequence[draws.Source] | None) -> list[list[int]]:
    """Returns the numbers of a table's rows, as the kernels' ``Draws`` read them."""
    return [] if sources is None else [[source.key for source in sources], [source.first for source in sources]]


def cells_of(
    cells: Sequence[Sequence[Tensor | None]],
    counts: Sequence[Tensor | None] | None,
    scales: Sequence[Sequence[Tensor | None]],
) -> list[Sequence[Tensor | None]]:
    """Returns the cells of a table in the kernels' order."""
    return [*cells, *([] if counts is None else [counts]), *scales]


def chunk_size_for(parameters: Sequence[Tensor], *, compact: bool) -> int:
    """Returns the size of a table's chunks.

    Those of ``compact`` states, in 8 or 16 bits, are whole blocks; in large tables they are longer, as reading so few bytes does
    not hide how long a chunk takes to begin (at 1.3 B parameters 5 % of an update).
    """
    if not compact:
        return tables.CHUNK_SIZE
    size = max(tables.CHUNK_SIZE, codes.BLOCK)
    return _LONGER * size if sum(elements_of(one) for one in parameters) >= _LARGE else size


def function_of(kind: type[Rule]) -> Callable[..., None]:
    """Returns :func:`update` for rules of ``kind``, as a function of lists of tensors."""
    names = ", ".join(("gradients", "parameters", *kind.states, *kind.cells, "rule"))

    def function(
        *arguments: Any,
        copies: Sequence[Tensor | None] | None = None,
        state: StepState | None = None,
        limit: float | None = None,
        sources: Sequence[draws.Source] | None = None,
        counts: Sequence[Tensor] | None = None,
        scales: Sequence[Sequence[Tensor | None]] = (),
    ) -> None:
        gradients, parameters, *columns, rule = arguments
        count = len(kind.states)
        lists = gradients, parameters, columns[:count], columns[count:], copies
        rows = Rows(*lists, sources=sources, counts=counts, scales=scales)
        update(rule, rows, state, limit=limit)

    function.__name__ = function.__qualname__ = kind.kernel
    function.__doc__ = f"``{kind.kernel}({names}, *, copies=None, state=None, limit=None)``: see :func:`update`."
    return function
