"""Gradient clipping by norm as a function, for hand-written loops; the Trainer clips in ``precision/optimizer_step.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fabricamp.errors import NonFiniteError
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.shards import any_shard, local, norm_of
from fabricamp.ops.statistics import l2norm
from fabricamp.ops.tensors import scale

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_EPSILON = 1e-6  # the same as in torch's function


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Returns the norm of all gradients together, and scales the gradients in place if the norm exceeds ``max_norm``.

    Does the same as torch's function of this name.  On a GPU the 2-norm takes one pass over memory (in fp32, also for half
    gradients), and the scaling another.  The host waits only with ``error_if_nonfinite``, which raises before any gradient is
    changed: :class:`NonFiniteError`, or torch's own ``RuntimeError`` if torch's function runs.  The norm of sharded
    gradients (DTensors) is a DTensor, with ``norm_type=inf`` a plain tensor, nan where any rank has nan.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_(weight, 1.0)
    tensor(5.)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    order = float(norm_type)
    if math.isinf(order) and any_shard(gradients):
        norm = _norm_of_shards(gradients, order)
    elif order == 2.0 and _ours(gradients):
        norm, _ = l2norm(gradients)
    else:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)
    if error_if_nonfinite and not torch.isfinite(norm).item():
        raise NonFiniteError(
            f"the norm of {len(gradients)} gradients is {norm.item():g}, so they cannot be clipped; give "
            "error_if_nonfinite=False to scale them all the same"
        )
    parts = [local(gradient) for gradient in gradients]
    factor = (max_norm / (norm + _EPSILON)).clamp_(max=1.0)
    scale(parts, parts, factor.to(parts[0].device))  # in host memory if the shards are offloaded to it
    return norm


def _norm_of_shards(gradients: list[Tensor], order: float) -> Tensor:
    """Returns the norm of all gradients together, of which some are sharded; keeps nan, which torch's function may lose."""
    norms = [norm_of(gradient.detach(), order) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
    return total


def _ours(gradients: list[Tensor]) -> bool:
    """Whether the kernels can read all gradients: on one device, fp32 or narrower, neither sparse nor of a subclass."""
    if not gradients or not runs_kernels(gradients[0].device):
        return False
    device = gradients[0].device
    return all(
        type(gradient) is Tensor
        and gradient.dtype in _NARROW
        and gradient.layout is torch.strided
        and gradient.device == device
        for gradient in gradients
    )
