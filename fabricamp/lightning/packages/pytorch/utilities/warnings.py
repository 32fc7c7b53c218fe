# Written by tools/write_aliases.py
"""Lightning's path to the category of warnings that may be wrong."""

from fabricamp.lightning.packages.fabric.utilities.warnings import (
    LightningDeprecationWarning as LightningDeprecationWarning,
)
from fabricamp.lightning.packages.fabric.utilities.warnings import PossibleUserWarning as PossibleUserWarning
from fabricamp.lightning.packages.fabric.utilities.warnings import (
    disable_possible_user_warnings as disable_possible_user_warnings,
)
