"""Warns once, without a wait, if the ranks' backward passes reached different parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fabricamp.ops.uploads import is_capturing

logger = logging.getLogger("fabricamp")

_NAMED_AT_MOST = 8
_LOOK_EVERY = 64


def listed(names: Sequence[str]) -> str:
    """Returns the first few names, and the number of the others."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


class UnusedParamsReport:
    """Checks in a later step whether other ranks had gradients that this rank lacked."""

    def __init__(self, names: Sequence[str], rank: int) -> None:
        self._names = names
        self._rank = rank
        self._warned = False
        self._last_missing: Collection[int] = ()
        self._times = 0  # how often the same parameters were missing in a row
        self._pending: tuple[Tensor, Collection[int], torch.cuda.Event | None] | None = None

    def note(self, present: Tensor, missing: Collection[int]) -> None:
        """Starts a copy of the flags ``present`` to the host, unless the warning was given; ``missing`` are this rank's indices.

        On a GPU, if the same parameters are missing in every step, only every 64th step is checked.
        """
        if self._warned or self._pending is not None or is_capturing(present.device):
            return
        event = None
        if present.device.type == "cuda":
            self._times = self._times + 1 if missing == self._last_missing else 0
            self._last_missing = missing
            if self._times % _LOOK_EVERY:
                return
            event = torch.cuda.Event()
            host = torch.empty(present.shape, dtype=present.dtype, device="cpu", pin_memory=True)
            host.copy_(present, non_blocking=True)
            event.record()
        else:
            host = present.clone()
        self._pending = host, missing, event
        self.look()

    def tell_of_delay(self, missing: Collection[int], behind: int) -> None:
        """Warns once that messages were sent only after backward, because some of their gradients were missing."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "rank %d's backward gave no gradient to %s, so %d messages were sent only after its end; a gradient "
                "that only some ranks lack counts as zeros, one that all ranks lack is not changed (reported once; without "
                "message_size and triggers no message waits for single gradients)",
                self._rank, listed([self._names[index] for index in sorted(missing)]), behind,
            )  # fmt: skip

    def look(self) -> None:
        """Warns about differences if the flags have arrived on the host; does not wait."""
        if self._pending is None:
            return
        host, missing, event = self._pending
        if event is not None and not event.query():
            return
        self._pending = None
        flags = host.tolist()
        elsewhere = [self._names[index] for index in sorted(missing) if flags[index]]
        if elsewhere:
            self._warned = True
            logger.warning(
                "rank %d's backward gave no gradient to %s, another rank's did; they count as zeros here, and the "
                "average is still over all ranks (reported once)",
                self._rank, listed(elsewhere),
            )  # fmt: skip
