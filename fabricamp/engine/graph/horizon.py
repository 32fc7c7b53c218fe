"""How far a launch of several steps may go: to the next place at which something has to happen between two steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabricamp.engine.parts import FitParts


def steps_of_a_launch(most: int, distances: Iterable[float]) -> int:
    """Returns ``most`` where all boundaries are at least so many steps away, else 1."""
    return most if min(distances, default=math.inf) >= most else 1


def to_next(done: int, every: float) -> float:
    """Returns how many steps lie between ``done`` and the next multiple of ``every``; inf where that is 0 or inf: never."""
    return every - done % every if 0 < every < math.inf else math.inf


class Horizon:
    """Knows the boundaries of a fit; ``holds``: at which step, from a given one on, a callback's hooks may not be late."""

    def __init__(self, parts: FitParts, most: int, holds: Sequence[Callable[[int], float]]) -> None:
        self._parts = parts
        self._state = parts.state
        self._settings = parts.limits.settings
        self._most = most
        self._holds = holds

    def steps(self, length: float, ahead: int = 0) -> int:
        """Returns how many steps the next launch makes, or that behind ``ahead`` steps from now on.

        ``length``: how many batches the epoch has, inf where nobody knows.
        """
        state, settings = self._state, self._settings
        left = length - state.batch_idx - ahead
        if not self._most <= left < math.inf:
            return 1
        step = state.global_step + ahead
        distances = [
            to_next(step, settings.log_every_n_steps),
            self._to_validation(ahead),
            *(hold(step) - step for hold in self._holds),
        ]
        distances += [limit - step for limit in (settings.max_steps, settings.min_steps) if limit > step]
        return steps_of_a_launch(self._most, distances)

    def _to_validation(self, ahead: int) -> float:
        """How many steps lie before the next validation; the end of an epoch and minutes are looked at between launches anyway."""
        limits, state, every_epochs = self._parts.limits, self._state, self._settings.check_val_every_n_epoch
        if self._parts.validate is None:
            return math.inf
        if limits.validation_times is not None:
            return to_next(state.global_step + ahead, limits.validation_times.steps)
        if every_epochs is None:
            return to_next(state.batches_done + ahead, limits.validate_every)
        if (state.epoch + 1) % every_epochs:
            return math.inf
        return to_next(state.batch_idx + ahead, limits.validate_every)
