"""The face of a precision: what dtype the module runs in, and how a loss becomes an update."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.fused import FusedStep, flags_of
from fabricamp.registry import Registry
from fabricamp.strategies.base import IN_PLACE, Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.strategies.base import Strategy

__all__ = ["PRECISIONS", "Clip", "Precision", "Verdict", "clip_gradients", "demands_closure", "write_gradients"]


class Clip(NamedTuple):
    """How gradients are limited: by their common norm, or each value by itself."""

    value: float
    algorithm: Literal["norm", "value"] = "norm"


class Verdict(NamedTuple):
    """What became of one update window, as the device decided it and the host read it."""

    applied: bool
    scale: float
    loss: float
    applied_steps: int
    skipped_steps: int
    ends_run: bool = False
    """Whether the run has to end for it: by ``nan_policy``, or since nothing but skips has come for too long."""


class Precision:
    """Full precision: what the module brought, autograd's gradients, torch's own clipping.

    One update window is ``forward`` and ``backward`` per micro-batch, then ``step`` per optimizer, then ``close_window``.
    ``unscale`` comes before ``step`` only where somebody looks at the gradients in between (hooks, an overridden clipping).
    """

    name: str = "O0"
    nan_policy: str | None = None
    """What a non-finite gradient means: "skip", "stop" or "raise"; None: what the level does by itself."""
    _written: Gradients = IN_PLACE  # those that unscale has seen to already
    accumulating: bool = False
    """Set by the Trainer before :meth:`setup_optimizers`: a window has several micro-batches."""

    @property
    def lag(self) -> int:
        """How many windows later :meth:`close_window` tells what became of one; 0 where every window is applied."""
        return 0

    @property
    def follows_verdicts(self) -> bool:
        """Whether learning-rate schedules follow what :meth:`close_window` tells, instead of each window at once."""
        return self.lag > 0

    @property
    def skipped_steps(self) -> int:
        """Windows skipped for overflow, as far as the host knows without waiting."""
        return 0

    @property
    def scale(self) -> float:
        """The loss scale, as far as the host knows without waiting."""
        return 1.0

    def check_device(self, device_type: str) -> None:
        """Raises :class:`ConfigError` where this precision cannot work on ``device_type`` ("cpu" or "cuda")."""

    def convert_module(self, module: nn.Module) -> None:
        """Brings the module to the dtype that it runs in, in place; called once, on the device, before the optimizers are built."""

    def restore_module(self, module: nn.Module) -> None:
        """Undoes :meth:`convert_module` after a run: full-precision weights (the masters' values) in place, hooks removed."""

    def convert_input(self, batch: Any) -> Any:
        """Brings a batch to the dtype that the module takes; called on the way to the device."""
        return batch

    def setup_optimizers(self, module: nn.Module, optimizers: list[Optimizer], strategy: Strategy) -> None:
        """Gives the optimizers what they update (fp32 masters where the module is half) and checks that this can work."""

    def gradient_holders(self, optimizer: Optimizer) -> list[Tensor]:
        """The tensors whose ``.grad`` backward fills for this optimizer: its parameters, or the half copies of its masters."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def accumulation_buffers(self, optimizer: Optimizer | None = None) -> Sequence[Tensor] | None:
        """Where micro-batches are summed instead of in ``.grad``, of one optimizer or all; None: autograd sums them.

        The list stays the same one, whatever parameters an optimizer is given later.
        """
        return None

    def accumulate(self) -> None:
        """Adds the micro-batch's gradients to :meth:`accumulation_buffers`; called after each backward where these exist."""

    def window_tensors(self) -> list[Tensor]:
        """What an open window has beside ``.grad``: a checkpoint keeps it, and a resumed run writes into it."""
        return list(self.accumulation_buffers() or ())

    def take_window(self) -> None:
        """Takes note that :meth:`window_tensors` were written into: the window goes on from there."""

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the user's step; training and evaluation alike."""
        return step(*args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., Any] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss."""
        run(loss, **options)

    def unscale(self, optimizer: Optimizer, gradients: Gradients = IN_PLACE) -> None:
        """Writes unscaled, averaged gradients into ``.grad`` of what the optimizer updates, for those who look at them."""
        if gradients is not self._written:
            write_gradients(optimizer, gradients)
            self._written = gradients

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients = IN_PLACE,
        clip: Clip | None = None,
        run: Callable[[], Any] | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Clips and updates, or skips; ``run`` stands for ``optimizer.step`` where the user overrides the call.

        ``loss``: given where this step is all of its window, what :meth:`close_window` is called with right after.
        """
        written, self._written = self._written, IN_PLACE
        if run is None and isinstance(optimizer, FusedOptimizer):
            self._step_fused(optimizer, IN_PLACE if gradients is written else gradients, clip)
            return
        if gradients is not IN_PLACE and gradients is not written:
            write_gradients(optimizer, gradients)
        if clip is not None:
            clip_gradients(optimizer, clip)
        (run or optimizer.step)()

    def _step_fused(self, optimizer: FusedOptimizer, gradients: Gradients, clip: Clip | None) -> None:
        """Clips and updates from wherever the gradients are; ``.grad`` stays as it is."""
        tensors = gradients.tensors
        flags = None if gradients.present is None else flags_of(gradients.present)
        if clip is not None or gradients.divisor != 1:
            device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
            state = optimizer.own_state(device)
            step = FusedStep(state, state.scale, gradients.divisor, skips=False)
            step(optimizer, clip, gradients=tensors, flags=flags)
            return
        if tensors is not None:
            optimizer.gather(tensors, None, flags)
            optimizer.steer(None)
        optimizer.step()

    def close_window(self, loss: Tensor | None) -> Verdict | None:
        """Ends an update window; returns what became of the window ``lag`` windows ago, None before there is one."""
        return None

    def drain(self) -> list[Verdict]:
        """Reads, waiting, the verdicts that :meth:`close_window` has not told yet, without telling them apart from it."""
        return []

    def explain(self, global_step: int) -> str:
        """Returns what is known of the overflow for which the run has to end; may wait for the device."""
        return ""

    def refresh_masters(self) -> None:
        """Takes the masters anew from the module's weights, after these were edited in place."""

    def module_state(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state`` (the module's state dict) with the masters' values in place of their half copies."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """Scalers, counters and level: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""


@torch.no_grad()
def write_gradients(optimizer: Optimizer, gradients: Gradients) -> None:
    """Puts what a strategy averaged elsewhere, or left to be divided, into ``.grad``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if gradients.tensors is not None:
        for parameter, value in zip(parameters, gradients.values(), strict=True):
            parameter.grad = None if value is None else value.to(parameter.dtype)
    if gradients.divisor != 1:
        torch._foreach_div_(
            [parameter.grad for parameter in parameters if parameter.grad is not None], gradients.divisor
        )


def clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    """Limits the ``.grad`` of everything in ``optimizer``, by torch's own functions: a hand-written loop has equal bits."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, clip.value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clip.value)


def demands_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


PRECISIONS: Registry[Precision] = Registry("precision", "precision")
