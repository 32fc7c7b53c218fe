"""Saves a module before trial runs, and restores it afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def module_kept(module: nn.Module) -> Iterator[None]:
    """Restores the module at the end of the block: weights, buffers, modes, states of metrics, plain attributes.

    The saved tensors are in host memory.  Objects are restored in place: references from optimizers and hooks stay valid.
    """
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(
            f"the parameter {lazy} has no shape yet, so it could not be given back; run the module on a batch first"
        )
    kept = _Kept(module)
    try:
        yield
    finally:
        kept.give_back()


class _Kept:
    """Saved content of a module, its submodules, and the collections and tensors in them."""

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # by id; the reference keeps the id valid
        waiting: list[Any] = [module]
        while waiting:
            one = waiting.pop()
            if id(one) not in self._seen:
                self._seen[id(one)] = one
                waiting += self._keep(one)

    def give_back(self) -> None:
        """Restores the saved content."""
        for undo in self._undo:
            undo()

    def _keep(self, one: Any) -> list[Any]:
        """Saves one object; returns the objects in it, which are still to be saved."""
        if isinstance(one, nn.Module):
            return [vars(one)]
        if isinstance(one, Tensor):
            self._keep_tensor(one)
            return []
        if isinstance(one, dict):
            return self._keep_dict(one)
        if isinstance(one, list | set | deque):
            return self._keep_items(one)
        return list(one) if isinstance(one, tuple) else []

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.is_inference():  # no values, or not changeable
            return
        values, leaf, requires_grad = tensor.detach().to("cpu", copy=True), tensor.is_leaf, tensor.requires_grad
        grad = tensor.grad if leaf else None

        def undo() -> None:
            now = tensor.detach()
            if now.shape != values.shape or now.dtype != values.dtype:
                tensor.data = values.to(now.device)
            elif not torch.equal(now.cpu(), values):
                tensor.data.copy_(values)
            if leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad

        self._undo.append(undo)

    def _keep_dict(self, one: dict[Any, Any]) -> list[Any]:
        content = dict(one)

        def undo() -> None:
            same = one.keys() == content.keys() and all(one[key] is value for key, value in content.items())
            if not same:
                dict.clear(one)
                dict.update(one, content)

        self._undo.append(undo)
        return list(content.values())

    def _keep_items(self, one: Any) -> list[Any]:
        content = list(one)

        def undo() -> None:
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(content)

        self._undo.append(undo)
        return content
