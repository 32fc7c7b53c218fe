"""Losses given as (sum, weight): gradients of an accumulation are divided once, by its weight over micro-batches and ranks."""

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
    """The weights of an accumulation's losses, on the device; the host reads none of them.

    Before backward a sum is divided by ``reference``, the last accumulation's mean weight: gradients then have the magnitude of
    those of a mean.  ``reference`` is a power of two, since dividing by it changes no digit.  The update divides by the remaining
    factor, together with the loss scale.
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
        """The sum of the weights of this rank's micro-batches in the accumulation."""
        self.reference = torch.zeros_like(self.total)
        if reference is not None:
            self.reference.copy_(reference)
        self._knows_reference = reference is not None
        self.number: float | None = None
        """The last micro-batch's weight, if it was given as a number on the host; else None."""

    def take(self, loss: Tensor, weight: Any) -> Tensor:
        """Adds a micro-batch's weight; returns the loss for backward, not yet divided by the number of micro-batches."""
        own = self._on_device(weight)
        if not self._knows_reference:
            self._knows_reference = True
            self.reference.copy_(_power_of_two(self._strategy.reduce(own, "mean"), torch.ones_like(own)))
        self.total += own
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss / self.reference.to(loss.dtype)

    def dividing(self, reduce: Callable[[GradientMemory | None], Gradients]) -> Callable[..., Gradients]:
        """Returns ``reduce`` (a strategy's ``reduce_gradients``), wrapped to return the remaining divisor as ``weight`` too."""

        def reduce_weighted(memory: GradientMemory | None = None) -> Gradients:
            return reduce(memory)._replace(weight=self._close())

        return reduce_weighted

    def _close(self) -> Tensor:
        """Ends an accumulation; returns its divisor: inf if its weight is 0 (gradients are 0 then), nan if it is below 0."""
        mean = self._strategy.reduce(self.total, "sum") / (self.accumulate * self._strategy.world_size)
        divisor = mean / self.reference
        self.reference.copy_(_power_of_two(mean, self.reference))  # in place: a captured graph reads this memory
        self.forget()
        return divisor.masked_fill(divisor == 0, math.inf).masked_fill(divisor < 0, math.nan)

    def forget(self) -> None:
        """Begins a new accumulation."""
        self.total.zero_()

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``forward``, wrapped to raise for a loss without a weight: it would be counted with a wrong weight."""

        def run(*args: Any) -> Any:
            output = forward(*args)
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor):
                raise mixed()
            return output

        return run

    def shown(self, output: Any) -> dict[str, Any]:
        """Returns the outputs for hooks, detached: the mean as "loss", the weight, and the other values of a dict."""
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
    """Returns the error for losses of which some have a weight and others do not."""
    return ConfigError(
        "training_step returned (sum, weight) for some batches and a loss without a weight for others; return (sum, weight) for "
        "all of them, or the mean"
    )


def compare_kinds(strategy: Strategy, *, weighted: bool) -> None:
    """Raises :class:`ConfigError` if losses have a weight on some ranks only: the ranks would wait for each other forever."""
    kinds = strategy.all_gather_object(weighted)
    if not all(kinds) and any(kinds):
        raise ConfigError(
            f"training_step returned (sum, weight) on rank {kinds.index(True)} and a loss without a weight on rank "
            f"{kinds.index(False)}; return (sum, weight) on all of them, or the mean"
        )


def _power_of_two(mean: Tensor, otherwise: Tensor) -> Tensor:
    """Returns the largest power of two not above ``mean``; ``otherwise`` if that is not finite or not above 0."""
    power = mean.log2().floor().exp2()
    return torch.where((power > 0) & power.isfinite(), power, otherwise)


def _described(weight: Any) -> str:
    if not isinstance(weight, Tensor):
        return repr(weight) if isinstance(weight, Real) else f"a {type(weight).__name__}"
    graph = " with a graph" if weight.requires_grad else ""
    return f"a tensor of shape {tuple(weight.shape)} on {weight.device}{graph}"
