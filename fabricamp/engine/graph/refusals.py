"""Reasons, known before the first batch, why a fit's steps cannot be captured as a CUDA graph, or not several in one launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor

from fabricamp.callbacks.base import Callback, waits_between_steps
from fabricamp.cuda_graph import reason_against
from fabricamp.engine.update import resolve_hooks
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.optimizers import LARC, FusedOptimizer
from fabricamp.optimizers.closures import demands_closure
from fabricamp.precision.torch_updates import reads_found_inf
from fabricamp.torch_private import global_optimizer_post_hooks, global_optimizer_pre_hooks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from fabricamp._utils.types import ParamGroup
    from fabricamp.engine.loop import FitParts


def refused(reason: str) -> ConfigError:
    """Returns the error to raise if a graph is required."""
    return ConfigError(f"cuda_graph: {reason}; or give cuda_graph='auto', which runs eagerly there")


def graph_refusal(parts: FitParts) -> str:
    """Returns why the steps of this fit cannot be captured, and what to change; an empty string if they can be."""
    strategy = parts.strategy
    reason = reason_against(strategy.device.type, strategy, parts.settings)
    if reason:
        return reason
    if not parts.module.automatic_optimization:
        return "manual optimization is not captured; leave the steps to the Trainer"
    if not parts.optimizers:
        return "there is no optimizer whose step could be captured"
    return _hook_in_a_step(parts) or refusal_of_optimizer(parts)


def _hook_in_a_step(parts: FitParts) -> str:
    bound = resolve_hooks(parts, parts.optimizers[0])
    hooks = {
        "on_before_zero_grad": bound.before_zero_grad,
        "optimizer_zero_grad": bound.zero_grad,
        "on_before_backward": bound.before_backward,
        "on_after_backward": bound.after_backward,
        "on_before_optimizer_step": bound.before_step,
        "configure_gradient_clipping": bound.clipping,
        "optimizer_step": bound.step,
    }
    hook = next((name for name, is_bound in hooks.items() if is_bound), "")
    return f"{hook} runs in the middle of a step; leave it out" if hook else ""


def refusal_of_optimizer(parts: FitParts) -> str:
    """Returns why no steps of this optimizer can be captured, and what to change; an empty string if they can be."""
    optimizer = parts.optimizers[0]
    name = type(optimizer).__name__
    if demands_closure(optimizer):
        return f"{name} runs the forward itself; take an optimizer that steps once"
    if reason_outside(parts) and not parts.optimizer_steps[0].splits:
        return (
            f"{type(parts.precision).__name__} has a step of its own, so {name} cannot step by itself after a replay; take a fused "
            "optimizer such as FusedAdam"
        )
    return ""


def reason_outside(parts: FitParts) -> str:
    """Returns why the optimizer's own ``step`` runs after each replay, outside of the graph; an empty string if it is captured.

    It is captured where a replay has the bits of an eager step.  The package's fused optimizers upload their numbers.  torch's with
    ``capturable=True`` count their steps on the device, and its SGD counts none; their numbers are constants of the graph, so a
    schedule needs an lr tensor.
    """
    optimizer = parts.optimizers[0]
    if is_fused(optimizer):
        return ""
    if any(step_hooks(optimizer)):
        return "its step hooks run on the host, and a replay would leave them out"
    groups = optimizer.param_groups
    counts_on_device = type(optimizer) is torch.optim.SGD or all(group.get("capturable") for group in groups)
    if not counts_on_device:
        return (
            "it reads numbers on the host, such as lr and its step count, and a graph would keep those of the capture"
        )
    has_tensors = [isinstance(group.get("lr"), Tensor) for group in groups]
    on_device = all(group.get("fused") or group.get("capturable") for group in groups)
    if any(map(_lr_is_elsewhere, groups)) or (any(has_tensors) and not on_device):
        return "it reads its lr tensor on the host, and a graph would keep the value of the capture"
    if parts.schedulers and not all(has_tensors):
        return "its lr is a number, which a schedule changes, and a graph would keep that of the capture"
    # torch's fused SGD with dampening cannot skip its first step on the device.
    skips_on_device = reads_found_inf(optimizer) and not any(group.get("dampening") for group in groups)
    if parts.precision.verdicts is not None and not skips_on_device:
        return f"precision {parts.precision.name!r} may skip a step, and the host has to decide that for this optimizer"
    return ""


def step_hooks(optimizer: Optimizer) -> list[Mapping[int, Any]]:
    """Returns torch's tables of the hooks around the optimizer's ``step``, by the number of each hook; they change in place."""
    owners = [optimizer, optimizer.optim] if isinstance(optimizer, LARC) else [optimizer]
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    # A class of another package may have none.
    own = [getattr(owner, name, {}) for owner in owners for name in names]
    return [*own, global_optimizer_pre_hooks, global_optimizer_post_hooks]


def _lr_is_elsewhere(group: ParamGroup) -> bool:
    """Whether the group's lr is a tensor on another device than its parameters, which torch reads on the host."""
    rate = group.get("lr")
    return isinstance(rate, Tensor) and any(rate.device != parameter.device for parameter in group["params"])


