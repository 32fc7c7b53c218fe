"""Converts an fp32 module to half: its weights and buffers, and the choice of modules with a boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.precision.casting import CONVERTIBLE, modules_to_convert, own_tensors, owns_any

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from fabricamp.precision.master_weights import MasterWeights


def check_full_weights(module: nn.Module, name: str) -> None:
    """Raises :class:`ConfigError` if parameters of ``module`` are half already; opt level ``name`` needs fp32 weights."""
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype in HALF_DTYPES:
            raise ConfigError(
                f"parameter {parameter_name} is {parameter.dtype} already, but precision {name!r} keeps fp32 weights; "
                "bring the module in fp32 (module.float()), or use 'O2' / 'O3' ('O5' for bfloat16)"
            )


def check_autocast(module: nn.Module, dtype: torch.dtype, name: str, device_type: str) -> None:
    """Raises :class:`ConfigError` if ``module`` cannot be trained under autocast to ``dtype`` (opt level ``name``)."""
    # torch's autocast runs an LSTM on CPUs by oneDNN, which cannot train an LSTM in fp16.
    lstm = next((place for place, one in module.named_modules() if isinstance(one, nn.LSTM)), None)
    if lstm is not None and dtype is torch.float16 and device_type == "cpu":
        raise ConfigError(
            f"precision {name!r} on CPU with an LSTM ({lstm or type(module).__name__}), which torch cannot train "
            "in fp16 under autocast there; use 'O4' (bfloat16), 'O2' or 'O0'"
        )


def convert(
    module: nn.Module,
    dtype: torch.dtype,
    full: MasterWeights,
    *,
    keep_batchnorm_fp32: bool,
    whole_step: bool = False,
) -> set[int]:
    """Converts weights and buffers in place and keeps their fp32 values in ``full``; returns the ids of the parameters."""
    chosen = modules_to_convert(module, keep_batchnorm_fp32=keep_batchnorm_fp32, whole_step=whole_step)
    tensors = tensors_to_convert(module, chosen)
    # Shards stay fp32, as masters: the strategy rounds the parameters that it gathers from them.
    full.convert([tensor for tensor in tensors if not is_shard(tensor)], dtype)
    full.watch_loading(chosen)
    for one in chosen:
        if isinstance(one, nn.RNNBase) and not any_shard(own_tensors(one)):
            one.flatten_parameters()
    return {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}


def tensors_to_convert(module: nn.Module, chosen: Collection[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers of the ``chosen`` modules, without those shared with another module."""
    chosen_ids = set(map(id, chosen))
    others = [one for one in module.modules() if id(one) not in chosen_ids]
    kept = {id(tensor) for one in others for tensor in own_tensors(one)}
    unique = {id(tensor): tensor for one in chosen for tensor in own_tensors(one)}
    return [tensor for key, tensor in unique.items() if tensor.dtype in CONVERTIBLE and key not in kept]


def bounded(module: nn.Module, converted: set[int], *, keep_batchnorm_fp32: bool) -> list[nn.Module]:
    """Returns the modules that get a boundary: they or their submodules own a converted parameter (given by id)."""
    return [
        one for one in modules_to_convert(module, keep_batchnorm_fp32=keep_batchnorm_fp32) if owns_any(one, converted)
    ]
