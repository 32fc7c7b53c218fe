# Written by tools/write_aliases.py
"""Lightning's path to the table of a module's layers."""

import fabricamp.lightning.packages.pytorch.utilities.model_summary
from fabricamp.lightning.packages.pytorch.utilities.model_summary import *  # noqa: F403

__all__ = []
__all__ += fabricamp.lightning.packages.pytorch.utilities.model_summary.__all__
