"""Which micro-batches may be captured: enough of their shape and role have run eagerly, and there is room for a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.engine.graph.host_effects import FEWEST_EAGER_CALLS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from fabricamp._utils.types import Batch
    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.engine.graph.batches import Key
    from fabricamp.engine.graph.cache import GraphCache
    from fabricamp.engine.graph.seen_batches import SeenBatches
    from fabricamp.strategies.base import Strategy


class Warmup:
    """Counts the eager steps of each shape and role (``key``), and says from when on they may be captured.

    At most ``options.shapes`` shapes get graphs, one for each role; ``seen`` tells of the batches that get none.
    """

    def __init__(self, options: CudaGraph, strategy: Strategy, graphs: GraphCache, seen: SeenBatches) -> None:
        self._options = options
        self._strategy = strategy
        self._graphs = graphs
        self._seen = seen
        self._steps = 0
        """The eager steps since :meth:`begin`, of any shape."""
        self._by_shape: dict[Hashable, int] = {}
        self._by_key: dict[Key, int] = {}
        self._weights: dict[Key, float | None] = {}
        """The weight of the losses of a key, if it was given as a number on the host."""
        self._too_large: set[Key] = set()
        """The keys whose graphs do not fit into memory."""

    def begin(self) -> None:
        """Begins the counts of shapes anew, for another step: it may come with a new torch DDP, which needs some eager steps."""
        self._by_shape.clear()
        self._steps = 0

    def begin_again(self) -> None:
        """Begins the counts of keys anew, once the graphs are dropped: each has to run eagerly before its next capture."""
        self._by_key.clear()
        self._weights.clear()
        self._too_large.clear()

    def leave_out(self, key: Key) -> None:
        """Lets no further graph of ``key`` be captured: it does not fit into memory."""
        self._too_large.add(key)

    def is_over(self, key: Key) -> bool:
        """Whether a micro-batch of ``key`` may be captured now: enough of them have run eagerly."""
        if self._steps < self._strategy.eager_steps or key in self._too_large:
            return False
        if self._by_shape.get(key[0], 0) + 1 < self._options.warmup:
            return False
        if self._by_key.get(key, 0) < FEWEST_EAGER_CALLS:
            return False
        return key not in self._graphs.steps and len(self._graphs.other_shapes(key)) < self._options.shapes

    def count(self, key: Key, batch: Batch, view: Batch) -> int:
        """Counts an eager step; returns the number of steps of ``key`` so far, 0 if there are too many shapes to count it."""
        shape, role = key
        self._steps += role.closes
        if not self._seen.counts(shape, view):
            return 0
        self._by_shape[shape] = self._by_shape.get(shape, 0) + 1
        steps = self._by_key.get(key, 0) + 1
        self._by_key[key] = steps
        if steps == self._options.warmup and len(self._graphs.other_shapes(key)) >= self._options.shapes:
            self._seen.note_full(batch)
        return steps

    def changing_weight(self, key: Key, number: float | None) -> str:
        """Returns why the loss weight cannot be captured, if it is a ``number`` that changed; else an empty string."""
        if self._weights.setdefault(key, number) == number:
            return ""
        return (
            "training_step returns (sum, weight) with a number that differs between batches of one shape, and a replay keeps the "
            "captured number; give a tensor on the device, such as mask.sum()"
        )
