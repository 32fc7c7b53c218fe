"""Steps under torch's ``fully_shard``: they gather the parameters outside of all units, and refuse second-order gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricamp.containers import tensors_within
from fabricamp.errors import ConfigError
from fabricamp.strategies.units import Unit, own_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def gathering(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns the method ``name`` wrapped by torch, with its own signature: torch's wrapper shows one argument less."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    written = getattr(module, name)
    register_fsdp_forward_method(module, name)
    wrapped = getattr(module, name)
    return functools.wraps(written)(functools.partial(wrapped))


def refuse_second_order(units: Sequence[Unit]) -> Callable[[], None]:
    """Makes a backward with ``create_graph=True`` through gathered modules raise; returns a function that removes the hooks.

    A unit's weights are freed after its first backward, and the second-order graph would read them: torch then ends the process.
    The last unit is the rest of the module; its modules are called one by one in a step, so each of them gets a hook.
    """
    rest = [one for one in own_modules(units[-1], units)[1:] if next(one.parameters(recurse=False), None) is not None]
    watched = {*rest, *(unit.module for unit in units[:-1])}
    handles = [
        one.register_forward_hook(functools.partial(_watch, functools.partial(_refuse, name)))
        for name, one in units[-1].module.named_modules()
        if one in watched
    ]

    def take_back() -> None:
        for handle in handles:
            handle.remove()

    return take_back


def _watch(refuse: Callable[[Tensor], None], _module: nn.Module, _inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for tensor in (output,) if type(output) is Tensor else tensors_within(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def _refuse(name: str, _gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # in backward this means create_graph=True
        raise ConfigError(
            f"a gradient of a gradient (create_graph=True) through {name!r} with strategy='fsdp' is not offered, as its weights "
            "are freed after the first backward: use strategy='ddp', or leave the penalty out"
        )
