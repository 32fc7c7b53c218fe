"""Where the optimizer steps: in the graph, or by itself after each replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.engine.graph.refusals import reason_outside, refusal_of_optimizer, said_of_outside
from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.graph.fallback import EagerFallback
    from fabricamp.engine.loop import FitParts


class OptimizerPlace:
    """Decides whether the optimizer's own ``step`` is part of the graph, and takes it out when a change asks for that.

    Nothing puts it back.  ``say`` logs a line.
    """

    def __init__(self, parts: FitParts, fallback: EagerFallback, say: Callable[[str], None]) -> None:
        self.outside = False
        """Whether the optimizer's own ``step`` runs after each replay, outside of the graph."""
        self.before_outside: Callable[[str], None] | None = None
        """Called with the reason before the optimizer's step leaves the graph."""
        self._parts = parts
        self._fallback = fallback
        self._say = say
        reason = reason_outside(parts)
        if reason:
            self.step_outside(reason)

    def look_again(self) -> None:
        """Takes the optimizer's step out of the next graphs if a change asks for it, such as step hooks that came late."""
        if self.outside or self._fallback.why:
            return
        reason = reason_outside(self._parts)
        if not reason:
            return
        refusal = refusal_of_optimizer(self._parts)
        if refusal:
            self._fallback.give_up(refusal)
        else:
            self.step_outside(reason)

    def look_before_capture(self) -> None:
        """As :meth:`look_again`, before a capture; raises :class:`NotCapturableError` for an optimizer that no graph can serve."""
        if self.outside:
            return
        reason = reason_outside(self._parts)
        if not reason:
            return
        # Step hooks that came after this object was made, and before the first capture.
        refusal = refusal_of_optimizer(self._parts)
        if refusal:
            raise NotCapturableError(refusal)
        self.step_outside(reason)

    def step_outside(self, reason: str) -> None:
        """Lets the optimizer step after each replay from the next capture on, and says why."""
        if self.before_outside is not None:
            self.before_outside(reason)
        self.outside = True
        self._say(said_of_outside(self._parts.optimizers[0], reason))
