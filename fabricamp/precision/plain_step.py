"""An optimizer step in full precision: torch's own clipping, no scaling, no skipping."""

from __future__ import annotations

import inspect
import operator
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from fabricamp import ops
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.shards import SharedRows, any_shard, local_gradient
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.parameters import owned_parameters
from fabricamp.precision.fused import UnscaleArgs, flags_of, step_fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.precision.base import Clip


class Stepper:
    """Updates parameters from their gradients; this base serves full precision, without masters or scaling."""

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with the gradients of ``optimizer`` before its step."""
        return GradientMemory(owned_parameters(optimizer))

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``."""

    def show(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`."""
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        clip: Clip | None,
        run: Callable[[], Any] | None,
        loss: Tensor | None,
    ) -> None:
        """Clips and updates, or skips; ``loss``: see :meth:`Precision.step <fabricamp.precision.Precision.step>`."""
        if run is None and isinstance(optimizer, FusedOptimizer):
            # Reads the gradients from the strategy's buffers; .grad stays as it is.
            flags = None if gradients.present is None else flags_of(gradients.present)
            how = None
            if clip is not None or gradients.divisor != 1 or gradients.weight is not None:
                device = next((one.device for one in owned_parameters(optimizer)), torch.device("cpu"))
                state = optimizer.own_state(device)
                carried = gradients.carried(state.scale)
                how = UnscaleArgs(state, carried, gradients.divisor, skips=False)
            step_fused(optimizer, how, clip, gradients=gradients.tensors, flags=flags)
            return
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)
        if clip is not None:
            clip_gradients(optimizer, clip)
        (run or optimizer.step)()

    def release(self) -> None:
        """Restores the optimizers."""


PLAIN: Final = Stepper()
_SHARED: Final[WeakKeyDictionary[Any, tuple[list[Tensor], SharedRows | None]]] = WeakKeyDictionary()


@torch.no_grad()
def write_gradients(optimizer: Optimizer, gradients: Gradients) -> None:
    """Writes gradients from a strategy's buffers into ``.grad``, and applies the division that the strategy left out."""
    parameters = owned_parameters(optimizer)
    if gradients.tensors is not None:
        for parameter, value in zip(parameters, gradients.values(), strict=True):
            parameter.grad = None if value is None else value.to(parameter.dtype)
    for divisor in (gradients.divisor, gradients.weight):
        if isinstance(divisor, torch.Tensor) or divisor not in (None, 1):
            torch._foreach_div_([parameter.grad for parameter in parameters if parameter.grad is not None], divisor)


@torch.no_grad()
def clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    """Clips the ``.grad`` of all parameters of ``optimizer`` by torch's own functions, for the same bits as a hand-written loop.

    Sharded gradients are clipped shard by shard, with one exchange in total; torch would exchange a norm per parameter.
    """
    parameters = [one for one in owned_parameters(optimizer) if one.grad is not None]
    if any_shard(parameters):
        _clip_parts(optimizer, parameters, clip)
    elif clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, clip.value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clip.value)


def _clip_parts(optimizer: Optimizer, parameters: list[Tensor], clip: Clip) -> None:
    own = list(map(local_gradient, parameters))
    if clip.algorithm == "norm":
        one = torch.ones((), dtype=torch.float32, device=own[0].device)
        squares = ops.gradient_statistics(own, one, shared=_shared_rows(optimizer, parameters))
        torch._foreach_mul_(own, (clip.value / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0))
    else:
        torch._foreach_clamp_min_(own, -clip.value)
        torch._foreach_clamp_max_(own, clip.value)


def _shared_rows(optimizer: Optimizer, parameters: list[Tensor]) -> SharedRows | None:
    """Returns which ranks share the parameters; cached until the list of parameters changes."""
    known = _SHARED.get(optimizer)
    if known is None or len(known[0]) != len(parameters) or not all(map(operator.is_, known[0], parameters)):
        known = _SHARED[optimizer] = parameters, SharedRows.of(parameters)
    return known[1]


def demands_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
