"""Casts nested values, and converts a module: its weights and buffers, in place.

In this order: casts of values; the checks and the conversion of a module; the choice of the modules to convert, and of those that
get a boundary.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricamp._utils.containers import CONTAINERS, with_parts
from fabricamp.errors import ConfigError
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.torch_private import AnyBatchNorm, AnyLoss

if TYPE_CHECKING:
    from collections.abc import Collection

    from fabricamp.precision.master_weights import MasterWeights


Value = TypeVar("Value")

_TENSORS: Final = {Tensor}

CONVERTIBLE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that an opt level converts; fp64 weights stay fp64 at every level."""


def cast_floating(value: Value, dtype: torch.dtype) -> Value:
    """Returns ``value`` with every floating tensor in it cast to ``dtype``.

    Handles dicts, lists, tuples, named tuples and dataclasses, and keeps their types; calls ``to(dtype)`` of other objects with a
    ``to`` method.  Integers, strings, NumPy arrays, modules and all other values are returned unchanged; a container without
    changes is returned itself.
    """
    kind: Any = type(value)
    cast: Any = value
    if kind is Tensor:  # the usual types, with a few calls less
        cast = cast.to(dtype) if cast.is_floating_point() else cast
    elif kind is tuple and _TENSORS.issuperset(map(type, cast)):
        items = tuple([item.to(dtype) if item.is_floating_point() else item for item in cast])
        cast = cast if all(map(operator.is_, items, cast)) else items
    else:
        cast = cast_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, dtype)
    result: Value = cast
    return result


def cast_tensors(value: Any, cast: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> Any:
    """Returns ``value`` with ``cast`` applied to every tensor in it; calls ``to(dtype)`` of other objects unless dtype is None."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, CONTAINERS) or dataclasses.is_dataclass(value):
        return with_parts(value, functools.partial(cast_tensors, cast=cast, dtype=dtype))
    if dtype is not None and not isinstance(value, (nn.Module, type)) and callable(getattr(value, "to", None)):
        try:
            return value.to(dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{type(value).__name__}.to({dtype}) failed ({error}); let its `to` take a dtype and cast floating tensors "
                "with it, or pass its tensors in a dict, tuple or dataclass"
            ) from error
    return value


def check_full_weights(module: nn.Module, name: str) -> None:
    """Raises :class:`ConfigError` if parameters of ``module`` are half already; opt level ``name`` needs fp32 weights."""
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype in HALF_DTYPES:
            raise ConfigError(
                f"parameter {parameter_name} is {parameter.dtype} already, but precision {name!r} keeps fp32 weights; "
                "give the module in fp32 (module.float()), or use 'O2' / 'O3' ('O5' for bfloat16)"
            )


def check_autocast(module: nn.Module, dtype: torch.dtype, name: str, device_type: str) -> None:
    """Raises :class:`ConfigError` if ``module`` cannot be trained under autocast to ``dtype`` (opt level ``name``)."""
    # torch's autocast runs an LSTM on CPUs by oneDNN, which cannot train an LSTM in fp16.
    lstm = next((path for path, submodule in module.named_modules() if isinstance(submodule, nn.LSTM)), None)
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
    for submodule in chosen:
        if isinstance(submodule, nn.RNNBase) and not any_shard(own_tensors(submodule)):
            submodule.flatten_parameters()
    return {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}


def tensors_to_convert(module: nn.Module, chosen: Collection[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers of the ``chosen`` modules, without those shared with another module."""
    chosen_ids = set(map(id, chosen))
    others = [submodule for submodule in module.modules() if id(submodule) not in chosen_ids]
    of_others = {id(tensor) for submodule in others for tensor in own_tensors(submodule)}
    unique = {id(tensor): tensor for submodule in chosen for tensor in own_tensors(submodule)}
    return [tensor for key, tensor in unique.items() if tensor.dtype in CONVERTIBLE and key not in of_others]


def modules_to_convert(root: nn.Module, *, keep_batchnorm_fp32: bool, whole_step: bool = False) -> list[nn.Module]:
    """Returns :func:`convertible_modules` as a list; raises :class:`ConfigError` if one of them cannot be converted."""
    chosen = list(convertible_modules(root, keep_batchnorm_fp32=keep_batchnorm_fp32, whole_step=whole_step))
    for module in chosen:
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{type(module).__name__} is a TorchScript module, which takes no hooks and keeps its dtypes; "
                "use precision 'O1' or 'O4'"
            )
        if any(is_lazy(tensor) for tensor in own_tensors(module)):
            raise ConfigError(
                f"{type(module).__name__} has parameters without a shape, which cannot be converted; run one batch through "
                "the module in configure_model(), or give the layers their sizes"
            )
    return chosen


def convertible_modules(
    module: nn.Module, *, keep_batchnorm_fp32: bool, whole_step: bool = False, owned: bool = True
) -> Iterator[nn.Module]:
    """Yields the modules that an opt level converts; with ``whole_step`` these are all except metrics and their submodules.

    Without ``whole_step`` it also leaves out losses, and modules without parameters that the user's step calls directly (children
    of a module with a ``training_step``), because these get fp32 outputs.  Modules without parameters inside a converted module
    are converted with it, because their inputs there are half.
    """
    stays = isinstance(module, AnyLoss) and not whole_step
    if stays or _is_metric(module) or (keep_batchnorm_fp32 and isinstance(module, AnyBatchNorm)):
        return
    owned = owned or whole_step or next(module.parameters(), None) is not None
    if owned:
        yield module
    calls_children_itself = hasattr(module, "training_step")
    for child in module.children():
        yield from convertible_modules(
            child,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            whole_step=whole_step,
            owned=owned and not calls_children_itself,
        )


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers of ``module`` itself, not its children's."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def bounded(module: nn.Module, converted: set[int], *, keep_batchnorm_fp32: bool) -> list[nn.Module]:
    """Returns the modules that get a boundary: they or their submodules own a converted parameter (given by id)."""
    return [
        one for one in modules_to_convert(module, keep_batchnorm_fp32=keep_batchnorm_fp32) if owns_any(one, converted)
    ]


def owns_any(module: nn.Module, converted: set[int]) -> bool:
    """Returns whether a parameter of ``module`` or below is among the converted ones (given by id)."""
    return any(id(parameter) in converted for parameter in module.parameters())
