"""The category of warnings that may be wrong."""

from __future__ import annotations

import warnings

from fabricamp.lightning.packages.fabric.utilities.rank_zero import (
    LightningDeprecationWarning as LightningDeprecationWarning,
)


class PossibleUserWarning(UserWarning):
    """The category of warnings that may be wrong; fabricamp issues none, because its own are log messages."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Turns off warnings of the category :class:`PossibleUserWarning`, for one module or for all."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
