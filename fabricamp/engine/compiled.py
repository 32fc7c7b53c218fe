"""A training step compiled by ``torch.compile``: its logged values are kept after the step, and the module is not changed.

``Trainer(compile=...)`` asks for it, or ``fit(torch.compile(module))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.errors import ConfigError, nearest
from fabricamp.torch_private import dispatch_modes

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.session import Session


class HeldLogs:
    """Replaces the metrics of a run while compiled code runs: it only appends to a list, which causes no graph break."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], Any, int | None]] = []

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Notes a call of ``self.log``, with a copy of the value: the step may change it."""
        self.calls.append((call, value.detach().clone() if isinstance(value, Tensor) else value, batch_size))


def as_compile(name: str, value: Any) -> dict[str, Any] | None:
    """Returns the keywords of ``torch.compile`` for the Trainer's ``compile``; None if nothing is compiled."""
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} is not allowed; give True, False, or a dict of torch.compile's keywords")
    known = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
    for key in value:
        if key not in known:
            raise ConfigError(
                f"{name}: torch.compile has no {key!r}{nearest(str(key), known)} (known: {', '.join(known)})"
            )
    return dict(value)


def step_of(session: Session) -> Callable[..., Any]:
    """Returns the module's ``training_step``, compiled if the module was compiled, or if the Trainer's ``compile`` says so.

    If that is impossible, ``compile`` raises, and a module that was compiled trains uncompiled.
    """
    step = session.module.training_step
    options = session.settings.compile
    compiler = session.source.compiler
    if options is None and compiler is None:
        return step
    reason = _reason_against(session)
    if reason and options is not None:
        raise ConfigError(f"compile: {reason}")
    if reason:
        session.run_summary.say(
            f"{type(session.module).__name__}, compiled by torch.compile, trains uncompiled: {reason}"
        )
        return step
    # What the user compiled is compiled by the user's options, and once.
    compiled: Callable[..., Any] = torch.compile(step, **(options or {})) if compiler is None else compiler(step)
    run_context = session.run_context
    held = HeldLogs()
    stand_in: Any = held

    def run(*batch: Any) -> Any:
        if dispatch_modes():  # these, such as a counter of FLOPs, have to see the uncompiled step
            return step(*batch)
        metrics = run_context.metrics
        run_context.metrics = stand_in
        try:
            output = compiled(*batch)
        finally:
            run_context.metrics = metrics
            calls = held.calls
            held.calls = []
        if metrics is not None:  # else nothing is logged
            for call in calls:
                metrics.keep(*call)
        return output

    return run


def _reason_against(session: Session) -> str:
    level: Any = getattr(session.precision, "level", None)
    if not session.module.automatic_optimization:
        return (
            "manual optimization calls backward and updates within training_step; call torch.compile on what it calls"
        )
    if session.settings.cuda_graph is not None:
        return "a step is compiled, or replayed as a CUDA graph; leave out one of them"
    if session.strategy.name == "fsdp":
        return "strategy 'fsdp' gathers parameters in hooks, which break a compiled step; give 'ddp' or 'delayed_ddp'"
    casts = level is not None and not level.whole_step and (level.cast_model_type or level.cast_model_outputs)
    if casts:
        return (
            f"precision {session.precision.name!r} casts at the modules that the step calls, which torch.compile cannot "
            "trace; give 'O1', 'O4' or 'bf16-true', or compile in configure_model what the step calls"
        )
    return ""
