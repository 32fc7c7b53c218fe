"""SyncBatchNorm as custom operators: torch.compile does not look into them, so they run the same code as in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fabricamp.ops.batch_norm.exchange import exchange_of
from fabricamp.ops.batch_norm.plans import Plan, Running, plan_of
from fabricamp.ops.batch_norm.reference import update_running
from fabricamp.ops.context import Context

_KIND: Final = "bool relu, bool channel_last, SymInt exchange"


def compiled_batch_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    momentum: float,
    eps: float,
    relu: bool,
    channel_last: bool,
    exchange: int,
) -> Tensor:
    """Returns the output of one layer; ``exchange`` is the key of its exchange.

    Running values are updated by torch's operations, because an operator with a gradient must not write its inputs.
    """
    y: Tensor
    y, saved = _forward(x, z, weight, bias, eps, relu, channel_last, exchange)
    if running is not None:
        with torch.no_grad():
            update_running(saved.detach(), running, momentum)
    return y


def _plan(operands: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], kind: tuple[Any, ...]) -> Plan:
    relu, channel_last, exchange = kind
    return plan_of(exchange_of(exchange), *operands, None, relu=relu, channel_last=channel_last)


@torch.library.custom_op(
    "fabricamp::sync_batch_norm",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? z, Tensor? weight, Tensor? bias, float eps, {_KIND}) -> (Tensor, Tensor)",
)
def _forward(
    x: Tensor, z: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *kind: Any
) -> tuple[Tensor, Tensor]:
    plan = _plan((x, z, weight, bias), kind)
    dense = plan.dense(x)
    y, saved = plan.forward(dense, None if z is None else plan.alike(z, dense), weight, bias, None, 0.0, eps)
    return _strided_as(y, x), saved


@_forward.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, channel_last, _ = rest[-3:]
    channels = x.shape[-1 if channel_last else 1]
    return torch.empty_like(x), x.new_empty(3 * channels + 1, dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op(
    "fabricamp::sync_batch_norm_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor? z, Tensor? weight, Tensor? bias, Tensor saved, bool[] needs, {_KIND}) -> Tensor[]",
)
def _backward(
    dy: Tensor,
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    saved: Tensor,
    needs: Sequence[bool],
    *kind: Any,
) -> list[Tensor]:
    plan = _plan((x, z, weight, bias), kind)
    dense = plan.dense(x)
    residual = None if z is None else plan.alike(z, dense)
    wanted = (needs[0], needs[1], needs[2], needs[3])
    gradients = plan.backward(dy, dense, residual, weight, bias, saved, wanted)
    results = []
    for gradient, like in zip(gradients, (x, x, weight, bias), strict=True):
        if gradient is None:
            continue
        own = gradient.clone() if gradient is dy else gradient  # an operator must not return one of its inputs
        results.append(_strided_as(own, x if like is None else like))
    return results


@_backward.register_fake
def _(_dy: Tensor, *rest: Any) -> list[Tensor]:
    x, _, weight, bias, _, needs = rest[:6]
    likes = (x, x, weight, bias)
    return [torch.empty_like(like) for like, need in zip(likes, needs, strict=True) if need]


def _strided_as(result: Tensor, like: Tensor) -> Tensor:
    """Returns ``result`` with the strides that the fake operator declares: those of ``torch.empty_like(like)``."""
    declared = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == declared else torch.empty_like(like).copy_(result)


class _Context(Context, Protocol):
    kind: tuple[bool, bool, int]
    """ReLU, whether channels are last, and the number of the exchange."""

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]: ...


def _keep(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, z, weight, bias, _, relu, channel_last, exchange = inputs
    ctx.save_for_backward(x, z if relu else None, weight, bias, output[1])
    ctx.kind = relu, channel_last, exchange


def _differentiate(ctx: _Context, dy: Tensor, _saved: Tensor | None) -> tuple[Tensor | None, ...]:
    x, z, weight, bias, saved = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    gradients = iter(_backward(dy, x, z, weight, bias, saved, needs, *ctx.kind))
    return (*[next(gradients) if need else None for need in needs], None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)
