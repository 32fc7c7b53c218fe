"""Chooses how the updates of a fit are made: automatic or manual optimization, by closures, eagerly or as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.engine.graph.group_refusals import group_refusal
from fabricamp.engine.graph.group_update import GroupUpdate
from fabricamp.engine.graph.refusals import graph_refusal, refused
from fabricamp.engine.graph.update import GraphUpdate
from fabricamp.engine.manual_update import ClosureUpdate, ManualUpdate
from fabricamp.engine.update import Update
from fabricamp.errors import ConfigError
from fabricamp.precision.plain_step import demands_closure

if TYPE_CHECKING:
    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session


def open_update(parts: FitParts, session: Session) -> Update:
    """Returns the update object of ``session``; under manual optimization, gives the module the methods that it calls.

    Raises :class:`ConfigError` if a CUDA graph is required and impossible.
    """
    parts.state.runs_as = ""
    captures = _captures(parts, session)
    if not session.module.automatic_optimization:
        update = ManualUpdate(parts)
        session.attachment.manual_backward, session.attachment.manual_clip = update.backward, update.clip
        for one in session.attachment.optimizers:
            one.update = update.step
        return update
    if captures:
        session.graphs.update = (GroupUpdate if _launches_together(parts, session) else GraphUpdate)(parts, session)
        return session.graphs.update
    closure = bool(parts.optimizers) and demands_closure(parts.optimizers[0])
    return ClosureUpdate(parts) if closure else Update(parts)


def _launches_together(parts: FitParts, session: Session) -> bool:
    options = session.settings.cuda_graph
    if options is None or options.steps == 1:
        return False
    reason = group_refusal(parts, session.trainer.callbacks)
    what = f"CudaGraph(steps={options.steps})"
    if reason and options.required:
        raise ConfigError(f"cuda_graph: {what}: {reason}; or give steps=1, which launches each step by itself")
    if reason:
        session.run_summary.say(f"{what} launches each step by itself: {reason}")
    return not reason


def _captures(parts: FitParts, session: Session) -> bool:
    options = session.settings.cuda_graph
    if options is None:
        return False
    reason = graph_refusal(parts)
    if reason and options.required:
        raise refused(reason)
    if reason:
        session.run_summary.say(f"cuda_graph='auto' runs eagerly: {reason}")
        parts.state.runs_as = "eager"
    return not reason
