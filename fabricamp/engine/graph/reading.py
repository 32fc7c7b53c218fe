"""Reads the batches of an epoch for launches of several steps: those of a launch together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from fabricamp.engine.graph.horizon import Horizon
    from fabricamp.engine.parts import FitParts

_END: Final = object()


class Read(NamedTuple):
    """Batches that were read together.

    ``key`` is the result of the reader's ``look`` for them.  ``last``: they are the last of the epoch.  ``failure``: the exception
    that was raised in place of the next batch.
    """

    batches: list[Any]
    key: Any
    last: bool
    failure: Exception | None


class GroupReader:
    """Yields batches to the loop one by one, and keeps those of one launch until :meth:`take`.

    ``ready`` returns whether steps can be launched together now.  ``look`` is called with the batches that were read together.
    ``draws`` returns the state of the generator that steps draw from.
    """

    def __init__(
        self,
        parts: FitParts,
        horizon: Horizon,
        *,
        ready: Callable[[], bool],
        look: Callable[[list[Any]], Any],
        draws: Callable[[], Tensor],
    ) -> None:
        self._parts = parts
        self._state = parts.state
        self._horizon = horizon
        self._ready = ready
        self._look = look
        self._draws = draws
        self._group: Read | None = None

    def take(self) -> Read | None:
        """Returns the batches of a launch if the loop is at its first one; None for a batch that is run alone."""
        group, self._group = self._group, None
        return group

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields ``batches``, which come from the feed; sets the feed's ``last`` for the batch that is yielded."""
        feed = self._parts.feed
        length = feed.length
        ahead: Read | None = None
        while True:
            count = self._horizon.steps(length) if self._ready() else 1
            if count > 1 or ahead is not None:
                ahead, whole = yield from self._together(batches, count, length, ahead)
                if not whole:
                    return
                continue
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _together(
        self, batches: Iterator[Any], count: int, length: float, ahead: Read | None
    ) -> Generator[Any, None, tuple[Read | None, bool]]:
        """Yields the batches of a launch, or those that were read ``ahead`` for a launch that is not made.

        Returns the batches read ahead for the next launch, while this one runs, and whether there may be more batches.  Raises an
        error of the loader in place of its batch.
        """
        feed, state = self._parts.feed, self._state
        read = self._read(batches, count) if ahead is None else ahead
        steps, ahead = len(read.batches), None
        if count == steps and read.failure is None:
            self._group = read
            state.committed = state.batches_done + steps
        for number, batch in enumerate(read.batches, 1):
            feed.last = read.last and number == steps
            yield batch
            goes_on = number == 1 < count and feed.counts_alone and not state.should_stop
            if goes_on and self._horizon.steps(length, ahead=count - 1) == count:
                ahead = self._read(batches, count)
        if read.failure is not None:
            raise read.failure
        return ahead, steps >= count

    def _read(self, batches: Iterator[Any], count: int) -> Read:
        feed, failure = self._parts.feed, None
        found: list[Any] = []
        before = self._draws()
        try:
            found.extend(itertools.islice(batches, count))
        except Exception as error:  # noqa: BLE001 - raised by _together in place of the batch
            failure = error
        last, feed.last = feed.last, False
        if not torch.equal(before, self._draws()):
            raise ConfigError(
                "cuda_graph: reading a batch draws on the GPU (in a transform, say), and for a launch of several steps all are "
                "read before it; draw in training_step, or give CudaGraph(steps=1)"
            )
        return Read(found, self._look(found) if len(found) == count else None, last, failure)
