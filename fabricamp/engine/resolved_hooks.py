"""Looks up, before the first batch, the hooks and methods that an update calls; those that nobody overrides then cost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.precision.base import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from fabricamp.engine.parts import FitParts
    from fabricamp.precision.base import Clip

_STEP = methodcaller("step")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedHooks:
    """Hooks that are overridden anywhere, and methods that the module overrides (None: it does not)."""

    before_zero_grad: Sequence[Callable[..., Any]]
    before_backward: Sequence[Callable[..., Any]]
    after_backward: Sequence[Callable[..., Any]]
    before_step: Sequence[Callable[..., Any]]
    zero_grad: Callable[..., Any] | None
    clipping: Callable[[Any, Clip | None], None] | None
    step: Callable[..., Any] | None
    run_backward: Callable[..., Any]
    backward: Callable[..., Any]
    """Called with the loss: ``run_backward``, through ``precision.backward`` if the precision overrides it."""
    wants_outputs: bool
    """Whether a hook after the batch gets the step's output."""
    shows_gradients: bool
    """Whether hooks or overridden methods see gradients before the update: only then a separate pass unscales them."""
    plain_zero_grad: Callable[[], Any] | None
    plain_step: Callable[[], Any] | None
    """The optimizer's own methods, if neither the Trainer nor the user does anything around them."""


def bound_to(parts: FitParts, optimizer: Optimizer | None, *, steps_alone: bool) -> ResolvedHooks:
    """Looks up what an update of ``optimizer`` calls; ``steps_alone``: the Trainer does nothing around the optimizer's step."""
    hooks, module, precision = parts.hooks, parts.module, parts.precision
    own = partial(overrides, module, base=TrainingModule)
    run_backward: Callable[..., Any] = module.backward if own("backward") else Tensor.backward
    # Methods that only pass a call on are left out: a Python call costs as much as three hooks.
    scales = overrides(precision, "backward", Precision)
    before_zero_grad, before_step = hooks("on_before_zero_grad"), hooks("on_before_optimizer_step")
    zero_grad = module.optimizer_zero_grad if own("optimizer_zero_grad") else None
    clipping = partial(_clip_by, module.configure_gradient_clipping) if own("configure_gradient_clipping") else None
    step = module.optimizer_step if own("optimizer_step") else None
    shown = bool(before_step or clipping or step)
    plain = steps_alone and not (shown or overrides(precision, "step", Precision))
    return ResolvedHooks(
        before_zero_grad=before_zero_grad,
        before_backward=hooks("on_before_backward"),
        after_backward=hooks("on_after_backward"),
        before_step=before_step,
        zero_grad=zero_grad,
        clipping=clipping,
        step=step,
        run_backward=run_backward,
        backward=partial(precision.backward, run=run_backward) if scales else run_backward,
        wants_outputs=bool(hooks("on_train_batch_end")),
        shows_gradients=shown,
        plain_zero_grad=None if optimizer is None or before_zero_grad or zero_grad else optimizer.zero_grad,
        # ``step`` is looked up at each call: a scheduler that is created within a run replaces it by torch's wrapper.
        plain_step=partial(_STEP, optimizer) if optimizer is not None and plain else None,
    )


def _clip_by(configure: Callable[..., Any], optimizer: Any, clip: Clip | None) -> None:
    """Calls the module's own method by Lightning's keywords."""
    configure(optimizer, gradient_clip_val=clip and clip.value, gradient_clip_algorithm=clip and clip.algorithm)
