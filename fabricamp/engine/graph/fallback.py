"""The end of the captures of a run, or their refusal where a graph is required."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fabricamp.engine.graph.refusals import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.strategies.base import Strategy

_LOG = logging.getLogger("fabricamp")


class EagerFallback:
    """Lets a run, or its calls of ``step``, go on eagerly; ``drop`` frees the graphs.  Raises if a graph is required."""

    def __init__(self, options: CudaGraph, strategy: Strategy, drop: Callable[[], None], step: str = "") -> None:
        self.why = ""
        """Why the run captures nothing and stays eager; empty while it captures or replays."""
        self._options = options
        self._strategy = strategy
        self._drop = drop
        self._what = f" {step}" if step else ""

    def give_up(self, reason: str, error: BaseException | None = None) -> None:
        """Runs eagerly from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise refused(reason) from error
        self.why = reason
        self._drop()
        if self._strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs%s eagerly: %s", self._what, reason)
