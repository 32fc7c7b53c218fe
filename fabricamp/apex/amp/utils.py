"""Casts of single values that apex offers scripts."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp.apex.amp._amp_state import _amp_state
from fabricamp.precision.casting import cast_tensors

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


def is_nested(x: Any) -> bool:
    """Returns whether ``x`` is a list or tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Returns whether ``x`` is a floating tensor, or a list or tuple of floating tensors only."""
    if is_nested(x):
        return all(is_fp_tensor(one) for one in x)
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def type_string(x: torch.Tensor) -> str:
    """Returns the name of the tensor's type, such as ``HalfTensor``."""
    return x.type().rpartition(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Returns ``x`` with its tensors, nested ones too, in fp16; fp64 stays."""
    return _cast(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Returns ``x`` with its half tensors, nested ones too, in fp32; fp64 stays."""
    return _cast(x, torch.float32)


def cast_to_model_type(x: Any) -> Any:
    """Returns ``x`` with its floating tensors, nested ones too, in the dtype that ``initialize`` gave the model; fp64 stays.

    Use it for tensors that a half model's forward creates, and for weights of a loss.  Returns ``x`` itself at O1 and without amp.
    """
    properties = _amp_state.__dict__.get("opt_properties")
    dtype = None if properties is None else properties.cast_model_type
    return _cast(x, dtype) if dtype else x


def casted_args(cast_fn: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns ``args`` with ``cast_fn`` applied to floating tensors; does the same to ``kwargs`` in place."""
    for key, value in kwargs.items():
        if is_fp_tensor(value):
            kwargs[key] = cast_fn(value)
    return [cast_fn(one) if is_fp_tensor(one) else one for one in args]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return cast_tensors(x, lambda tensor: tensor.to(dtype) if tensor.dtype in _CASTABLE else tensor, None)
