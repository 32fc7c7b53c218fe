# Written by tools/write_aliases.py
"""Lightning's path to SLURMEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import SLURMEnvironment as SLURMEnvironment
