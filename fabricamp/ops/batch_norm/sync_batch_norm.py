"""Batch normalisation over the values of several ranks, with an optional residual and ReLU in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.batch_norm.compiled import compiled_batch_norm
from fabricamp.ops.batch_norm.exchange import BatchNormExchange
from fabricamp.ops.batch_norm.plans import Plan, Running, plan_of, reference_of
from fabricamp.ops.context import Context

_TWICE: Final = (
    "SyncBatchNorm has no second derivative: its backward ran with create_graph=True, and the requested gradient passes through "
    "it; use torch.nn.BatchNorm where gradients of gradients are needed (a gradient penalty), or detach before it"
)


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running: Running | None = None,
    *,
    z: Tensor | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    relu: bool = False,
    channel_last: bool = False,
    exchange: BatchNormExchange | None = None,
) -> Tensor:
    """Returns ``x`` normalised by mean and variance over all ranks of ``exchange``, times ``weight`` plus ``bias``, plus ``z``.

    ``x`` is (N, C) or (N, C, ...), with ``channel_last`` (..., C).  ``z`` has the shape and dtype of ``x``.  ``relu`` applies a
    ReLU at the end.  Ranks may have different numbers of values, or none.  ``running`` (mean, variance, number of batches) is
    updated in place; ``momentum=None`` makes it the average over all batches.  Arithmetic is at least fp32.

    >>> sync_batch_norm(torch.tensor([[1.0], [3.0]]))
    tensor([[-1.0000],
            [ 1.0000]])
    """
    if exchange is None:
        exchange = BatchNormExchange(x.shape[-1 if channel_last else 1])
    factor = _factor(momentum, running)
    if torch.compiler.is_compiling():
        return compiled_batch_norm(x, z, weight, bias, running, factor, eps, relu, channel_last, exchange.key)
    call = _Call(running, factor, eps, relu, channel_last, exchange, plan_of)
    return _SyncBatchNorm.apply(x, z, weight, bias, call)  # type: ignore[no-any-return,no-untyped-call]


def sync_batch_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running: Running | None = None,
    *,
    z: Tensor | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    relu: bool = False,
    channel_last: bool = False,
    exchange: BatchNormExchange | None = None,
) -> Tensor:
    """Computes :func:`sync_batch_norm` in torch's own operations."""
    if exchange is None:
        exchange = BatchNormExchange(x.shape[-1 if channel_last else 1])
    factor = _factor(momentum, running)
    call = _Call(running, factor, eps, relu, channel_last, exchange, reference_of)
    return _SyncBatchNorm.apply(x, z, weight, bias, call)  # type: ignore[no-any-return,no-untyped-call]


def _factor(momentum: float | None, running: Running | None) -> float:
    """Returns the momentum for a plan: -1.0 for None, the average over all batches."""
    if momentum is not None:
        return momentum
    if running is not None and running[2] is None:
        raise ConfigError("momentum=None averages over all batches and needs their number; give it as running[2]")
    return -1.0


class _Call(NamedTuple):
    """The arguments without a gradient, in one object: each separate argument of a Function costs time in every call."""

    running: Running | None
    momentum: float
    eps: float
    relu: bool
    channel_last: bool
    exchange: BatchNormExchange
    plan_of: Callable[..., Plan]


class _Context(Context, Protocol):
    """The input, the residual, weight, bias and statistics; the residual and the bias only if ReLU needs them."""

    plan: Plan
    bias: Tensor | None

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]: ...

    @property
    def needs_input_grad(self) -> tuple[bool, bool, bool, bool, bool]: ...


class _SyncBatchNorm(torch.autograd.Function):
    """The autograd function of eager mode, with as little host work per batch as possible."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        running, momentum, eps, relu, channel_last, exchange, plan_of = call
        ctx.plan = plan = plan_of(exchange, x, z, weight, bias, running, relu=relu, channel_last=channel_last)
        x = plan.dense(x)
        if z is not None:
            z = plan.alike(z, x)
        y, saved = plan.forward(x, z, weight, bias, running, momentum, eps)
        ctx.save_for_backward(x, z if relu else None, weight, bias if relu else None, saved)
        ctx.bias = bias
        return y

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, bias, saved = ctx.saved_tensors
        bias = ctx.bias if bias is None else bias
        if not torch.is_grad_enabled():
            return (*ctx.plan.backward(dy, x, z, weight, bias, saved, ctx.needs_input_grad[:4]), None)
        with torch.no_grad():
            gradients = ctx.plan.backward(dy, x, z, weight, bias, saved, ctx.needs_input_grad[:4])
        once = [None if gradient is None else _Once.apply(gradient, dy, x, weight) for gradient in gradients]  # type: ignore[no-untyped-call]
        return (*once, None)


class _Once(torch.autograd.Function):
    """Connects a gradient to the tensors it was computed from, so that a second derivative raises NotImplementedError."""

    @staticmethod
    def forward(_ctx: object, gradient: Tensor, *_sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(_ctx: object, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_TWICE)
