"""LayerNorm and RMSNorm, forward and backward: kernels where they are faster, torch's own operations elsewhere.

Input, output, weight and bias may differ in dtype.  The arithmetic is fp32; for fp64 torch's operations run.  Under autocast the
output has autocast's dtype, and nothing is rounded before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch
from fabricamp.ops.dispatch import chosen, torch_alone, worth_the_host
from fabricamp.ops.norm.autograd import by_kernels, layer_norm_reference, registered, rms_norm_reference, shape_of
from fabricamp.ops.norm.kernels import NormFunction, functions, kernels_of
from fabricamp.ops.norm.plans import Norm
from fabricamp.torch_private import any_autocast, dispatch_modes, exporting, left_by_functorch, observed

_KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_EPS: Final = torch.finfo(torch.float32).eps
_MOST_FUNCTIONS: Final = 4096
_CONSTANTS: Final = frozenset({int, tuple, torch.Size})
"""Types of a normalized_shape that can be part of a cache key."""

_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""Types with memory of their own; tensors of other types have their memory elsewhere or none, and are left to torch."""


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns ``x`` minus its mean over the last dimensions, divided by its deviation, times ``weight``, plus ``bias``.

    The output has ``dtype`` (default: that of ``x``); under autocast always autocast's dtype.  ``memory_efficient`` saves the
    output for backward instead of the input.  This saves memory if the output is kept anyway, and loses accuracy where ``weight``
    is near 0.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), 2, eps=0.0)
    tensor([[-1.,  1.]])
    """
    return _normalised(True, x, normalized_shape, weight, bias, eps, dtype, memory_efficient)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns ``x`` divided by the root of its mean square over the last dimensions, times ``weight``.

    The default ``eps`` is the machine epsilon of the arithmetic's dtype, as in torch; the rest is as in :func:`layer_norm`.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), 2, eps=0.0)
    tensor([[1., 1.]])
    """
    return _normalised(False, x, normalized_shape, weight, None, eps, dtype, memory_efficient)


_Options = tuple[bool, "int | Sequence[int]", "float | None", "torch.dtype | None", bool]
"""The options of a call: whether the mean is subtracted, normalized_shape, eps, dtype, memory_efficient."""


def _normalised(
    center: bool,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    dtype: torch.dtype | None,
    efficient: bool,
) -> Tensor:
    """Returns the result of either norm; a repeated eager call uses the cached function (see ``functions``)."""
    shape = normalized_shape if type(normalized_shape) in _CONSTANTS else shape_of(normalized_shape)
    if type(eps) is not float and (center or eps is not None):
        eps = float(eps)  # type: ignore[arg-type]
    options = center, shape, eps, dtype, efficient
    key = None
    if not torch.compiler.is_compiling() and _are_plain(x, weight, bias) and not observed():
        key = (
            options, x.shape, x.dtype, x.device, dispatch.settings, _autocast(x) if any_autocast() else None,
            None if weight is None else (weight.shape, weight.dtype, weight.device),
            None if bias is None else (bias.shape, bias.dtype, bias.device),
        )  # fmt: skip
        known = functions.get(key)
        if known is not None:
            return known(x, weight, bias)
    function = _function(options, x, weight, bias)
    if key is not None:
        if len(functions) >= _MOST_FUNCTIONS:  # new shapes in every step must not fill the memory
            functions.clear()
        functions[key] = function
    return function(x, weight, bias)


