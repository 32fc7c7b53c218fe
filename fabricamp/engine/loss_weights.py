"""Losses as sums with a weight: a window is divided once, by the weight of all its micro-batches on all ranks."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.ops.dtypes import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.gradients.flat import Gradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.strategies.base import Strategy


class LossWeights:
    """What the losses of a window weigh, on the device; nothing of it is read by the host.

    Before backward a sum is divided by ``reference``: the last window's mean weight, so that gradients have the size that those of
    a mean have.  It is a power of two, which changes no digit.  What is left is divided by in the update, with the loss scale.
    """

    def __init__(self, strategy: Strategy, accumulate: int, reference: Tensor | None = None) -> None:
        if strategy.world_size > 1 and not strategy.averages_gradients:
            raise ConfigError(
                "training_step returned (sum, weight), which is divided by the weight on all ranks, but the strategy sums "
                "gradients (gradient_average=False); leave gradient_average out"
            )
        if not strategy.averages_weights:
            raise ConfigError(
                f"training_step returned (sum, weight), and strategy {strategy.name!r} averages gradients alone over those that "
                "make a step; return the mean"
            )
        self._strategy = strategy
        self.accumulate = accumulate
        self.total = torch.zeros((), dtype=torch.float64, device=strategy.device)
        """What this rank's micro-batches of the window weigh."""
        self.reference = torch.zeros_like(self.total)
        if reference is not None:
            self.reference.copy_(reference)
        self._knows_reference = reference is not None
        self.number: float | None = None
        """The last micro-batch's weight, where it came as a number of the host."""

    def take(self, loss: Tensor, weight: Any) -> Tensor:
        """Takes note of a micro-batch; returns what backward runs on, but for the number of micro-batches."""
        own = self._on_device(weight)
        if not self._knows_reference:
            self._knows_reference = True
            self.reference.copy_(_power_of_two(self._strategy.reduce(own, "mean"), torch.ones_like(own)))
        self.total += own
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss / self.reference.to(loss.dtype)

    def dividing(self, reduce: Callable[[GradientMemory | None], Gradients]) -> Callable[..., Gradients]:
        """Returns what ``reduce`` (a strategy's ``reduce_gradients``) returns, with what the weights leave to divide by."""

        def reduce_weighted(memory: GradientMemory | None = None) -> Gradients:
            return reduce(memory)._replace(weight=self._close())

        return reduce_weighted

    def _close(self) -> Tensor:
        """Ends a window; returns its divisor: infinite without any weight (gradients are 0 then), not a number below 0."""
        mean = self._strategy.reduce(self.total, "sum") / (self.accumulate * self._strategy.world_size)
        divisor = mean / self.reference
        self.reference.copy_(_power_of_two(mean, self.reference))  # in its place: a graph reads it there
        self.forget()
        return divisor.masked_fill(divisor == 0, math.inf).masked_fill(divisor < 0, math.nan)

    def forget(self) -> None:
        """Begins a new window."""
        self.total.zero_()

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``forward`` with a look at what it returns: a loss without a weight would count as one with another weight."""

        def run(*args: Any) -> Any:
            output = forward(*args)
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor):
                raise mixed()
            return output

        return run

    def shown(self, output: Any) -> dict[str, Any]:
        """Returns what hooks get: the mean as "loss", the weight, and what else is in a dict; nothing of the graph."""
        others = output if isinstance(output, dict) else {}
        total, weight = output["loss"] if others else output
        weight = weight.reshape(()) if isinstance(weight, Tensor) else weight
        others = {key: value.detach() if isinstance(value, Tensor) else value for key, value in others.items()}
        return {"weight": weight, **others, "loss": total.detach() / weight}

    def _on_device(self, weight: Any) -> Tensor:
        self.number = None
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.requires_grad:
            if weight.device == self.total.device:
                return weight.detach().reshape(()).to(torch.float64)
            weight = weight.item() if weight.device.type == "cpu" else weight
        if isinstance(weight, Real) and 0 <= float(weight) < math.inf:
            self.number = float(weight)
            return torch.full_like(self.total, float(weight))
        raise ConfigError(
            f"training_step returned a pair, (sum, weight), whose weight is {_described(weight)}; give a number from 0 or a "
            "tensor with one, detached and on the module's device, such as mask.sum(); other values go into a dict beside 'loss'"
        )


def mixed() -> ConfigError:
    """Returns what is raised where some losses have a weight and others do not."""
    return ConfigError(
        "training_step returned (sum, weight) for some batches and a loss without a weight for others; return (sum, weight) for "
        "all of them, or the mean"
    )


def compare_kinds(strategy: Strategy, *, weighted: bool) -> None:
    """Raises where losses have a weight on some ranks and none on others, which would wait for each other for ever."""
    kinds = strategy.all_gather_object(weighted)
    if not all(kinds) and any(kinds):
        raise ConfigError(
            f"training_step returned (sum, weight) on rank {kinds.index(True)} and a loss without a weight on rank "
            f"{kinds.index(False)}; return (sum, weight) on all of them, or the mean"
        )


def _power_of_two(mean: Tensor, otherwise: Tensor) -> Tensor:
    """The power of two at or below ``mean``; ``otherwise`` where that is no number above 0."""
    power = mean.log2().floor().exp2()
    return torch.where((power > 0) & power.isfinite(), power, otherwise)


def _described(weight: Any) -> str:
    if not isinstance(weight, Tensor):
        return repr(weight) if isinstance(weight, Real) else f"a {type(weight).__name__}"
    graph = " with a graph" if weight.requires_grad else ""
    return f"a tensor of shape {tuple(weight.shape)} on {weight.device}{graph}"
