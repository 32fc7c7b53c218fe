"""The CUDA graphs of a fit, by the key of their batches, and the memory that they share with eager steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fabricamp.engine.graph.memory_pool import GraphPool
from fabricamp.optimizers import LARC, FusedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    import torch
    from torch.optim import Optimizer

    from fabricamp.engine.graph.batches import Key, Role
    from fabricamp.engine.graph.captured import CapturedGroup, CapturedStep
    from fabricamp.state import RunState


class GraphCache:
    """The captured steps of a fit, in one pool of memory, which is lent to eager steps.

    ``sums``: gradients are summed in memory of the precision.  ``say`` logs a line.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        state: RunState,
        optimizer: Optimizer,
        *,
        sums: bool,
        say: Callable[[str], None],
    ) -> None:
        self.steps: dict[Key, CapturedStep] = {}
        self.groups: dict[Key, CapturedGroup] = {}
        """Graphs of several steps, if steps are launched together."""
        self.pool = GraphPool(stream)
        self.lends = True
        """Whether eager steps may use the graphs' memory: until one of them leaves a tensor there."""
        self.on_drop: Callable[[], None] = lambda: None
        """Called when the graphs are dropped."""
        self.stream = stream
        self._state = state
        self._optimizer = optimizer
        self._sums = sums
        self._say = say
        state.runs_as = "eager"

    def other_shapes(self, key: Key) -> set[Hashable]:
        """Returns the shapes that have graphs, without that of ``key``."""
        return {shape for shape, _ in self.steps} - {key[0]}

    # -- the graphs' memory, lent to eager steps -----------------------------------------------------------------------------------

    def lends_to(self, role: Role) -> bool:
        """Whether eager steps of ``role`` run in the graphs' memory.

        Those of an accumulation do not: their gradients, or the sums of these, stay.
        """
        return self.lends and role.accumulate == 1 and not self._sums

    def lent(self, role: Role) -> AbstractContextManager[None]:
        """A context within which an eager step of ``role`` runs in the graphs' memory, if it is lent to it.

        It is for forward and backward.  The update is not part of it: what an optimizer creates late stays for good.
        """
        return self.pool.lent() if self.lends_to(role) else contextlib.nullcontext()

    def reclaim(self, step: CapturedStep | None = None, *, forgets: bool = True) -> bool:
        """Ends the loan of the graphs' memory, before a replay of ``step`` or a capture.

        If a tensor of an eager step is still alive in it, drops the graphs (``forgets``: as in :meth:`drop`) and returns False.
        Their memory is left to what is alive, and later graphs have a pool that is not lent.
        """
        if not self.steps:
            self.pool.begin()
            return True
        if step is not None and step.role.accumulate == 1:
            step.show_gradients()  # frees those of the eager step
        if self.pool.reclaim():
            return True
        self.lends = False
        self._say(
            "CUDA graph: a tensor of an eager step is kept in the graphs' memory, so they are captured again, in other memory; "
            "eager steps take memory of their own from here on"
        )
        self.drop(forgets=forgets)
        return False

    # -- the end of the graphs -----------------------------------------------------------------------------------------------------

    def drop(self, *, waits: bool = True, forgets: bool = True) -> None:
        """Frees all graphs; each shape has to run eagerly again before its next capture.

        ``waits``: first waits for the device.  ``forgets``: a fused optimizer builds its rows anew in its next step.
        """
        if self.steps and waits:
            self.stream.synchronize()
        self.steps.clear()
        self.groups.clear()
        self.pool = GraphPool(self.stream)
        self.on_drop()
        self._state.runs_as = "eager"
        if forgets and isinstance(self._optimizer, FusedOptimizer | LARC):
            self._optimizer.forget()  # else it would refuse other parameters or state, as if a graph could still be replayed
