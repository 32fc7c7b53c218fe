"""All that a session has as CUDA graphs, and the stream that it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.engine.graph.evaluation import GraphEvaluation
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

    def enter_stream(self) -> None:
        """Takes the fit to a stream on which it can be captured."""
        if self._wanted:
            self._stream = SideStream(self._session.strategy.device)

    def evaluation(self, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what calls the step of an evaluation of ``kind``: ``forward``, or what captures and replays it."""
        if not self._wanted or self._session.strategy.refuses_graph(1):
            return forward
        if kind not in self._evaluations:  # another loop, over loaders that were reloaded, goes on with these
            self._evaluations[kind] = GraphEvaluation(self._session, kind, forward)
        return self._evaluations[kind]

    def close(self, *, failed: bool) -> None:
        """Frees the graphs; after a failure of several ranks the device may wait for one that is gone, and they stay."""
        waits = not failed or self._session.strategy.world_size == 1
        if waits:
            for one in (self.update, *self._evaluations.values()):
                if one is not None:
                    one.close()
        if self._stream is not None:
            self._stream.leave(wait=waits)
