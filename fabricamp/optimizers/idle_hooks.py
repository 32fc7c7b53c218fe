"""Makes ``step`` pay for hooks and the profiler's range only if there are any: torch's wrapper takes 10 us per step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fabricamp.torch_private import global_optimizer_post_hooks, global_optimizer_pre_hooks, profiler_enabled


def let_hooks_idle(kind: type[Optimizer]) -> None:
    """Wraps ``kind.step``, once per class: steps with hooks or a profiler run torch's wrapper, all others bypass it."""
    step: Callable[..., Any] = kind.step
    if getattr(step, "hooked", False):
        return
    watched = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or global_optimizer_pre_hooks
            or global_optimizer_post_hooks
            or profiler_enabled()
        ):
            return watched(self, *args, **options)
        return step(self, *args, **options)

    run.hooked = True  # type: ignore[attr-defined]  # tells torch that the wrapper is already there
    kind.step = run  # type: ignore[method-assign]
