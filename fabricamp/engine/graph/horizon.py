"""The number of steps that one launch may make: up to the next step after which the host has to act."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabricamp.engine.parts import FitParts


def steps_of_a_launch(most: int, distances: Iterable[float]) -> int:
    """Returns ``most`` if all boundaries are at least ``most`` steps away, else 1."""
    return most if min(distances, default=math.inf) >= most else 1


def to_next(done: int, every: float) -> float:
    """Returns the number of steps from ``done`` to the next multiple of ``every``; inf if ``every`` is 0 or inf (never)."""
    return every - done % every if 0 < every < math.inf else math.inf


class Horizon:
    """Computes the distance to the next boundary of a fit.

    ``holds``: functions from a step to the next step after which a callback's hooks have to run before another step does.
    """

    def __init__(self, parts: FitParts, most: int, holds: Sequence[Callable[[int], float]]) -> None:
        self._parts = parts
        self._state = parts.state
        self._settings = parts.limits.settings
        self._most = most
        self._holds = holds

    def steps(self, length: float, ahead: int = 0) -> int:
        """Returns the number of steps of the next launch, or of the launch ``ahead`` steps later.

        ``length``: the number of batches of the epoch; inf if unknown.
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
        """Returns the number of steps before the next validation, except those by time and at the end of an epoch.

        These are checked between launches anyway.
        """
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
