"""Functions that cast what they are called with, while O1 is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.precision.autocast import float_function, half_function, promote_function

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cached_cast", "make_cast_wrapper", "promote"]


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False
) -> Callable[..., Any]:
    """Returns ``orig_fn`` with arguments that go through ``cast_fn`` while ``handle`` is active."""
    from fabricamp.apex.amp.utils import casted_args

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def cached_cast(
    mod: Any, fn: str, cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Makes ``mod.fn`` take half or fp32 tensors (``utils.maybe_half``, ``utils.maybe_float``) until ``handle`` ends."""
    rule = float_function if getattr(cast_fn, "__name__", "") == "maybe_float" else half_function
    _replace(mod, fn, rule, handle)


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes ``mod.fn`` take the widest dtype of its arguments until ``handle`` ends."""
    _replace(mod, fn, promote_function, handle)


def _replace(mod: Any, fn: str, rule: Callable[..., Any], handle: Any) -> None:
    original = getattr(mod, fn, None)
    if original is None:
        return
    handle._save_func(mod, fn, original)
    setattr(mod, fn, rule(original))
