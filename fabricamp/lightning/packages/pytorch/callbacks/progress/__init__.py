# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.callbacks.progress``."""

import fabricamp.callbacks.progress
from fabricamp.callbacks.progress import *  # noqa: F403

__all__ = []
__all__ += fabricamp.callbacks.progress.__all__
