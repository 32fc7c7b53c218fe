"""apex's old entry point ``amp.init``, and casts that scripts register for functions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from fabricamp.apex.amp import lists, wrap
from fabricamp.apex.amp._amp_state import _amp_state
from fabricamp.apex.amp.wrap import BannedError
from fabricamp.errors import ConfigError, nearest
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.precision import autocast
from fabricamp.precision.autocast import float_function as float_function
from fabricamp.precision.autocast import half_function as half_function
from fabricamp.precision.autocast import promote_function as promote_function
from fabricamp.precision.opt_levels import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.apex.amp.handle import AmpHandle


class _Registered(NamedTuple):
    module: Any
    name: str
    register: Callable[[Any, str], None]


_registry: list[_Registered] = []


def register_half_function(module: Any, name: str) -> None:
    """Makes ``module.name`` cast its arguments to half, from the next ``initialize`` or ``init`` that turns casts on."""
    _register(module, name, autocast.register_half_function)


def register_float_function(module: Any, name: str) -> None:
    """Makes ``module.name`` cast its arguments to fp32, from the next ``initialize`` or ``init`` that turns casts on."""
    _register(module, name, autocast.register_float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Makes ``module.name`` cast to the widest dtype of its arguments, from the next ``initialize`` or ``init`` with casts on."""
    _register(module, name, autocast.register_promote_function)


def _register(module: Any, name: str, register: Callable[[Any, str], None]) -> None:
    if not hasattr(module, name):
        where = getattr(module, "__name__", type(module).__name__)
        raise ConfigError(f"No function named {name} in module {where}{nearest(name, dir(module))}")
    _registry.append(_Registered(module, name, register))


def apply_lists(handle: AmpHandle, device_type: str, *, allow_banned: bool) -> None:
    """Replaces the functions that torch.autocast does not cast, and those registered since the last call.

    ``handle`` records the original functions.
    """
    handle._save_func(functional, "binary_cross_entropy", functional.binary_cross_entropy)
    functional.binary_cross_entropy = _binary_cross_entropy(functional.binary_cross_entropy, allow_banned=allow_banned)
    rules: dict[str, Callable[[Any, str], None]] = {
        "half": autocast.register_half_function,
        "float": autocast.register_float_function,
        "promote": autocast.register_promote_function,
        "none": functools.partial(_leave, handle),
    }
    found = [*lists.beside_autocast(device_type), *lists.changed()]
    listed = [_Registered(module, name, rules[rule]) for module, name, rule in found if hasattr(module, name)]
    for module, name, register in [*listed, *_registry]:
        handle._save_func(module, name, getattr(module, name))
        register(module, name)
    _registry.clear()
    for module, name, rule in lists.in_place():
        refuses = wrap.err_if_any_half if module is torch else wrap.err_if_arg0_half
        (refuses if rule == "float" else wrap.promote_match_arg0)(module, name, handle)


def _leave(handle: AmpHandle, module: Any, name: str) -> None:
    """Makes ``module.name`` run without casts."""
    function = getattr(module, name)

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with handle._disable_casts():
            return function(*args, **options)

    setattr(module, name, run)


def _binary_cross_entropy(original: Callable[..., Any], *, allow_banned: bool) -> Callable[..., Any]:
    """Returns a ``binary_cross_entropy`` that raises for half values only, as only these are dangerous; otherwise runs in fp32.

    torch's function raises for any values under autocast.
    """
    in_fp32 = float_function(original)

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        tensors = [one for one in (*args, *options.values()) if isinstance(one, torch.Tensor)]
        half = any(one.dtype in HALF_DTYPES for one in tensors)
        if half and not allow_banned and any(torch.is_autocast_enabled(one.device.type) for one in tensors):
            raise BannedError(
                "amp does not work out-of-the-box with binary_cross_entropy on half values, whose logarithm overflows. Use "
                "BCEWithLogitsLoss without the sigmoid before it; or give it fp32 values, with "
                "`amp.register_float_function(torch, 'sigmoid')` before amp.initialize; or allow_banned=True there"
            )
        return in_fp32(*args, **options)

    return run


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Turns O1's casts on for this thread, and nothing else; returns their handle; its ``_deactivate()`` turns them off."""
    from fabricamp.apex.amp._initialize import stop_casts
    from fabricamp.apex.amp.handle import AmpHandle, NoOpHandle

    stop_casts()
    if not enabled:
        handle: AmpHandle = NoOpHandle()
        _amp_state.handle = handle
        return handle
    dtype = LEVELS["O1"].autocast
    assert dtype is not None
    handle = AmpHandle(loss_scale, enable_caching, verbose)
    handle.start("cuda" if torch.cuda.is_available() else "cpu", dtype, allow_banned=allow_banned)
    _amp_state.handle = handle
    return handle
