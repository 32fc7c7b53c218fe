# Written by tools/write_aliases.py
"""Lightning's path to MPIEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import MPIEnvironment as MPIEnvironment
