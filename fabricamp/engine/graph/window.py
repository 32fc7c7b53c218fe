"""The accumulation window that several graphs work on: what a micro-batch is in it, and where its gradients are for all of them."""

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
    """What a micro-batch is in its window of so many: each role is a graph of its own."""

    accumulate: int
    opens: bool
    closes: bool

    @property
    def place(self) -> str:
        """Where it is, in words behind "batches"; empty where it is a window by itself."""
        if self.accumulate == 1:
            return ""
        does = "close" if self.closes else "open" if self.opens else "go on in"
        return f" that {does} a window of {self.accumulate}"


class WindowGradients:
    """The ``.grad`` of an open window, at the same addresses in every graph, and outside of the memory that the graphs share."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def settle(self, *, closes: bool = False) -> list[Tensor | None]:
        """Copies every gradient to its place and makes that its ``.grad``, now or as a part of a capture; returns them all.

        Behind a window that ``closes``, views of what torch's wrapper has exchanged stay: kernels sum what lies elsewhere, perhaps
        aligned otherwise, in another order.
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
        """Readies the gradients of the window for a graph that adds to the ``captured`` ones; False where others are missing."""
        present = map(_grad, self._module.parameters())
        return all(map(operator.is_, present, captured)) or all(map(operator.is_, self.settle(), captured))
