"""From an fp32 module to a half one: weights and buffers, and the boundary that its callers see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.precision.casting import CONVERTIBLE, modules_to_convert, own_tensors, owns_any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from fabricamp.precision.boundary import Boundary
    from fabricamp.precision.master_weights import MasterWeights

__all__ = ["bound", "check_autocast", "convert"]


def check_autocast(module: nn.Module, dtype: torch.dtype, name: str, device_type: str) -> None:
    """Raises :class:`ConfigError` where ``module`` cannot be trained under autocast to ``dtype`` (opt level ``name``)."""
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"parameter {parameter_name} is {parameter.dtype} already, but precision {name!r} keeps fp32 weights; "
                "bring the module in fp32 (module.float()), or use 'O2' / 'O3' ('O5' for bfloat16)"
            )
    # oneDNN, where torch's autocast sends an LSTM on CPUs, trains none in fp16.
    lstm = next((place for place, one in module.named_modules() if isinstance(one, nn.LSTM)), None)
    if lstm is not None and dtype is torch.float16 and device_type == "cpu":
        raise ConfigError(
            f"precision {name!r} on CPU with an LSTM ({lstm or type(module).__name__}), which torch cannot train "
            "in fp16 under autocast there; use 'O4' (bfloat16), 'O2' or 'O0'"
        )


def convert(module: nn.Module, dtype: torch.dtype, full: MasterWeights, *, keep_batchnorm_fp32: bool) -> set[int]:
    """Converts weights and buffers in place, their fp32 values kept in ``full``; returns the ids of the parameters."""
    kept_fp32: set[int] = set()
    chosen = modules_to_convert(module, keep_batchnorm_fp32=keep_batchnorm_fp32)
    chosen_ids = set(map(id, chosen))
    for other in module.modules():
        if id(other) not in chosen_ids:
            kept_fp32.update(map(id, own_tensors(other)))
    unique = {id(tensor): tensor for one in chosen for tensor in own_tensors(one)}
    tensors = [tensor for key, tensor in unique.items() if tensor.dtype in CONVERTIBLE and key not in kept_fp32]
    full.convert(tensors, dtype)
    full.watch_loading(chosen)
    for one in chosen:
        if isinstance(one, nn.RNNBase):
            one.flatten_parameters()
    return {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}


def bound(
    module: nn.Module, converted: set[int], boundary: Callable[[], Boundary], *, keep_batchnorm_fp32: bool
) -> list[RemovableHandle]:
    """Gives every module that owns converted parameters (by id) a new ``boundary()``; returns what removes them."""
    return [
        handle
        for one in modules_to_convert(module, keep_batchnorm_fp32=keep_batchnorm_fp32)
        if owns_any(one, converted)
        for handle in boundary().attach(one)
    ]
