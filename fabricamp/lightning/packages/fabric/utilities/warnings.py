"""The category of warnings that may be wrong."""

from __future__ import annotations

import warnings

from fabricamp.lightning.packages.fabric.utilities.rank_zero import (
    LightningDeprecationWarning as LightningDeprecationWarning,
)


class PossibleUserWarning(UserWarning):
    """A warning that may be wrong: of those of fabricamp none is, they are log messages."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Switches warnings of the category :class:`PossibleUserWarning` off, of one module or of all."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
