# Written by tools/write_aliases.py
"""Lightning's path to ClusterEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
