"""Allocates and fills parameters and buffers that were built on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def fills_others(module: nn.Module, units: Collection[nn.Module]) -> bool:
    """Returns whether an ``init_weights`` in ``module`` also fills other units; all tensors then have to exist at once."""
    return any(
        callable(getattr(one, "init_weights", None))
        and any(inner in units for inner in one.modules() if inner is not one)
        for one in module.modules()
    )


def leave_meta(module: nn.Module) -> list[str]:
    """Moves tensors of ``module`` from the meta device to host memory and fills them; returns the names of unfilled ones."""
    if not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
        return []
    first = FirstValues(module, torch.device("cpu"), fills=True)
    first.give(module.modules())
    return first.unfilled


class FirstValues:
    """Allocates meta tensors on ``device``; on rank 0 (``fills``) it also fills them by their modules' own methods."""

    def __init__(self, module: nn.Module, device: torch.device, *, fills: bool) -> None:
        self._device = device
        self._fills = fills
        self._names = {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
        self._made: dict[int, Tensor] = {}
        self.unfilled: list[str] = []
        """Names of the tensors that no method has filled completely."""

    def give(self, modules: Iterable[nn.Module]) -> None:
        """Allocates the meta tensors that these modules own themselves; shared tensors stay shared.

        ``modules`` have to be in the order of outer before inner.  On rank 0, inner modules first, it then calls
        ``reset_parameters`` of the modules with new tensors, and ``init_weights`` of all.
        """
        modules = list(modules)
        marked = {module: own for module in modules if (own := self._allocated(module))}
        if not (marked and self._fills):
            return
        with torch.no_grad():
            for module in reversed(modules):
                fillers = ("reset_parameters", "init_weights") if module in marked else ("init_weights",)
                for name in fillers:
                    if callable(filler := getattr(module, name, None)):
                        filler()
        self.unfilled += [name for own in marked.values() for name, one in own if bool(_is_mark(one).any())]

    def _allocated(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Allocates the module's own meta tensors, filled with a mark; returns them with their names."""
        return [
            (self._names[id(one)], self._put(table, name, one))
            for table in _tables(module)
            for name, one in list(table.items())
            if one is not None and one.is_meta
        ]

    def _put(self, table: dict[str, Any], name: str, one: Tensor) -> Tensor:
        made = self._made.get(id(one))
        if made is None:
            made = torch.empty_like(one, device=self._device)
            made.fill_(_mark(made.dtype))
            if isinstance(one, nn.Parameter):
                made = nn.Parameter(made, requires_grad=one.requires_grad)
            self._made[id(one)] = made
        table[name] = made
        return made


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_mark(tensor: Tensor) -> Tensor:
    return tensor.isnan() if tensor.is_floating_point() or tensor.is_complex() else tensor == _mark(tensor.dtype)