def said_of_outside(optimizer: object, reason: str) -> str:
    """Returns the line that says that ``optimizer`` steps outside of the graph, why, and what that costs."""
    name = type(optimizer).__name__
    return (
        f"CUDA graph: {name}.step runs after each replay, outside of the graph: {reason}. The host launches the update in every "
        "step, as an eager run does; fabricamp's fused optimizers (FusedAdam, by default AdamW's rule; FusedSGD) are part of the "
        "graph"
    )


def is_fused(optimizer: Optimizer | None) -> TypeGuard[FusedOptimizer | LARC]:
    """Whether the optimizer is one of fabricamp's fused ones, or a :class:`LARC` around one: these have ``upload``."""
    return isinstance(optimizer.optim if isinstance(optimizer, LARC) else optimizer, FusedOptimizer)


# -- several steps in one launch ---------------------------------------------------------------------------------------------------


BATCH_HOOKS: Final = ("on_train_batch_start", "on_train_batch_end")
"""The hooks that run between two steps."""


def group_refusal(parts: FitParts, callbacks: Sequence[Callback]) -> str:
    """Returns why steps of this fit cannot be launched together, and what to change; an empty string if they can be."""
    settings = parts.settings
    feed = parts.feed
    outside = reason_outside(parts)
    if outside:
        name = type(parts.optimizers[0]).__name__
        return f"{name}.step runs after each replay, outside of the graph: {outside}; take FusedAdam or FusedSGD"
    refusals = {
        "several processes launch step by step": parts.strategy.world_size > 1,
        f"strategy {parts.strategy.name!r} launches step by step": parts.strategy.sharding.shards,
        "accumulate_grad_batches above 1 is replayed batch by batch": settings.most_accumulated > 1,
        "the loader does not say how many batches an epoch has; give one with a length, such as a ResidentLoader": (
            feed.length == math.inf
        ),
        "the hooks that transfer a batch run between two steps; do that in the dataset, or in training_step": (
            feed.hooks_between
        ),
    }
    reason = next((words for words, holds in refusals.items() if holds), "")
    return reason or _hook_refusal(parts, callbacks) or _schedule_refusal(parts)


def _hook_refusal(parts: FitParts, callbacks: Sequence[Callback]) -> str:
    for callback in callbacks:
        hook = next((name for name in BATCH_HOOKS if overrides(callback, name, Callback)), "")
        if hook and waits_between_steps(callback):
            return (
                f"{type(callback).__name__}.{hook} may look at each step's weights; override holds_at(self, global_step) in its "
                "class to say after which step it has to run, or leave the callback out"
            )
    hook = next((name for name in BATCH_HOOKS if parts.hooks.module(name)), "")
    name = type(parts.module).__name__
    return f"{name}.{hook} may look at each step's weights; put it into a callback with a holds_at" if hook else ""


def _schedule_refusal(parts: FitParts) -> str:
    by_step = [config for config in parts.schedulers if config.interval == "step"]
    if not by_step:
        return ""
    optimizer = parts.optimizers[0]
    name = type(optimizer).__name__
    if any(config.reduce_on_plateau for config in by_step):
        return "a schedule that watches a value after each step makes the host wait for the value; give it interval='epoch'"
    if habits().schedules_count_batches and any(config.frequency > 1 for config in by_step):
        return "a schedule's frequency counts the batches of each epoch, as in Lightning; leave the frequency out"
    if overrides(parts.module, "lr_scheduler_step", TrainingModule):
        return "lr_scheduler_step runs after each step; leave it out"
    rates = [group["lr"] for group in optimizer.param_groups]
    if isinstance(optimizer, FusedOptimizer):
        tensors = any(isinstance(rate, Tensor) for rate in rates)
        return f"{name} has a tensor as its lr, which a schedule changes; give it a number" if tensors else ""
    if not all(isinstance(rate, Tensor) and rate.device == parts.strategy.device for rate in rates):
        return (
            f"{name} has an lr that is not a tensor on the GPU, where a schedule changes it; give torch.tensor(..., "
            "device='cuda'), or take a fused optimizer such as FusedAdam"
        )
    return ""
