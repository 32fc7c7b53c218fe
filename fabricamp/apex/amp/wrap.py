"""Replaces functions by ones that cast their arguments while O1 is on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fabricamp.apex.amp.compat import is_floating_point
from fabricamp.errors import ConfigError
from fabricamp.precision.autocast import float_function, half_function, promote_function


class BannedError(ConfigError, NotImplementedError):
    """A function was called that is not safe on half values."""


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False
) -> Callable[..., Any]:
    """Returns a wrapper of ``orig_fn`` that applies ``cast_fn`` to its arguments while ``handle`` is active."""
    from fabricamp.apex.amp.utils import casted_args

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def cached_cast(
    mod: Any, fn: str, cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Makes ``mod.fn`` cast its arguments by ``cast_fn``, ``utils.maybe_half`` or ``utils.maybe_float``, until ``handle`` ends."""
    rule = float_function if getattr(cast_fn, "__name__", "") == "maybe_float" else half_function
    _replace(mod, fn, rule, handle)


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes ``mod.fn`` cast its arguments to their widest dtype until ``handle`` ends."""
    _replace(mod, fn, promote_function, handle)


def err_if_any_half(mod: Any, fn: str, handle: Any, custom_err_msg: str | None = None) -> None:
    """Makes the in-place function ``mod.fn`` raise BannedError for half tensors until ``handle`` ends.

    ``custom_err_msg`` replaces the error message.
    """
    message = custom_err_msg or (
        f"Cannot call in-place function {fn} with fp16 arguments, because it would round the result to fp16; call {fn[:-1]}, "
        "which returns fp32"
    )

    def check(args: Any) -> Any:
        if any(_is_cast_to_half(one) for one in args):
            raise BannedError(message)
        return args

    _replace_in_place(mod, fn, check, handle)


def err_if_arg0_half(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes the in-place method ``mod.fn`` raise BannedError for a half first argument until ``handle`` ends."""
    message = (
        f"Cannot call in-place method {fn} on fp16 Tensors, because it would round the result to fp16; call {fn[:-1]}, which "
        "returns fp32, or convert the tensor to fp32 before"
    )

    def check(args: Any) -> Any:
        if _is_cast_to_half(args[0]):
            raise BannedError(message)
        return args

    _replace_in_place(mod, fn, check, handle)


def promote_match_arg0(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes the in-place method ``mod.fn`` cast its other arguments to the dtype of the first until ``handle`` ends."""

    def match(args: Any) -> Any:
        first, *others = args
        if not torch.is_autocast_enabled(first.device.type) or not first.is_floating_point():
            return args
        return [first, *(one.to(first.dtype) if is_floating_point(one) else one for one in others)]

    _replace_in_place(mod, fn, match, handle)


def _is_cast_to_half(value: Any) -> bool:
    """Returns whether autocast is on and ``value`` is a tensor of autocast's dtype."""
    if not isinstance(value, torch.Tensor):
        return False
    kind = value.device.type
    return torch.is_autocast_enabled(kind) and value.dtype is torch.get_autocast_dtype(kind)


def _replace_in_place(mod: Any, fn: str, prepare: Callable[[Any], Any], handle: Any) -> None:
    original = getattr(mod, fn, None)
    if original is None:
        return

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        return original(*prepare(args), **options)

    handle._save_func(mod, fn, original)
    setattr(mod, fn, run)


def _replace(mod: Any, fn: str, rule: Callable[..., Any], handle: Any) -> None:
    original = getattr(mod, fn, None)
    if original is None:
        return
    handle._save_func(mod, fn, original)
    setattr(mod, fn, rule(original))
