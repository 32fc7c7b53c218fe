# Written by tools/write_aliases.py
"""Lightning's path to LSFEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import LSFEnvironment as LSFEnvironment
