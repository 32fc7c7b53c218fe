"""The computation of ops/batch_norm/sync_batch_norm.cu in torch's own operations: on the CPU, without CuPy, and for float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.ops.batch_norm.exchange import Route, gather


class ReferencePlan:
    """Forward and backward of one layer; arithmetic is at least fp32."""

    def __init__(self, route: Route, x: Tensor, *, relu: bool, channel_last: bool) -> None:
        self.route = route
        self.relu = relu
        self.channel_last = channel_last
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        channel = x.dim() - 1 if channel_last else 1
        self.others = [dimension for dimension in range(x.dim()) if dimension != channel]
        self.shape = [-1 if dimension == channel else 1 for dimension in range(x.dim())]
        self.channels = x.shape[channel]
        self.count = x.numel() // self.channels

    def dense(self, x: Tensor) -> Tensor:
        """Returns ``x``: any layout is supported."""
        return x

    def alike(self, other: Tensor, x: Tensor) -> Tensor:
        """Returns ``other``: any layout is supported."""
        return other

    def forward(
        self,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor, Tensor | None] | None,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, and over all ranks each channel's mean, 1 / deviation and variance, then the count (1-dim)."""
        local = self._statistics(x)
        everyone = local.new_empty(self.route.ranks, local.numel())
        gather(self.route, local, everyone)
        saved = self._merge(everyone, eps)
        if running is not None:
            update_running(saved, running, momentum)
        y = self._normalised(x, saved, weight, bias)
        if z is not None:
            y = y + z
        if self.relu:
            y = y.relu()
        return y.to(x.dtype), saved

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        saved: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of x, z, weight and bias; None for those that are not needed."""
        if self.relu:
            output = self._normalised(x, saved, weight, bias)
            output = (output if z is None else output + z).to(x.dtype)
            dy = dy.masked_fill(output <= 0, 0)
        mean, inverse = saved[: self.channels], saved[self.channels : 2 * self.channels]
        gradient = dy.to(self.dtype)
        standard = (x.to(self.dtype) - mean.view(self.shape)) * inverse.view(self.shape)
        sums = torch.cat([gradient.sum(self.others), (gradient * standard).sum(self.others)])
        dbias, dweight = (half.clone() for half in sums.chunk(2))
        dx = None
        if needs[0]:
            if self.route.ranks > 1:
                dist.all_reduce(sums, group=self.route.group)
            means = sums / saved[-1].clamp(min=1.0)
            of_gradient, of_product = (half.view(self.shape) for half in means.chunk(2))
            slope = inverse if weight is None else inverse * weight.to(self.dtype)
            dx = ((gradient - of_gradient - standard * of_product) * slope.view(self.shape)).to(x.dtype)
        return (
            dx,
            dy if needs[1] else None,
            dweight.to(weight.dtype) if needs[2] and weight is not None else None,
            dbias.to(bias.dtype) if needs[3] and bias is not None else None,
        )

    def _statistics(self, x: Tensor) -> Tensor:
        """Returns this rank's mean and sum of squared deviations of every channel, then the count (1-dim)."""
        count = torch.full((1,), float(self.count), dtype=self.dtype, device=x.device)
        if self.count == 0:
            return torch.cat([count.new_zeros(2 * self.channels), count])
        variance, mean = torch.var_mean(x.to(self.dtype), self.others, correction=0)
        return torch.cat([mean, variance * self.count, count])

    def _merge(self, everyone: Tensor, eps: float) -> Tensor:
        """Returns mean, 1 / deviation, variance and count over all ranks, from one row per rank."""
        counts = everyone[:, -1:]
        means, squares = everyone[:, : self.channels], everyone[:, self.channels : -1]
        total = counts.sum(0)
        known = total.clamp(min=1.0)
        mean = (means * counts).sum(0) / known
        variance = (squares + counts * (means - mean).square()).sum(0) / known
        return torch.cat([mean, (variance + eps).rsqrt(), variance, total])

    def _normalised(self, x: Tensor, saved: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        slope = saved[self.channels : 2 * self.channels]
        if weight is not None:
            slope = slope * weight.to(self.dtype)
        y = (x.to(self.dtype) - saved[: self.channels].view(self.shape)) * slope.view(self.shape)
        return y if bias is None else y + bias.to(self.dtype).view(self.shape)


def update_running(saved: Tensor, running: tuple[Tensor, Tensor, Tensor | None], momentum: float) -> None:
    """Updates running mean and variance from a forward's statistics; ``momentum`` < 0: to the average over all batches.

    The running variance is the unbiased one, except that of a single value, which is 0.  The host reads nothing.
    """
    running_mean, running_var, batches = running
    channels = running_mean.numel()
    total = saved[-1]
    mean, variance = saved[:channels], saved[2 * channels : 3 * channels]
    unbiased = variance * total / (total - 1).clamp(min=1.0)
    if batches is not None:
        batches.add_(1)
    factor = 1.0 / batches.to(saved.dtype) if momentum < 0 and batches is not None else saved.new_tensor(momentum)
    factor = torch.where(total > 0, factor, 0.0)
    for old, new in ((running_mean, mean), (running_var, unbiased)):
        old.copy_(factor * new + (1 - factor) * old.to(saved.dtype))
