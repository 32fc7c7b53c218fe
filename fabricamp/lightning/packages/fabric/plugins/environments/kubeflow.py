# Written by tools/write_aliases.py
"""Lightning's path to KubeflowEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import KubeflowEnvironment as KubeflowEnvironment
