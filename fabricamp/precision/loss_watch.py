"""The policies for non-finite gradients and losses, and the messages about them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabricamp.precision.loss_scaler import Overflow

logger = logging.getLogger("fabricamp")

NAN_POLICIES: Final = ("skip", "stop", "raise")
_MOST_NAMES: Final = 5


def described(overflow: Overflow, names: Sequence[str], step: int) -> str:
    """Returns a sentence that names the parameters, the ``step`` (a ``global_step``), the loss and the scale of an overflow."""
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return (
        f"the gradients{' of ' if names else ''}{shown} were not finite at step {step} (loss {overflow.loss:g}, "
        f"loss scale {overflow.scale:g})"
    )


class LossWatch:
    """Receives logged values and warns once per loss if it is not finite; used if nothing checks the gradients.

    A logged value counts as a loss if its name contains "loss".
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        """Checks the values of a flush."""
        for name, value in values.items():
            if math.isfinite(value) or "loss" not in name.lower() or name in self._told:
                continue
            self._told.add(name)
            logger.warning(
                "%s is %g at step %d, and training goes on; Trainer(nan_policy='stop') or 'raise' ends it at the first "
                "gradient that is not finite, with the weights from before and the parameter's name",
                name, value, step,
            )  # fmt: skip
