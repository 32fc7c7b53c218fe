"""Where on the loggers' axis a value stands: at the number of its step, from 0, with the epoch as one more value."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricamp.loggers.delivery import Delivery
    from fabricamp.state import RunState


class LogAxis:
    """Gives ``delivery`` what was logged as Lightning does; a value logged as "step" is the axis itself."""

    def __init__(self, state: RunState, delivery: Delivery) -> None:
        self._state = state
        self._delivery = delivery

    def deliver(self, values: Mapping[str, float], step: int) -> None:
        """Takes the values of a flush, an epoch or an evaluation, and the number of steps that were done."""
        rest = {name: value for name, value in values.items() if name != "step"}
        if "step" in values:
            self._delivery.log_metrics(rest, int(values["step"]))
        else:
            self._delivery.log_metrics({"epoch": self._state.epoch, **rest}, self._state.place_of(step))
