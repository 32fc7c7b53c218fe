"""Places values on the loggers' axis: at the number of their step, from 0, with the epoch as one more value."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricamp.loggers.logger_collection import LoggerCollection
    from fabricamp.state import RunState


def deliver(state: RunState, delivery: LoggerCollection, values: Mapping[str, float], step: int) -> None:
    """Logs the values of a flush, an epoch or an evaluation, as Lightning does; a value called "step" sets the axis position.

    ``step`` is the number of optimizer steps done.
    """
    rest = {name: value for name, value in values.items() if name != "step"}
    if "step" in values:
        delivery.log_metrics(rest, int(values["step"]))
    else:
        delivery.log_metrics({"epoch": state.epoch, **rest}, state.place_of(step))
