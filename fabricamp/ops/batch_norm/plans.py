"""Plans of a SyncBatchNorm layer for inputs of one kind: kernels or torch's operations, chosen once and cached."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.batch_norm.exchange import BatchNormExchange
from fabricamp.ops.batch_norm.kernels import KernelMemory, KernelPlan, serves
from fabricamp.ops.batch_norm.reference import ReferencePlan

Plan = KernelPlan | ReferencePlan
Running = tuple[Tensor, Tensor, Tensor | None]
"""Running mean, running variance, number of batches."""

_MOST_PLANS: Final = 64


def plan_of(
    exchange: BatchNormExchange,
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    *,
    relu: bool,
    channel_last: bool,
) -> Plan:
    """Returns the layer's plan for inputs of this kind: a cached one, or a new one."""
    route = exchange.route(x.device)
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        None if z is None else (z.shape, z.dtype, z.get_device()),
        None if weight is None else (weight.dtype, weight.get_device()),
        None if bias is None else bias.dtype,
        None if running is None else (running[0].dtype, running[0].get_device()),
        relu,
        channel_last,
    )
    plan: Plan | None = exchange.plans.get(key)
    if plan is not None and plan.route is route:
        return plan
    _check(exchange, x, z, channel_last=channel_last)
    tensors = [tensor for tensor in (weight, bias, *(running or ())) if tensor is not None]
    _check_device(x, tensors)
    # The number of batches, an integer, is not among the values that have one dtype.
    floating = tensors if running is None or running[2] is None else tensors[:-1]
    if serves(x, *floating):
        memory = exchange.memories.get(route)
        if memory is None:
            memory = KernelMemory(exchange.channels, route, x.device)
            exchange.memories[route] = memory
        parameter = floating[0].dtype if floating else torch.float32
        plan = KernelPlan(memory, route, x, parameter, relu=relu, residual=z is not None, channel_last=channel_last)
    else:
        plan = ReferencePlan(route, x, relu=relu, channel_last=channel_last)
    if len(exchange.plans) >= _MOST_PLANS:  # inputs of always new sizes must not fill the memory
        exchange.plans.clear()
    exchange.plans[key] = plan
    return plan


def reference_of(
    exchange: BatchNormExchange, x: Tensor, z: Tensor | None, *_: object, relu: bool, channel_last: bool
) -> ReferencePlan:
    """Returns a plan in torch's own operations, for tensors on any device."""
    _check(exchange, x, z, channel_last=channel_last)
    return ReferencePlan(exchange.route(x.device), x, relu=relu, channel_last=channel_last)


def _check_device(x: Tensor, tensors: list[Tensor]) -> None:
    """Raises ConfigError for tensors on another device: kernels take plain addresses, so a wrong one would crash the process."""
    elsewhere = next((tensor for tensor in tensors if tensor.device != x.device), None)
    if elsewhere is not None:
        raise ConfigError(
            f"the input of a SyncBatchNorm is on {x.device} and its parameters or running values on {elsewhere.device}; move the "
            f"module with .to({str(x.device)!r})"
        )


def _check(exchange: BatchNormExchange, x: Tensor, z: Tensor | None, *, channel_last: bool) -> None:
    if x.dim() < 2:
        raise ConfigError(
            f"SyncBatchNorm takes (N, C) or (N, C, ...), not an input of {x.dim()} dimensions {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ConfigError(f"SyncBatchNorm takes floating-point inputs, not {x.dtype}")
    channels = x.shape[-1 if channel_last else 1]
    if channels != exchange.channels:
        where = "last" if channel_last else "second"
        raise ConfigError(
            f"SyncBatchNorm has {exchange.channels} channels, but the input {tuple(x.shape)} has {channels} in its {where} "
            "dimension; give num_features that number, or change channel_last (True: channels are the last dimension)"
        )
    if z is not None and (z.shape, z.dtype, z.device) != (x.shape, x.dtype, x.device):
        raise ConfigError(
            f"the residual z of a SyncBatchNorm is {z.dtype} {tuple(z.shape)} on {z.device}; it has to be as the input: {x.dtype} "
            f"{tuple(x.shape)} on {x.device}"
        )
    if exchange.route(x.device).ranks == 1 and x.numel() // channels == 1:
        raise ConfigError(
            f"one value per channel has no variance: an input {tuple(x.shape)} on one rank; give a larger batch, or call eval()"
        )
