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
        callable(getattr(submodule, "init_weights", None))
        and any(inner in units for inner in submodule.modules() if inner is not submodule)
        for submodule in module.modules()
    )


def leave_meta(module: nn.Module) -> list[str]:
    """Moves tensors of ``module`` from the meta device to host memory and fills them; returns the names of unfilled ones."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return []
    first_values = FirstValues(module, torch.device("cpu"), fills=True)
    first_values.give(module.modules())
    return first_values.unfilled


class FirstValues:
    """Allocates meta tensors on ``device``; on rank 0 (``fills``) it also fills them by their modules' own methods."""

    def __init__(self, module: nn.Module, device: torch.device, *, fills: bool) -> None:
        self._device = device
        self._fills = fills
        self._names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._allocated: dict[int, Tensor] = {}  # by id of the meta tensor
        self.unfilled: list[str] = []
        """Names of the tensors that no method has filled completely."""

    def give(self, modules: Iterable[nn.Module]) -> None:
        """Allocates the meta tensors that these modules own themselves; shared tensors stay shared.

        ``modules`` have to be in the order of outer before inner.  On rank 0, inner modules first, it then calls
        ``reset_parameters`` of the modules with new tensors, and ``init_weights`` of all.
        """
        modules = list(modules)
        marked = {module: own for module in modules if (own := self._allocate(module))}
        if not (marked and self._fills):
            return
        with torch.no_grad():
            for module in reversed(modules):
                fillers = ("reset_parameters", "init_weights") if module in marked else ("init_weights",)
                for name in fillers:
                    if callable(filler := getattr(module, name, None)):
                        filler()
        self.unfilled += [name for own in marked.values() for name, tensor in own if bool(_is_mark(tensor).any())]

    def _allocate(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Allocates the module's own meta tensors, filled with a mark; returns them with their names."""
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        own = []
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is not None and tensor.is_meta:
                    table[name] = self._allocated_like(tensor)
                    own.append((self._names[id(tensor)], table[name]))
        return own

    def _allocated_like(self, meta: Tensor) -> Tensor:
        allocated = self._allocated.get(id(meta))
        if allocated is None:
            allocated = torch.empty_like(meta, device=self._device)
            allocated.fill_(_mark(allocated.dtype))
            if isinstance(meta, nn.Parameter):
                allocated = nn.Parameter(allocated, requires_grad=meta.requires_grad)
            self._allocated[id(meta)] = allocated
        return allocated


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max


def _is_mark(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    return tensor == _mark(tensor.dtype)
