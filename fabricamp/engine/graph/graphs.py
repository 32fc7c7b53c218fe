"""All that a session has as CUDA graphs, and the stream that it is on."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from fabricamp.engine.graph.evaluation import GraphEvaluation
from fabricamp.engine.graph.room import Room
from fabricamp.engine.graph.stream import SideStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.graph.update import GraphUpdate
    from fabricamp.engine.session import Session


class Graphs:
    """Makes and ends what of ``session`` is captured; does nothing where no CUDA graph was asked for, or there is no GPU."""

    def __init__(self, session: Session) -> None:
        self.update: GraphUpdate | None = None
        """What captures the steps of a fit; None where they are not."""
        self._session = session
        self._evaluations: dict[str, GraphEvaluation] = {}
        self._stream: SideStream | None = None

    @property
    def _wanted(self) -> bool:
        return self._session.settings.cuda_graph is not None and self._session.strategy.device.type == "cuda"

    @cached_property
    def room(self) -> Room:
        """What is known of the memory that its steps take."""
        options, state = self._session.settings.cuda_graph, self._session.trainer.state
        return Room(self._session.strategy.device, state, required=options is not None and options.required)

    def enter_stream(self) -> None:
        """Takes the run to a stream on which it can be captured."""
        if self._wanted and self._stream is None:
            self._stream = SideStream(self._session.strategy.device)

    def evaluation(self, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what calls the step of an evaluation of ``kind``: ``forward``, or what captures and replays it."""
        if not self._wanted or self._session.strategy.refuses_graph():
            return forward
        if kind not in self._evaluations:  # another loop, over loaders that were reloaded, goes on with these
            self.enter_stream()  # without a fit around it, it is on the default one
            self._evaluations[kind] = GraphEvaluation(self._session, kind, forward)
        return self._evaluations[kind]

    def close(self, *, failed: bool) -> None:
        """Frees the graphs: a process group does not end before those of its exchanges.

        After a failure of several ranks the device may wait for one that is gone, and nobody waits for the device: CUDA frees a
        graph that is under way when it has ended.
        """
        waits = not failed or self._session.strategy.world_size == 1
        for one in (self.update, *self._evaluations.values()):
            if one is not None:
                one.close(waits=waits)
        if self._stream is not None:
            self._stream.leave(wait=waits)
