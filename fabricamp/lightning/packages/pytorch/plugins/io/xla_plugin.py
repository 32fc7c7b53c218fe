# Written by tools/write_aliases.py
"""Lightning's path to XLACheckpointIO."""

from fabricamp.lightning.packages.fabric.plugins.io import XLACheckpointIO as XLACheckpointIO
