"""What an optimizer is to the kernels: a rule says what its rows hold and how they change, and one function serves them all.

An element-wise optimizer is a subclass of :class:`Rule` and a kernel.  One whose steps depend on norms overrides ``launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.reference import prepared, rounded, unless_skipped, widened
from fabricamp.ops.shards import SharedRows
from fabricamp.ops.table import Table

if TYPE_CHECKING:
    from fabricamp.ops.step_state import StepState


Tensors = list[Tensor]
Cells = Sequence[Sequence[Tensor]]
"""For each name of a rule's cells, the numbers of its rows."""


class Rows(NamedTuple):
    """Rows of one group: lists of one length.  ``states`` and ``cells`` have one such list for each of the rule's names."""

    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]
    states: Sequence[Sequence[Tensor | None]] = ()
    cells: Cells = ()
    copies: Sequence[Tensor | None] | None = None
    """What gets the rounded parameters."""
    shared: SharedRows | None = None
    """Who has other parts of what these are parts of, for rules that take norms of rows."""


class Steering(NamedTuple):
    """How an update reads its gradients: times ``state.multiplier``, each value then limited to +-``limit``.

    Where ``state.found_inf`` is set nothing changes, unless ``skips`` is False.  ``norm`` (0-dim, fp64) is that of all gradients,
    for rules that ask for it.
    """

    state: StepState | None = None
    limit: float | None = None
    skips: bool = True
    norm: Tensor | None = None

    def arguments(self) -> tuple[Tensor | None, float, int]:
        """State, limit and skips as kernels take them."""
        state, limit, skips, _ = self
        return None if state is None else state.words, -1.0 if limit is None else float(limit), int(skips)


class Rule:
    """How an optimizer updates its rows; a subclass is a dataclass of what the rows of one group share.

    Columns of a table are gradient, parameter, ``states``, half copy.  State is fp32 for half and fp32 parameters, else fp64.
    """

    kernel: ClassVar[str]
    """The name of its ``.cu`` file, and of the kernel in it that updates a table."""
    states: ClassVar[tuple[str, ...]] = ()
    """The tensors of an optimizer's state that are like the parameter."""
    cells: ClassVar[tuple[str, ...]] = ()
    """The single numbers in it, fp32."""
    wide_cells: ClassVar[tuple[str, ...]] = ()
    """Cells that are as wide as the state: fp64 for fp64 parameters."""
    shared: SharedRows | None = None
    """The rows of a step in torch's operations, where they are parts."""

    def scalars(self) -> tuple[float | Tensor, ...]:
        """The rule as its kernel reads it, in the order of ``enum Scalar`` there."""
        raise NotImplementedError

    def step(self, gradients: Tensors, parameters: Tensors, states: list[Tensors], cells: Cells) -> None:
        """Updates all but the gradients in place by torch's operations; the tensors are fp32, or fp64 for fp64 parameters."""
        raise NotImplementedError

    @classmethod
    def launch(cls, table: Table, steering: Steering) -> None:
        """Updates every row of ``table``, whose groups have their scalars."""
        table.launch(cls.kernel, cls.kernel, *steering.arguments())

    def measure(self, rows: Table | Rows, steering: Steering) -> Tensor | None:
        """Returns ``steering.norm`` for rows that are all there are; None for rules that do not ask."""
        return None

    def gradients(self, rows: Rows, parameters: Sequence[Tensor], steering: Steering) -> list[Tensor]:
        """Returns the gradients as :meth:`step` reads them, in the dtypes of ``parameters``."""
        return prepared(rows.gradients, parameters, steering.state, steering.limit)

    def reference(self, rows: Rows, steering: Steering) -> None:
        """Does to the rows of one group what a launch does, in torch's operations; to be called without gradient mode."""
        if not rows.parameters:
            return
        states = [[one for one in column if one is not None] for column in rows.states]
        self.shared = rows.shared

        def update() -> None:
            parameters, wide = widened(rows.parameters), [widened(column) for column in states]
            self.step(self.gradients(rows, parameters, steering), parameters, wide, rows.cells)
            for full, narrow in zip(wide, states, strict=True):
                rounded(full, narrow)
            rounded(parameters, rows.parameters)
            if rows.copies is not None:
                rounded(parameters, rows.copies)

        if steering.state is None or not steering.skips:
            update()
            return
        columns = (rows.parameters, *states, *rows.cells, rows.copies or ())
        unless_skipped(steering.state, [one for column in columns for one in column if one is not None], update)


@torch.no_grad()
def update(
    rule: Rule, rows: Rows, state: StepState | None = None, *, limit: float | None = None, norm: Tensor | None = None
) -> None:
    """Updates ``rows``, all on one device, in place by ``rule``: by its kernel where kernels run, else in torch's operations.

    Gradients are multiplied by ``state.multiplier``, then limited to +-``limit``; where ``state.found_inf`` is set nothing changes.
    ``norm`` is what LAMB clips by; None: the norm of these gradients.
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
    table = Table(columns, cells=rows.cells, device=device)
    table.set_scalars([rule.scalars()])
    if norm is None:
        steering = steering._replace(norm=rule.measure(table, steering))
    rule.launch(table, steering)


def function_of(kind: type[Rule]) -> Callable[..., None]:
    """Returns :func:`update` by rules of ``kind`` as a function of lists of tensors."""
    names = ", ".join(("gradients", "parameters", *kind.states, *kind.cells, "rule"))

    def function(
        *arguments: Any,
        copies: Sequence[Tensor | None] | None = None,
        state: StepState | None = None,
        limit: float | None = None,
    ) -> None:
        gradients, parameters, *columns, rule = arguments
        count = len(kind.states)
        rows = Rows(gradients, parameters, columns[:count], columns[count:], copies)
        update(rule, rows, state, limit=limit)

    function.__name__ = function.__qualname__ = kind.kernel
    function.__doc__ = f"``{kind.kernel}({names}, *, copies=None, state=None, limit=None)``: see :func:`update`."
    return function
