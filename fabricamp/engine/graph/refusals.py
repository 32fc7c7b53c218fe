"""Reasons, known before the first batch, why a fit's steps cannot be captured as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.cuda_graph import reason_against
from fabricamp.engine.resolved_hooks import bound_to
from fabricamp.errors import ConfigError
from fabricamp.optimizers import LARC, FusedOptimizer
from fabricamp.precision.plain_step import demands_closure

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.parts import FitParts


def refused(reason: str) -> ConfigError:
    """Returns the error to raise if a graph is required."""
    return ConfigError(f"cuda_graph: {reason}; or give cuda_graph='auto', which runs eagerly there")


def graph_refusal(parts: FitParts) -> str:
    """Returns why the steps of this fit cannot be captured, and what to change; an empty string if they can be."""
    strategy = parts.strategy
    reason = reason_against(strategy.device.type, strategy, parts.limits.settings)
    if reason:
        return reason
    if not parts.module.automatic_optimization:
        return "manual optimization is not captured; leave the steps to the Trainer"
    if not parts.optimizers:
        return "there is no optimizer whose step could be captured"
    return _hook_in_a_step(parts) or _refusal_of(parts.optimizers[0], schedules=bool(parts.schedulers))


def _hook_in_a_step(parts: FitParts) -> str:
    bound = bound_to(parts, parts.optimizers[0], steps_alone=False)
    middle = {
        "on_before_zero_grad": bound.before_zero_grad,
        "optimizer_zero_grad": bound.zero_grad,
        "on_before_backward": bound.before_backward,
        "on_after_backward": bound.after_backward,
        "on_before_optimizer_step": bound.before_step,
        "configure_gradient_clipping": bound.clipping,
        "optimizer_step": bound.step,
    }
    hook = next((name for name, found in middle.items() if found), "")
    return f"{hook} runs in the middle of a step; leave it out" if hook else ""


def upload_of(optimizer: Any) -> Callable[[], bool] | None:
    """Returns the call that prepares a fused optimizer for a replay; None for other optimizers."""
    fused = isinstance(optimizer.optim if isinstance(optimizer, LARC) else optimizer, FusedOptimizer)
    return optimizer.upload if fused else None


def _refusal_of(optimizer: Any, *, schedules: bool) -> str:
    name = type(optimizer).__name__
    if demands_closure(optimizer):
        return f"{name} runs the forward itself; take an optimizer that steps once"
    if upload_of(optimizer) is not None:
        return ""
    if not all(group.get("capturable") for group in optimizer.param_groups):
        return (
            f"{name} counts its steps on the host; give it capturable=True, or take a fused optimizer such as FusedAdam"
        )
    if schedules and not all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        lr = optimizer.defaults["lr"]
        return f"{name} has a number as its lr, which a schedule changes; give lr=torch.tensor({lr!r})"
    return ""
