"""The batches of a loader for a loop of the user's own: shared out, on the device, from the position of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.data import set_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp._utils.types import Batch
    from fabricamp.own_loop.loop import Loop
    from fabricamp.own_loop.session import LoopSession


class LoopBatches:
    """An epoch of batches for each ``for``: of a loader that ``Loop.prepare_data`` was given.

    A resumed run's first pass begins after the batches that were done.  A batch is done after its step, or when the next is asked
    for.  A pass that is left by ``break`` ends its epoch when the next one begins: a file that is saved in between goes on in it.
    """

    def __init__(self, loop: Loop, session: LoopSession) -> None:
        self._loop = loop
        self._session = session
        self._left = False  # whether the last pass of this process was not complete

    def __len__(self) -> int:
        """The number of batches of an epoch on this rank; raises TypeError if the loader has none."""
        assert self._session.feed is not None
        length = self._session.feed.length
        if length == float("inf"):
            raise TypeError("the loader does not say how many batches an epoch has")
        return int(length)

    def __iter__(self) -> Iterator[Batch]:
        session = self._session
        loop = self._loop
        state = session.state
        feed = session.feed
        assert feed is not None
        assert session.loader is not None
        if self._left and state.batch_idx:
            loop.end_epoch()
        self._left = True
        set_epoch(session.loader, state.epoch)
        if state.batch_idx:
            loop.restore_rng()
        loop.begin_epoch()
        first = state.batch_idx
        state.batches = enumerate(feed.starting_at(first), first)
        complete = False
        try:
            for _, batch in state.batches:
                loop.batch_is_open = True
                yield batch
                if loop.batch_is_open:  # without a step
                    loop.end_batch()
            feed.finish()
            complete = True
        finally:
            state.batches = None
            self._left = not complete
            if complete:
                loop.end_epoch()
