"""A step that pays for hooks and a profiler's range only where there are some: torch's wrapper around each takes 10 us."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fabricamp.torch_private import global_optimizer_post_hooks, global_optimizer_pre_hooks, profiler_enabled


def let_hooks_idle(kind: type[Optimizer]) -> None:
    """Wraps ``kind.step`` as torch does, around a way past that wrapper for steps that nobody watches; once a class."""
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

    run.hooked = True  # type: ignore[attr-defined]  # how torch knows that it has no wrapper to add
    kind.step = run  # type: ignore[method-assign]
