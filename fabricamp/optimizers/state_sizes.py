"""Bytes that an optimizer keeps, and takes during a step, told before its first step."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricamp._utils.without_compiler import let_optimizers_work
from fabricamp.ops.shards import local
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.larc import LARC
from fabricamp.torch_private import without_dispatch_modes

_SIDE: Final = 64
"""Rows and columns of the parameter on which torch's optimizers are tried."""
_NEED_OTHERS: Final = ("LBFGS", "SparseAdam")
"""Torch's optimizers whose step takes a closure, or sparse gradients."""


def states_of(optimizer: object) -> list[int] | None:
    """Returns the bytes of each state tensor of ``optimizer`` after its first step; None for another library's.

    Torch's optimizers are tried on a small parameter; of fabricamp's the rule says it.
    """
    inner: Any = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    by_rule = isinstance(inner, FusedOptimizer)
    kind = type(inner)
    if not by_rule and (not kind.__module__.startswith("torch.optim") or kind.__name__ in _NEED_OTHERS):
        return None
    sizes: list[int] = []
    for group in inner.param_groups:
        trained = [local(one) for one in group["params"] if one.requires_grad]
        bytes_an_element = [] if by_rule or not trained else _tried(inner, group, trained[0].dtype)
        for parameter in trained:
            if by_rule:
                kept = inner._kept(parameter)
                sizes += [parameter.numel() * kept.itemsize] * len(inner.rule.states)
                if kept.itemsize == 1:
                    sizes += [-(-parameter.numel() // 256) * 4] * len(inner.rule.states)
            else:
                sizes += [int(parameter.numel() * each) for each in bytes_an_element]
    return sizes


def _tried(optimizer: Any, group: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """Returns the bytes an element of each state that a step of ``optimizer`` makes for a parameter of ``group``."""
    with without_dispatch_modes(), torch.no_grad():
        parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype, device="cpu"))
        parameter.grad = torch.zeros_like(parameter)
        left_out = {"params", "param_names", "fused", "foreach", "capturable"}
        options = {name: value for name, value in group.items() if name not in left_out}
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = 0.0
        let_optimizers_work()
        small = type(optimizer)([{"params": [parameter], **options}])
        small.step()
        state = small.state.get(parameter, {})
        return [one.numel() * one.element_size() / parameter.numel() for one in state.values() if _is_large(one)]


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def temporaries_of(optimizer: object) -> list[int]:
    """Returns the sizes of what a step of ``optimizer`` takes at once and gives back: torch's work on lists of parameters."""
    inner: Any = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    groups = inner.param_groups
    if isinstance(inner, FusedOptimizer) or any(group.get("fused") for group in groups):
        return []
    sizes = [[_size(one) for one in group["params"] if one.requires_grad] for group in groups]
    if any(group.get("foreach") is False for group in groups):
        return sorted((size for of_group in sizes for size in of_group), reverse=True)[:1]
    decays = [
        of_group
        for group, of_group in zip(groups, sizes, strict=True)
        if group.get("weight_decay") and not (group.get("decoupled_weight_decay") or type(inner) is torch.optim.AdamW)
    ]
    # SGD works in place; the others have a list of square roots, or the like.
    roots = [] if isinstance(inner, torch.optim.SGD) else max(sizes, key=sum, default=[])
    return [*roots, *max(decays, key=sum, default=[])]


def _size(tensor: Tensor) -> int:
    own: Tensor = local(tensor)
    return own.numel() * own.element_size()
