"""LayerNorm and RMSNorm, forward and backward: kernels where they are faster, torch's own operations elsewhere.

Input, output, weight and bias may differ in dtype; the arithmetic is fp32, and fp64 is torch's.  Under autocast the output has its
dtype, and nothing is rounded before.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch
from fabricamp.ops.dispatch import chosen, torch_alone, worth_the_host
from fabricamp.ops.norm.autograd import contiguous, normalise, registered
from fabricamp.ops.norm.kernels import Kernels, kernels_of
from fabricamp.ops.norm.plans import Norm
from fabricamp.ops.norm.references import layer_norm_reference, rms_norm_reference, shape_of
from fabricamp.torch_private import dispatch_modes, exporting, left_by_functorch

_KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_EPS: Final = torch.finfo(torch.float32).eps
_PLAIN: Final = (Tensor, torch.nn.Parameter)
"""What has memory of its own; others stand for tensors that are elsewhere, or nowhere, and torch's operations know them."""


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
    """Returns ``x`` minus its mean over the last dimensions, over its deviation, times ``weight``, plus ``bias``.

    The output has ``dtype``, by default that of ``x``, under autocast always autocast's.  ``memory_efficient`` keeps the output for
    backward in place of the input: it saves memory where the output is kept anyway, and loses accuracy where ``weight`` is near 0.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), 2, eps=0.0)
    tensor([[-1.,  1.]])
    """
    shape = shape_of(normalized_shape)
    _check(x, shape, weight, bias)
    output = _output(x, dtype)
    made = _by_kernel("layer_norm", x, shape, weight, bias, output, memory_efficient, eps)
    if made is not None:
        return made
    with _without_autocast(x):
        if _alike(x, weight, bias, output):
            return F.layer_norm(x, shape, weight, bias, eps)
        return layer_norm_reference(x, shape, weight, bias, eps=eps, dtype=output)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns ``x`` over the root of its mean square over the last dimensions, times ``weight``.

    ``eps`` is by default the smallest step from 1 of the arithmetic's dtype, as torch's; the rest as in :func:`layer_norm`.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), 2, eps=0.0)
    tensor([[1., 1.]])
    """
    shape = shape_of(normalized_shape)
    _check(x, shape, weight, None)
    output = _output(x, dtype)
    least = _EPS if eps is None else eps
    made = _by_kernel("rms_norm", x, shape, weight, None, output, memory_efficient, least)
    if made is not None:
        return made
    with _without_autocast(x):
        # torch's own RMSNorm is one operation on a GPU, which not every transform knows.
        if _alike(x, weight, None, output) and not torch_alone():
            return F.rms_norm(x, shape, weight, eps)
        return rms_norm_reference(x, shape, weight, eps, dtype=output)


def _check(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    # Nested tensors of the older layout have no shape; torch checks them.
    if not shape or (not x.is_nested and x.shape[-len(shape) :] != shape):
        raise ConfigError(
            f"normalized_shape={shape} are not the last dimensions of an input of shape {tuple(x.shape)}; give those that "
            "one mean is taken over"
        )
    if not x.is_floating_point():
        raise ConfigError(f"a norm takes floating-point inputs, not {x.dtype}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is None:
            continue
        if one.shape != shape:
            raise ConfigError(f"{name} has shape {tuple(one.shape)}, and needs normalized_shape={shape}")
        if one.device != x.device:
            raise ConfigError(f"the input is on {x.device} and {name} on {one.device}: move one of them")


def _output(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_autocast_dtype(_kind(x)) if _is_autocast(x) else dtype or x.dtype


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast says what comes out: it leaves fp64 alone, and does not know tensors without data."""
    kind = _kind(x)
    return kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64


def _kind(x: Tensor) -> str:
    # torch makes a new text each time that it is asked for a device's type.
    return "cuda" if x.is_cuda else x.device.type


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    # The context manager costs more than a norm's launch: only where there is something to switch off.
    return torch.autocast(_kind(x), enabled=False) if _is_autocast(x) else contextlib.nullcontext()


def _alike(x: Tensor, weight: Tensor | None, bias: Tensor | None, output: torch.dtype) -> bool:
    """Whether all have one dtype, which torch's own functions want."""
    dtype = x.dtype
    return output == dtype and (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype)


def _by_kernel(
    op: str,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    output: torch.dtype,
    efficient: bool,
    eps: float,
) -> Tensor | None:
    """The result of the kernels; None where torch's operations are to make it, or what looks on knows these alone."""
    of_weight, of_bias = None if weight is None else weight.dtype, None if bias is None else bias.dtype
    kind = op, shape, x.dtype, output, of_weight, of_bias, efficient, x.device
    compiling = torch.compiler.is_compiling()
    if torch_alone() or not (_is_traceable() if compiling else _are_plain(x, weight, bias)) or x.numel() == 0:
        return None
    eps = float(eps)
    if compiling or dispatch_modes():  # these have to see a registered operation
        norm = _norm(*kind)
        return registered(x, weight, bias, norm, eps) if norm and _is_worth_the_host(x, norm) else None
    kernels = _kernels(dispatch.settings, *kind)
    if kernels is None or not _is_worth_the_host(x, kernels.norm):
        return None
    x, weight, bias = contiguous(x, weight, bias)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        made: Tensor = normalise(x, weight, bias, kernels, eps)
        return made
    return kernels.forward(x, weight, bias, eps)[0]


def _is_worth_the_host(x: Tensor, norm: Norm) -> bool:
    # Torch's one operation, the host's least work, wants one dtype, and keeps the input where memory is asked for.
    alike = norm.input == norm.output and norm.parameter in {None, norm.input}
    return norm.efficient or not alike or worth_the_host(x.numel() * x.itemsize)


def _is_traceable() -> bool:
    # What is exported has to load where there is no fabricamp.
    return not exporting()


def _are_plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether all are tensors with memory of their own."""
    for one in (x, weight, bias):
        if one is not None and (type(one) not in _PLAIN or left_by_functorch(one)):
            return False
    return not x.is_nested


def _norm(
    op: str,
    shape: tuple[int, ...],
    given: torch.dtype,
    output: torch.dtype,
    of_weight: torch.dtype | None,
    of_bias: torch.dtype | None,
    efficient: bool,
    device: torch.device,
) -> Norm | None:
    """What the kernels are laid out for; None where a table says torch, or they do not serve these dtypes."""
    dtypes = [given, output, *[one for one in (of_weight, of_bias) if one is not None]]
    width = math.prod(shape)
    if not chosen(op, given if all(one == given for one in dtypes) else None, width, device):
        return None
    has_weight, has_bias = of_weight is not None, of_bias is not None
    if any(one not in _KERNEL_DTYPES for one in dtypes) or (has_weight and has_bias and of_weight != of_bias):
        return None
    return Norm(width, op == "layer_norm", given, output, of_weight or of_bias, has_weight, has_bias, efficient, device)


@functools.lru_cache(maxsize=1024)
def _kernels(_settings: object, *kind: Any) -> Kernels | None:
    """The kernels that run, under these settings of dispatch: asked for by every call."""
    norm = _norm(*kind)
    return None if norm is None else kernels_of(norm)