def _function(options: _Options, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> NormFunction:
    """Returns the function that computes the result: by kernels, or by torch if it is chosen or an observer knows only torch."""
    center, normalized_shape, eps, dtype, efficient = options
    shape = shape_of(normalized_shape)
    _check(x, shape, weight, bias)
    autocast = _autocast(x)
    output = autocast or dtype or x.dtype
    norm = _norm(center, shape, x, weight, bias, output, efficient)
    if norm is None:
        one_dtype = all(operand is None or operand.dtype == output for operand in (x, weight, bias))
        return _by_torch(center, shape, eps, output, one_dtype=one_dtype, autocast=autocast is not None)
    least = _EPS if eps is None else eps
    if torch.compiler.is_compiling() or dispatch_modes():  # they need a registered operation
        return functools.partial(registered, norm=norm, eps=least)
    return by_kernels(kernels_of(norm, tuple(x.shape), shape, least))


def _by_torch(
    center: bool, shape: tuple[int, ...], eps: float | None, output: torch.dtype, *, one_dtype: bool, autocast: bool
) -> NormFunction:
    """Returns a function that uses torch's own norm, one operation, if all has ``one_dtype``, else several operations."""
    least = _EPS if eps is None else eps  # LayerNorm's is never None
    # torch's RMSNorm is one operation on a GPU, unknown to some transforms.
    one_operation = one_dtype and (center or not torch_alone())

    def at_once(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if center:
            return F.layer_norm(x, shape, weight, bias, least)
        return F.rms_norm(x, shape, weight, eps)

    def in_parts(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if center:
            return layer_norm_reference(x, shape, weight, bias, eps=least, dtype=output)
        return rms_norm_reference(x, shape, weight, eps, dtype=output)

    function = at_once if one_operation else in_parts

    def without_autocast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # Only used under autocast: the context manager costs more than a norm's launch.
        with torch.autocast(x.device.type, enabled=False):
            return function(x, weight, bias)

    return without_autocast if autocast else function


def _check(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    # Nested tensors of the older layout have no shape; torch checks those.
    if not shape or (not x.is_nested and x.shape[-len(shape) :] != shape):
        raise ConfigError(
            f"normalized_shape={shape} are not the last dimensions of an input of shape {tuple(x.shape)}; give those that "
            "one mean is taken over"
        )
    if not x.is_floating_point():
        raise ConfigError(f"a norm takes floating-point inputs, not {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.shape != shape:
            raise ConfigError(f"{name} has shape {tuple(parameter.shape)}, and needs normalized_shape={shape}")
        if parameter.device != x.device:
            raise ConfigError(f"the input is on {x.device} and {name} on {parameter.device}: move one of them")


def _autocast(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype for the output, or None: autocast is off, or does not apply (fp64, tensors without data)."""
    # x.is_cuda first, because torch builds a new string for each read of device.type.
    kind = "cuda" if x.is_cuda else x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _are_plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether all operands are tensors with memory of their own."""
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or type(bias) not in _PLAIN:
        return False
    return not (
        x.is_nested
        or left_by_functorch(x)
        or (weight is not None and left_by_functorch(weight))
        or (bias is not None and left_by_functorch(bias))
    )


def _norm(
    center: bool,
    shape: tuple[int, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output: torch.dtype,
    efficient: bool,
) -> Norm | None:
    """Returns the description of the norm for the kernels, or None if torch's operations run."""
    # An exported program must load without fabricamp installed.
    readable = not exporting() if torch.compiler.is_compiling() else _are_plain(x, weight, bias)
    if torch_alone() or not readable or x.numel() == 0:
        return None
    parameters = [parameter.dtype for parameter in (weight, bias) if parameter is not None]
    dtypes = [x.dtype, output, *parameters]
    one_dtype = all(dtype == x.dtype for dtype in dtypes)
    width = math.prod(shape)
    if not chosen("layer_norm" if center else "rms_norm", x.dtype if one_dtype else None, width, x.device):
        return None
    if any(dtype not in _KERNEL_DTYPES for dtype in dtypes) or len(set(parameters)) > 1:
        return None
    # Torch's single operation costs the host least, but needs one dtype, and cannot save the output instead of the input.
    if one_dtype and not efficient and not worth_the_host(x.numel()):
        return None
    parameter = parameters[0] if parameters else None
    return Norm(width, center, x.dtype, output, parameter, weight is not None, bias is not None, efficient, x.device)
