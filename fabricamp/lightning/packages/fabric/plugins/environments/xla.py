# Written by tools/write_aliases.py
"""Lightning's path to XLAEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import XLAEnvironment as XLAEnvironment
