"""An accumulation that several graphs work on: the role of each micro-batch, and the addresses of the shared gradients."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.ops.uploads import lasting_like

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_grad: Final = operator.attrgetter("grad")


class Role(NamedTuple):
    """The role of a micro-batch in its accumulation of ``accumulate`` micro-batches; each role has a separate graph."""

    accumulate: int
    opens: bool
    closes: bool

    @property
    def place(self) -> str:
        """The role in words, to follow "batches" in a message; empty without accumulation."""
        if self.accumulate == 1:
            return ""
        does = "end" if self.closes else "begin" if self.opens else "continue"
        return f" that {does} an accumulation of {self.accumulate}"


class WindowGradients:
    """The ``.grad`` of an accumulation in progress, at the same addresses in every graph, outside of the graphs' shared memory."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def settle(self, *, closes: bool = False) -> list[Tensor | None]:
        """Copies every gradient to its fixed address, makes that ``.grad``, now or in a capture, and returns all gradients.

        At the end of an accumulation (``closes``), views into the buckets of torch's DDP stay where they are: kernels may sum a
        copy with another alignment in another order.
        """
        moved: list[tuple[Tensor, Tensor]] = []
        parameters = list(self._module.parameters())
        for parameter in parameters:
            gradient, place = parameter.grad, self._places.get(parameter)
            if gradient is None or gradient is place or (closes and gradient._is_view()):
                continue
            if place is None or place.dtype != gradient.dtype:
                place = self._places[parameter] = lasting_like(gradient)
            moved.append((place, gradient))
            parameter.grad = place
        if moved:
            torch._foreach_copy_([place for place, _ in moved], [gradient for _, gradient in moved])
        return list(map(_grad, parameters))

    def bring(self, captured: Sequence[Tensor | None]) -> bool:
        """Prepares the gradients for a graph that adds to the ``captured`` ones; returns False if other gradients are missing."""
        present = map(_grad, self._module.parameters())
        return all(map(operator.is_, present, captured)) or all(map(operator.is_, self.settle(), captured))
